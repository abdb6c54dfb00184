"""Phases of training: Table 1 cell by cell, the corollaries, and the phases that drawn networks show as they scale."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import featlearn as fl
from featlearn.theory import latent, phases
from featlearn.theory.phases import TABLE_1, Exponents, Phase

# (rate, gamma, phase) from top to bottom, as the corrected table has them
EXPECTED = {
    "ntk": [(0, -0.5, "kernel"), (0, -0.5, "kernel"), (1, -1, "learning"), (0, -0.5, "kernel")],
    "mean_field": [(0, -1, "frozen"), (1, -1, "learning"), (1, -1, "learning"), (0, -0.5, "kernel")],
    "xavier": [(0, 0, "learning"), (0, 0, "learning"), (0, 0, "learning"), (-2, 1, "kernel")],
    "kaiming": [(0, 0, "unstable"), (-1, 0, "kernel"), (1, -1, "learning"), (-1, 0, "kernel")],
    "lazy": [(0, 1, "unstable"), (-2, 1, "kernel"), (0, 0, "learning"), (-2, 1, "kernel")],
}
STARTS = {
    "ntk": (1, -0.5, 0, 0),
    "mean_field": (1, -1, 0, 0),
    "xavier": (1, 0, -1, -1),
    "kaiming": (1, 0, -1, 0),  # the print has u and w exchanged
    "lazy": (0, 1, 0, 0),
}


def test_table_1_cell_by_cell():
    assert list(TABLE_1) == list(EXPECTED)
    for name, column in TABLE_1.items():
        start = column.plain.exponents
        assert (start.d, start.gamma, start.u, start.w) == STARTS[name]
        found = [(cell.exponents.rate_u, cell.exponents.gamma, str(cell.phase)) for cell in column]
        assert found == EXPECTED[name], name
        assert all(cell.exponents.rate_u == cell.exponents.rate_w for cell in column)
        # Cor. 1 to 3 touch rate and gamma alone
        assert {(cell.exponents.d, cell.exponents.u, cell.exponents.w) for cell in column} == {
            (start.d, start.u, start.w)
        }


def test_the_lazy_column_needs_a_balanced_start():
    unbalanced = phases.column(TABLE_1["lazy"].plain.exponents, balanced_start=False, kernel_rate=-2)
    assert [cell.phase for cell in unbalanced] == ["unstable", "learning", "learning", "learning"]


def test_the_exchanged_kaiming_column_differs_at_unequal_rates():
    correct, printed = Exponents(1, 0, -1, 0), Exponents(1, 0, 0, -1)
    for rate in (-1, 0, 1):
        assert phases.classify(correct.at_rate(rate)) == phases.classify(printed.at_rate(rate))
    assert phases.classify(Exponents(1, 0, -1, 0, rate_u=-1, rate_w=0)) == Phase.KERNEL
    assert phases.classify(Exponents(1, 0, 0, -1, rate_u=-1, rate_w=0)) == Phase.UNSTABLE
    # fan-in scaling needs a small rate for the readout alone, and the stable rate knows
    column = phases.column(Exponents(1, 0, -1, 0, rate_u=-1, rate_w=0))
    assert column.stable.phase == Phase.KERNEL
    assert (column.stable.exponents.rate_u, column.stable.exponents.rate_w) == (-1, 0)
    exchanged = phases.column(Exponents(1, 0, 0, -1, rate_u=-1, rate_w=0)).stable.exponents
    assert (exchanged.rate_u, exchanged.rate_w) == (-2, -1)


@pytest.mark.parametrize(
    ("exponents", "phase"),
    [
        (Exponents(1, 0, -1, 0, 1, 1), "unstable"),  # Kaiming- of App. B.3 as printed: a rate that grows with the width
        (Exponents(1, 0, -1, 0, -1, -1), "kernel"),  # and as Table 1 needs it
        (Exponents(0, -0.5, 1, 1), "kernel"),  # Sec. 4.2, c_w = 1
        (Exponents(0, 0, 0, 0), "learning"),  # c_w = 0
        (Exponents(0, 0, 0, -1), "learning"),  # c_w = -1
        (Exponents(0, 0.5, 1, 1), "unstable"),  # c_w = 1 with the sign of App. B.4
        (Exponents(0, -1, 1, 1, 1, 1), "learning"),  # large initialization with gamma that cancels it
        (Exponents(0, 0, 1, 1, -1, -1), "kernel"),  # and without
    ],
)
def test_settings_of_the_paper(exponents: Exponents, phase: str):
    assert phases.classify(exponents) == phase


def test_a_target_without_correlation_has_no_feature_term():
    mean_field = Exponents(1, -1, 0, 0, 1, 1)
    assert phases.classify(mean_field) == Phase.LEARNING
    assert phases.classify(mean_field, correlated_target=False) == Phase.KERNEL
    assert phases.classify(Exponents(1, -2, 0, 0, 2, 2), correlated_target=False) == Phase.FROZEN
    assert phases.classify(mean_field, False, correlated_target=False) == Phase.LEARNING


def test_when_a_start_is_balanced():
    assert phases.start_is_balanced(Exponents(1, 0, 0, 0))
    assert not phases.start_is_balanced(Exponents(1, 0, 0, 0), independent=False)
    assert not phases.start_is_balanced(Exponents(0, 0, 0, 0))
    assert phases.start_is_balanced(Exponents(0, 0, 0, 0), zero_output=True)
    assert phases.start_is_balanced(Exponents(0, 0, 1, 0), independent=False)
    assert not phases.start_is_balanced(Exponents(0, 0, 1, 0, rate_u=1))


numbers = st.fractions(-3, 3, max_denominator=12)


@given(st.tuples(*[numbers] * 6))
def test_the_corollaries_do_what_they_say(values: tuple[Fraction, ...]):
    exponents = Exponents(*values)
    d, gamma, u, w, rate_u, rate_w = (float(value) for value in values)
    stable = exponents.at_rate(phases.stable_rate(exponents))
    assert phases.classify(stable) in (Phase.KERNEL, Phase.LEARNING)
    assert stable.rate_u - stable.rate_w == pytest.approx(rate_u - rate_w)
    for step in (0.01, -0.01):
        assert phases.classify(stable.at_rate(stable.rate + step)) == ("unstable" if step > 0 else "frozen")
    assert phases.classify(phases.learning_scaling(exponents)) == Phase.LEARNING
    assert phases.classify(phases.kernel_scaling(exponents)) == Phase.KERNEL
    equal = Exponents(d, gamma, u, w)
    size = d + max(u, w)
    assert phases.stable_rate(equal) == pytest.approx(min(-gamma, -2 * gamma - size))
    for above in (0.0, 0.7):
        limit = phases.learning_scaling(equal, size + above)
        assert (limit.gamma, limit.rate_u) == pytest.approx((-size - above, size + above))
        assert phases.classify(limit, balanced_start=False) == Phase.LEARNING
    limit = phases.kernel_scaling(equal, size - 0.7)
    assert (limit.gamma, limit.rate_w) == pytest.approx((-(2 * size - 0.7) / 2, size - 0.7))
    assert phases.classify(limit) == Phase.KERNEL
    assert phases.classify(limit, balanced_start=False) == Phase.LEARNING


def test_corollaries_refuse_rates_of_the_other_phase():
    ntk = TABLE_1["ntk"].plain.exponents
    with pytest.raises(fl.FeatlearnError, match=r"rate=0\.5, expected at least 1\.0"):
        phases.learning_scaling(ntk, 0.5)
    with pytest.raises(fl.FeatlearnError, match=r"rate=1\.0, expected less than 1\.0"):
        phases.kernel_scaling(ntk, 1)


def drawn(exponents: Exponents, kappa: float, seed: int, width: int, zero_output: bool = False) -> latent.Latent:
    """A network of this kappa; both parts of the speed are of order one at kappa = 1, whatever the width there."""
    setting = exponents.at(kappa, width=width, scale=width**-0.5)
    rng = np.random.default_rng(seed)
    x = np.array([0.6, -1.1])
    W = math.sqrt(setting.variance_w) * rng.normal(size=(setting.d, 2))
    u = math.sqrt(setting.variance_u) * rng.normal(size=setting.d)
    if zero_output:
        hidden = W @ x
        u = u - hidden * (hidden @ u) / (hidden @ hidden)
    arrays = (torch.tensor(part) for part in (u, W, x))
    rates = {"rate_u": setting.rate_u, "rate_w": setting.rate_w}
    return latent.solve(*arrays, -0.8 * width**0.5, times=[0.0], scale=setting.scale, **rates)


def slope(values: list[float], kappas: tuple[float, ...]) -> float:
    return math.log(values[-1] / values[0]) / math.log(kappas[-1] / kappas[0])


def geometric(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def measured_phase(draws: list[list[latent.Latent]], kappas: tuple[float, ...]) -> tuple[str, float]:
    """Definition 1 of the paper, by numbers: does t_c stay, does the NTK stay with kappa, does training change it?

    Also the power of t_c. One list of draws for each kappa; two parts of the change have opposite signs and may cancel
    in one draw.
    """
    clock = slope([geometric([float(path.time_scale) for path in paths]) for paths in draws], kappas)
    if abs(clock) > 0.1:
        return "frozen" if clock > 0 else "unstable", clock
    change = [np.sqrt(np.mean([float(path.final.ntk / path.ntk[0] - 1) ** 2 for path in paths])) for paths in draws]
    constant = abs(slope([geometric([float(path.ntk[0]) for path in paths]) for paths in draws], kappas)) < 0.1
    return "kernel" if constant and change[-1] < max(change[0] / 3, 1e-9) else "learning", clock


def random_exponents(rng: np.random.Generator) -> Exponents:
    """Steps of 1/2, so that terms that differ do so visibly; gamma such that some limits are stable."""
    d = float(rng.choice([0, 0.5, 1.0]))
    u, w, rate_u, rate_w = rng.integers(-2, 3, size=4) / 2
    free = Exponents(d, 0, u, w, rate_u, rate_w)
    stable = -max(free.feature_term, free.kernel_term) / 2  # both terms grow by 2 gamma
    return Exponents(d, stable + float(rng.choice([-0.5, 0, 0, 0, 0.25])), u, w, rate_u, rate_w)


def test_drawn_networks_show_the_phases_of_the_theory():
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(Phase, 0)
    ranges = {0: (5, (1e7, 1e9)), 0.5: (5, (1e4, 1e6)), 1: (1, (1e3, 1e5))}  # as far as the width stays small
    for seed in range(90):
        exponents, zero_output = random_exponents(rng), bool(rng.integers(2))
        width, kappas = ranges[exponents.d]
        draws = [[drawn(exponents, kappa, 3 * seed + i, width, zero_output) for i in range(3)] for kappa in kappas]
        balanced = phases.start_is_balanced(exponents, zero_output=zero_output)
        expected = phases.classify(exponents, balanced)
        phase, clock = measured_phase(draws, kappas)
        assert clock == pytest.approx(exponents.time_scale, abs=0.03), exponents
        assert phase == expected, (exponents, zero_output)
        counts[expected] += 1
    assert min(counts.values()) >= 10, counts


def test_at_a_fixed_width_exponents_do_not_decide():
    lazy = TABLE_1["lazy"].kernel.exponents
    moved = {
        zero_output: np.array(
            [
                1 - float(path.final.ntk / path.ntk[0])
                for path in (drawn(lazy, 1e6, seed, 4, zero_output) for seed in range(400))
            ]
        )
        for zero_output in (False, True)
    }
    assert np.abs(moved[True]).max() < 1e-8
    # 1 - sqrt(PQ) / ((P + Q) / 2) with P / (P + Q) ~ Beta(2, 2) for four units: mean 1 - 9 pi / 32
    generic = moved[False]
    assert abs(generic.mean() - (1 - 9 * math.pi / 32)) < 4 * generic.std() / math.sqrt(400)
    assert phases.classify(lazy, phases.start_is_balanced(lazy)) == Phase.LEARNING
    assert phases.classify(lazy, phases.start_is_balanced(lazy, zero_output=True)) == Phase.KERNEL


def test_the_initial_output_of_xavier_diverges_in_its_kernel_phase():
    xavier = TABLE_1["xavier"].kernel.exponents
    assert xavier.initial_output == 0.5
    spread = []
    for kappa in (1e2, 1e4):
        outputs = [float(drawn(xavier, kappa, seed, 1).output[0]) for seed in range(60)]
        spread.append(float(np.std(outputs)))
    assert slope(spread, (1e2, 1e4)) == pytest.approx(0.5, abs=0.08)  # 60 draws: log of a spread to 9 %


@pytest.mark.parametrize(
    ("axes", "stable"),
    [
        (("gamma", "rate"), False),
        (("rate_u", "rate_w"), False),
        (("u", "w"), False),
        (("d", "variance"), False),
        (("w", "gamma"), False),
        (("gamma", "rate_u"), True),
        (("rate_u", "rate_w"), True),
        (("u", "w"), True),
        (("d", "variance"), True),
        (("w", "gamma"), True),
    ],
)
def test_a_diagram_agrees_with_the_classifier_everywhere(axes: tuple[str, str], stable: bool):
    base = Exponents(1, -0.5, 0.25, -0.5, 0.25, 0)
    drawn_diagram = phases.diagram(base, *axes, x_range=(-1.5, 2), y_range=(-2, 1), points=15, at_stable_rate=stable)
    members = {"rate": ("rate_u", "rate_w"), "variance": ("u", "w")}
    rng = np.random.default_rng(0)

    def exponents(x: float, y: float) -> Exponents:
        changed = {name: getattr(base, name) for name in ("d", "gamma", "u", "w", "rate_u", "rate_w")}
        for axis, value in zip(axes, (x, y), strict=True):
            changed |= dict.fromkeys(members.get(axis, (axis,)), value)
        there = Exponents(**changed)
        return there.at_rate(phases.stable_rate(there)) if stable else there

    assert len(drawn_diagram.phases) == len(drawn_diagram.phases[0]) == 15
    for row, y in zip(drawn_diagram.phases, drawn_diagram.y_values.tolist(), strict=True):
        for phase, x in zip(row, drawn_diagram.x_values.tolist(), strict=True):
            assert phase == phases.classify(exponents(x, y))
    for x, y in rng.uniform((-1.5, -2), (2, 1), size=(300, 2)):
        inside = _inside((x, y), drawn_diagram.region)
        expected = drawn_diagram.inside if inside else drawn_diagram.outside
        assert phases.classify(exponents(x, y)) == expected
    for segment in drawn_diagram.stable:
        for share in (0.01, 0.5, 0.99):
            point = [a + share * (b - a) for a, b in zip(segment.start, segment.end, strict=True)]
            assert phases.classify(exponents(*point)) == segment.phase
            assert segment.phase in (Phase.KERNEL, Phase.LEARNING)


def _inside(point: tuple[float, float], corners: tuple[tuple[float, float], ...]) -> bool:
    """Left of every edge of a polygon that runs anticlockwise."""
    if not corners:
        return False
    turns = [
        (b[0] - a[0]) * (point[1] - a[1]) - (b[1] - a[1]) * (point[0] - a[0])
        for a, b in zip(corners, [*corners[1:], corners[0]], strict=True)
    ]
    return min(turns) >= 0


def test_the_diagram_of_width_has_both_stable_phases_on_its_line():
    found = phases.diagram(Exponents(1, 0, 0, 0), "gamma", "rate")
    assert found.inside == Phase.FROZEN
    lines = {segment.phase: (segment.start, segment.end) for segment in found.stable}
    # 2 gamma + rate + 1 = 0 below the mean-field point (-1, 1), gamma + rate = 0 above
    assert lines == {"kernel": ((0.5, -2.0), (-1.0, 1.0)), "learning": ((-1.0, 1.0), (-2.0, 2.0))}
    unbalanced = phases.diagram(Exponents(0, 0, 0, 0), "gamma", "rate", balanced_start=False)
    assert {segment.phase for segment in unbalanced.stable} == {"learning"}
    silent = phases.diagram(Exponents(1, 0, 0, 0), "gamma", "rate", correlated_target=False)
    assert {segment.phase for segment in silent.stable} == {"kernel"}


def test_a_plane_of_learning_limits_is_filled():
    found = phases.diagram(Exponents(1, -1, 0, 0, 1, 1), "u", "w")  # A = 0 everywhere
    assert (found.inside, found.outside) == (Phase.LEARNING, Phase.UNSTABLE)
    nowhere = phases.diagram(Exponents(1, 1, 0, 0, 1, 1), "u", "w")  # A > 0 everywhere
    assert (nowhere.inside, nowhere.region, nowhere.stable) == (None, (), ())
    assert {phase for row in nowhere.phases for phase in row} == {Phase.UNSTABLE}


def test_a_diagram_draws_itself():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    axes = phases.diagram(Exponents(1, 0, 0, 0), "gamma", "rate").plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["frozen", "unstable", "kernel", "learning"]
    assert axes.get_xlim() == (-2, 2)
    own = Figure().subplots()
    assert phases.diagram(Exponents(1, 0, 0, 0), "u", "w", at_stable_rate=True).plot(own) is own
    phases.diagram(Exponents(1, 1, 0, 0, 1, 1), "u", "w").plot(own)


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        (("gama", "rate"), {}, "did you mean 'gamma'"),
        (("rate", "rate_u"), {}, "move the same exponent"),
        (("gamma", "rate"), {"at_stable_rate": True}, "expected other axes"),
        (("gamma", "rate"), {"x_range": (1.0, 1.0)}, "expected first < last"),
    ],
)
def test_axes_that_make_no_plane_are_refused(axes: tuple[str, str], options: dict[str, object], message: str):
    with pytest.raises(fl.FeatlearnError, match=message):
        phases.diagram(Exponents(1, 0, 0, 0), *axes, **options)


def test_exponents_are_numbers():
    assert Exponents(1, Fraction(-1, 2), 0, 0) == Exponents(1.0, -0.5, 0.0, 0.0, 0.0, 0.0)
    assert Exponents(1, torch.tensor(-0.5), 0, 0).gamma == -0.5
    assert hash(Exponents(1, 0, 0, 0)) == hash(Exponents(1.0, 0.0, 0, 0))
    for wrong in ("1", True, Tensor([1.0, 2.0]), math.inf, None):
        with pytest.raises(fl.FeatlearnError, match=r"w.*expected one finite number"):
            Exponents(1, 0, 0, wrong)
    with pytest.raises(fl.FeatlearnError, match=r"kappa=0\.5"):
        Exponents(1, 0, 0, 0).at(0.5)


def test_hyperparameters_of_a_kappa():
    setting = Exponents(1, -0.5, 0, -1, 1, 0.5).at(100, width=3, rate=0.2, scale=2.0)
    assert setting == pytest.approx((300, 0.2, 1, 0.01, 20.0, 2.0))
    assert Exponents(0.5, 0, 0, 0).at(10).d == 3
