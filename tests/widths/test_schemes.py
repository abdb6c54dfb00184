"""Tables of parametrizations against the literature, and which scheme is found."""

import pytest

from featlearn.widths.schemes import TABLES, WeightPowers, nearest

# (multiplier, standard deviation, learning rate) as powers of the width n, for input, hidden and output weights, as
# printed: Yang et al. 2022, Table 3, 8 and 9 for muP, Yang & Hu 2021, Table 1 for the others
PRINTED = {
    ("mup", "proportional"): [
        ((0, 0, 1), (0, -0.5, 0), (0, -1, -1)),  # Table 3
        ((0, 0, 1), (0, -0.5, 0), (-1, 0, 1)),  # Table 8
        ((0.5, -0.5, 0), (0, -0.5, 0), (-0.5, -0.5, 0)),  # Table 9
    ],
    ("mup", "normalized"): [
        ((0, 0, 0), (0, -0.5, -1), (0, -1, -1)),
        ((0, 0, 0), (0, -0.5, -1), (-1, 0, 0)),
        ((0.5, -0.5, -0.5), (0, -0.5, -1), (-0.5, -0.5, -0.5)),
    ],
    ("standard", "proportional"): [((0, 0, 0), (0, -0.5, 0), (0, -0.5, 0))],
    ("standard", "normalized"): [((0, 0, 0), (0, -0.5, 0), (0, -0.5, 0))],
    ("ntk", "proportional"): [((0, 0, 0), (-0.5, 0, 0), (-0.5, 0, 0))],
    ("ntk", "normalized"): [((0, 0, 0), (-0.5, 0, 0), (-0.5, 0, 0))],
    ("mean_field", "proportional"): [((0, 0, 1), (-0.5, 0, 1), (-1, 0, 1))],
    ("mean_field", "normalized"): [((0, 0, 0), (-0.5, 0, 0), (-1, 0, 0))],
}
KINDS = ("input", "hidden", "output")
FAN_IN = {"input": 0, "hidden": 1, "output": 1}


def derived(powers, kind: str, update: str) -> tuple[float, float]:
    """Gain and rate: n_in entries add up as a root at random, and in full along a gradient."""
    multiplier, deviation, lr = powers
    times = 2 if update == "proportional" else 1
    return multiplier + deviation + FAN_IN[kind] / 2, times * multiplier + lr + FAN_IN[kind]


@pytest.mark.parametrize(("name", "update"), PRINTED)
def test_tables_follow_from_the_printed_ones(name: str, update: str):
    scheme = next(one for one in TABLES[update] if one.name == name)
    for printed in PRINTED[name, update]:
        for kind, powers in zip(KINDS, printed, strict=True):
            gain = scheme.readout_gain if kind == "output" else 0.0
            assert derived(powers, kind, update) == (gain, scheme.rates[kind])


def weights(name: str, update: str, form: int = 0, **changed: tuple[float, float]) -> list[WeightPowers]:
    """A network of two hidden weights, with (gain, rate) of some layers changed."""
    first, hidden, last = PRINTED[name, update][form]
    found = []
    for layer, kind, powers in (
        ("a", "input", first),
        ("b", "hidden", hidden),
        ("c", "hidden", hidden),
        ("d", "output", last),
    ):
        gain, rate = derived(powers, kind, update)
        more = changed.get(layer, (0.0, 0.0))
        stored = powers[1] + 0.5  # spectral norm of random entries
        found.append(WeightPowers(layer, kind, gain + more[0], 0.02, rate + more[1], 0.02, stored))
    return found


@pytest.mark.parametrize(("name", "update"), PRINTED)
def test_every_scheme_is_found_in_every_form(name: str, update: str):
    for form in range(len(PRINTED[name, update])):
        found = nearest(weights(name, update, form), update)
        # a readout of order one behind 1 / n under SGD is what mean field is
        same = "mean_field" if (name, update, form) == ("mup", "proportional", 1) else name
        assert (found.scheme.name, found.shift, found.deviating) == (same, 0.0, 0)


@pytest.mark.parametrize("update", ["proportional", "normalized"])
@pytest.mark.parametrize("layer", "abcd")
@pytest.mark.parametrize("error", [(0.5, 0.0), (-0.5, 0.0), (0.0, 1.0), (0.0, -1.0)])
def test_one_wrong_layer_leaves_mup_mup(update: str, layer: str, error: tuple[float, float]):
    found = nearest(weights("mup", update, **{layer: error}), update)
    assert (found.scheme.name, found.shift, found.deviating) == ("mup", 0.0, 1)


def test_rates_that_are_off_together_are_one_cause():
    every = dict.fromkeys("abcd", (0.0, -1.0))
    found = nearest(weights("mup", "proportional", **every), "proportional")
    assert (found.scheme.name, found.shift, found.deviating) == ("mup", -1.0, 0)
