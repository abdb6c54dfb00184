"""Audits: made once for a graph, made again when it has changed, and never trusted beyond what they have seen."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import measurement
from featlearn.audit.audit import AUDITED, Audit
from featlearn.audited_model import AuditedModel
from featlearn.errors import CoupledSamplesError, InputValueError
from featlearn.gradients.captured import Chunk
from featlearn.ops import registry
from tests.references.jacobian import dense_ntk


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(3, 5, 2), nn.Softmax(1), nn.Flatten(), nn.Linear(15, 4)).double()


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each audit had."""
    seen: list[int] = []
    original = measurement.audited

    def counted(chunk: Chunk, generator: torch.Generator) -> Audit:
        seen.append(len(chunk.outputs))
        return original(chunk, generator)

    monkeypatch.setattr(measurement, "audited", counted)
    return seen


def inputs(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_graph_that_was_audited_is_not_audited_again(audits: list[int]):
    torch.manual_seed(0)
    model = network()
    session = fl.Session(model, inputs(30))
    for seed in range(4):
        x = inputs(30, seed)
        torch.testing.assert_close(session.ntk(x=x, outputs="full"), dense_ntk(model, x, outputs="full"))
    assert audits == [AUDITED]


def test_every_call_of_the_function_audits(audits: list[int]):
    model = network()
    for _ in range(3):
        fl.ntk(model, inputs(30))
    assert audits == [AUDITED] * 3


def test_weights_that_have_moved_are_measured_as_they_are(audits: list[int]):
    torch.manual_seed(0)
    model = network()
    session = fl.Session(model, inputs(25))
    session.ntk()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))
    assert audits == [AUDITED]


def replaced(model: nn.Sequential) -> None:
    model[1] = nn.LogSoftmax(1)


def lengthened(model: nn.Sequential) -> None:
    model.append(nn.Tanh())


def frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


@pytest.mark.parametrize("change", [replaced, lengthened, frozen])
def test_another_graph_is_audited(change: Callable[[nn.Sequential], None], audits: list[int]):
    torch.manual_seed(0)
    model = network()
    session = fl.Session(model, inputs(25))
    session.ntk()
    change(model)
    for _ in range(2):
        torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))
    assert len(audits) == 2


def test_a_graph_that_comes_back_is_known(audits: list[int]):
    model = network()
    session, kept = fl.Session(model, inputs(25)), model[1]
    session.ntk()
    replaced(model)
    session.ntk()
    model[1] = kept
    torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))
    assert len(audits) == 2


def test_both_probes_of_a_cross_kernel_are_audited_once(audits: list[int]):
    torch.manual_seed(0)
    model, x, x2 = network(), inputs(25), inputs(4, 1)
    session = fl.Session(model, x)
    for _ in range(2):
        torch.testing.assert_close(session.ntk(x2), dense_ntk(model, x, x2))
    assert audits == [AUDITED]  # the second batch has the same graph


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
    model = Coupled().double()
    session = fl.Session(model, torch.randn(samples, 4, dtype=torch.float64))
    session.ntk()
    model.share = 0.3
    with pytest.raises(CoupledSamplesError, match="depend on the other samples"):
        session.ntk()


class Cancelling(nn.Module):
    """Large terms that cancel, and an error of theirs that depends on the batch, as rounding does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up, self.down = nn.Linear(4, 2), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up + self.down + 1e-16 * self.up.detach() * len(x)


def test_weights_that_have_grown_are_not_taken_for_coupling():
    torch.manual_seed(0)
    model = Cancelling().double()
    session = fl.Session(model, torch.randn(40, 4, dtype=torch.float64))
    session.ntk()
    with torch.no_grad():
        model.up.fill_(1e11)
        model.down.fill_(-1e11)
    torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))


def test_gradients_that_have_become_too_small_are_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)), torch.randn(30, 4)
    session = fl.Session(model, x, parameters="0.*")
    session.ntk()
    with torch.no_grad():
        model[2].weight.mul_(1e-24)
    with pytest.raises(InputValueError, match="cannot hold"):
        session.ntk()


class Turned(nn.Module):
    """The same nodes and shapes, sequence first or batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.order = nn.Linear(3, 3), nn.Linear(3, 2), (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.tanh(self.inner(x.permute(self.order).contiguous()))
        return self.last(turned.permute(self.order).clone(memory_format=torch.contiguous_format)).sum(1)


@pytest.mark.parametrize("samples", [6, 7, 24])
def test_sample_axes_that_have_moved_are_found_again(samples: int):
    torch.manual_seed(0)
    model = Turned().double()
    session = fl.Session(model, torch.randn(samples, samples, 3, dtype=torch.float64))
    for model.order in ((0, 1, 2), (1, 0, 2), (0, 1, 2)):
        torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))


def test_rules_of_your_own_are_checked_on_every_batch(monkeypatch: pytest.MonkeyPatch):
    """This one is right when it is audited, and wrong later."""
    built_in, factors = registry._RULES["ConvolutionBackward0"], [1.0]

    def own(use: fl.ops.Use) -> Any:
        form = built_in(use)
        if isinstance(form, fl.ops.Outer):
            return dataclasses.replace(form, grads=lambda grad: factors[-1] * form.grads(grad))
        return form

    monkeypatch.setitem(registry._RULES, "ConvolutionBackward0", own)
    model = network()
    session = fl.Session(model, inputs(25))
    for factor in (1.0, 2.0, 1.0):
        factors.append(factor)
        torch.testing.assert_close(session.ntk(), dense_ntk(model, session.x))


def test_the_collector_is_as_it_was():
    model, x = network(), inputs(7)
    for wanted in (True, False):
        gc.enable() if wanted else gc.disable()
        try:
            fl.ntk(model, x)
            assert gc.isenabled() is wanted
        finally:
            gc.enable()


@pytest.mark.parametrize("reuse", [False, True])
def test_no_graph_waits_for_the_collector(reuse: bool):
    model, x = network(), inputs(7)
    gc.collect()
    gc.disable()
    try:
        with AuditedModel(model).measuring([x], reuse=reuse) as measured:
            chunk = weakref.ref(measured.chunk(measured.batches[0], 0, 7))
            example = weakref.ref(measured.example())
            assert (chunk() is not None) is reuse
        del measured
        assert chunk() is None
        assert example() is None
    finally:
        gc.enable()


class NearZero(nn.Module):
    """A unit that is zero for one sample, but for what stands for rounding: it differs with the number of samples."""

    def __init__(self, x: Tensor, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(5, x.shape[1], generator=generator))
        self.second = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.shift = torch.zeros(5)
        self.shift[2] = (x @ self.first.T)[3, 2].detach()

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first.T - self.shift
        return (h + (1e-9 if len(x) % 2 else -1e-9)).relu() @ self.second.T


@pytest.mark.parametrize("seed", range(8))
def test_a_unit_at_zero_is_no_influence_between_samples(seed: int):
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(100 + seed))
    model = NearZero(x, seed)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    clear = torch.tensor([0, 1, 2, 4, 5, 6])  # of the other sample both values are right
    found, expected = (kernel.double()[clear][:, clear] for kernel in (fl.ntk(model, x), dense_ntk(model, x)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, before, model.parameters()))


class KeyBias(nn.Module):
    """Attention with a bias on its keys, which the softmax ignores."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6, dtype=dtype)
        self.v, self.readout = nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        return self.readout((scores.softmax(-1) @ self.v(x)).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verify", [False, True])
def test_gradients_of_nothing_but_rounding_are_measured(dtype: torch.dtype, verify: bool):
    torch.manual_seed(0)
    model, x = KeyBias(dtype), torch.randn(11, 4, 6, dtype=dtype)
    kernel = fl.ntk(model, x, parameters="k.bias", verify=verify)
    assert float(kernel.abs().max()) < torch.finfo(dtype).eps ** 1.5
    (planned,) = fl.plan(model, x, parameters="k.bias").parameters
    assert planned.route != "fallback"
    expected = dense_ntk(model.double(), x.double(), by="parameter")["q.bias"]
    both = fl.ntk(model.to(dtype), x, parameters=["k.bias", "q.bias"]).double()
    torch.testing.assert_close(both, expected, rtol=0, atol=30 * torch.finfo(dtype).eps)


def test_a_wrong_rule_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch):
    """Deep layers with large weights amplify the last digits, to less than what a wrong rule changes."""
    from featlearn.audit import audit

    torch.manual_seed(0)
    layers = [part for _ in range(16) for part in (nn.Linear(20, 20), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(20, 2)), torch.randn(40, 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    assert "fallback" not in {parameter.route for parameter in fl.plan(model, x).parameters}
    right = audit._weighted_sum
    monkeypatch.setattr(audit, "_weighted_sum", lambda g, w: (1.01 * right(g, w)[0], right(g, w)[1]))
    routes = [parameter.route for parameter in fl.plan(model, x).parameters]
    assert routes.count("fallback") >= len(routes) - 1
