"""Audits that are used again: once made, not made again while the graph is the same, and never trusted too far."""

import gc
import weakref

import pytest
import torch
from featlearn.capture import memory, pilots
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CoupledSamplesError, InputValueError
from featlearn.measurement import measuring
from featlearn.ops import registry
from tests.references.jacobian import dense_ntk


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(3, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(15, 4)).double()


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each audit had."""
    seen: list[int] = []
    original = pilots._audit

    def counted(model: nn.Module, probe: object, pilot: object, *rest: object) -> object:
        seen.append(len(pilot.indices))  # type: ignore[attr-defined]
        return original(model, probe, pilot, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pilots, "_audit", counted)
    return seen


def inputs(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_graph_that_was_audited_is_not_audited_again(audits: list[int]):
    torch.manual_seed(0)
    model = network()
    for seed, samples in enumerate((30, 30, 21)):
        x = inputs(samples, seed)
        torch.testing.assert_close(fl.ntk(model, x, outputs="full"), dense_ntk(model, x, outputs="full"))
    assert audits == [6]


def test_weights_that_have_moved_are_measured_as_they_are(audits: list[int]):
    torch.manual_seed(0)
    model, x = network(), inputs(25)
    fl.ntk(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x))
    assert audits == [6]


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x: (model, x.repeat(1, 1, 2)[:, :, :4].repeat(1, 1, 1)[:3], {}),  # fewer samples in the pilot
        lambda model, x: (model.__setitem__(1, nn.Sigmoid()) or model, x, {}),  # type: ignore[func-returns-value]
        lambda model, x: (model, x, {"parameters": "3.*"}),
        lambda model, x: (model, x, {"readout": lambda out: out.square()}),
        lambda model, x: (model, x, {"verify": True}),
        lambda model, x: (network(), x, {}),
    ],
    ids=["shape", "module", "parameters", "readout", "verify", "another"],
)
def test_another_graph_or_a_wish_to_verify_is_audited(change, audits: list[int]):
    torch.manual_seed(0)
    model, x = network(), inputs(25)
    fl.ntk(model, x)
    changed, x2, options = change(model, x)
    found = fl.ntk(changed, x2, **options)
    assert len(audits) == 2
    if not {"parameters", "readout"} & options.keys():
        torch.testing.assert_close(found, dense_ntk(changed, x2))


def test_both_probes_of_a_cross_kernel_are_remembered(audits: list[int]):
    torch.manual_seed(0)
    model, x, x2 = network(), inputs(25), inputs(4, 1)
    for _ in range(2):
        torch.testing.assert_close(fl.ntk(model, x, x2), dense_ntk(model, x, x2))
    assert audits == [6, 4]


class Coupled(nn.Module):
    """Adds the mean of the batch, which no graph shows, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(4, 7), nn.Linear(7, 2), 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden + self.share * hidden.detach().mean(0)))


@pytest.mark.parametrize("samples", [9, 40])
def test_samples_that_begin_to_influence_each_other_are_refused(samples: int):
    torch.manual_seed(0)
    model, x = Coupled().double(), torch.randn(samples, 4, dtype=torch.float64)
    fl.ntk(model, x)
    model.share = 0.3
    with pytest.raises(CoupledSamplesError, match="depend on the other samples"):
        fl.ntk(model, x)


class Cancelling(nn.Module):
    """Large terms that cancel, and an error of theirs that depends on the batch, as rounding does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up, self.down = nn.Linear(4, 2), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up + self.down + 1e-16 * self.up.detach() * len(x)


def test_weights_that_have_grown_are_not_taken_for_coupling(audits: list[int]):
    torch.manual_seed(0)
    model, x = Cancelling().double(), torch.randn(40, 4, dtype=torch.float64)
    fl.ntk(model, x)
    with torch.no_grad():
        model.up.fill_(1e11)
        model.down.fill_(-1e11)
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x))
    assert audits == [6, 6]


def test_gradients_that_have_become_too_small_are_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)), torch.randn(30, 4)
    fl.ntk(model, x, parameters="0.*")
    with torch.no_grad():
        model[2].weight.mul_(1e-24)
    with pytest.raises(InputValueError, match="cannot hold"):
        fl.ntk(model, x, parameters="0.*")


class Turned(nn.Module):
    """The same nodes and shapes, sequence first or batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.order = nn.Linear(3, 3), nn.Linear(3, 2), (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.tanh(self.inner(x.permute(self.order).contiguous()))
        return self.last(turned.permute(self.order).clone(memory_format=torch.contiguous_format)).sum(1)


@pytest.mark.parametrize("samples", [6, 24])
def test_sample_axes_that_have_moved_are_found_again(samples: int, audits: list[int]):
    torch.manual_seed(0)
    model, x = Turned().double(), torch.randn(samples, 6, 3, dtype=torch.float64)
    fl.ntk(model, x)
    model.order = (1, 0, 2)
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x))
    assert audits == [6, 6]


def test_rules_of_your_own_are_audited_every_time(audits: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry._RULES, "TanhBackward0", lambda use: None)
    model, x = network(), inputs(25)
    fl.ntk(model, x)
    fl.ntk(model, x)
    assert audits == [6, 6]


def test_nothing_is_kept_of_a_model_that_is_gone():
    model = network()
    fl.ntk(model, inputs(7))
    assert model in memory._audits
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_the_collector_is_as_it_was():
    model, x = network(), inputs(7)
    for wanted in (True, False):
        gc.enable() if wanted else gc.disable()
        try:
            fl.ntk(model, x)
            assert gc.isenabled() is wanted
        finally:
            gc.enable()


@pytest.mark.parametrize("remembering", [False, True])
def test_no_graph_waits_for_the_collector(remembering: bool):
    model, x = network(), inputs(7)
    gc.collect()
    gc.disable()
    try:
        with measuring(model, [x], remembering=remembering) as measured:
            seen = weakref.ref(measured.snapshot(measured.probes[0], 0, 7))
            pilot = weakref.ref(measured.pilots[0])
            assert (seen() is not None) is remembering
        del measured
        assert seen() is None
        assert pilot() is None
    finally:
        gc.enable()
