"""A Session of a model that changes: what an audit has found must not outlive what made it true."""

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.audit.audit import AUDITED
from featlearn.errors import CoupledSamplesError
from featlearn.measurement import spread
from tests.references.jacobian import dense_ntk
from tests.zoo.awkward import CASES
from tests.zoo.case import Case, Net, default_dtype
from tests.zoo.test_zoo import take, tensors_in

# As many as an audit has, which is also how many tokens there are; more; and so many that small parts are run as well.
SIZES = (AUDITED, 10, 20, 100)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def assert_exact(session: fl.Session, x: Any = None, tolerance: float = 1e-10, readout: Any = None) -> None:
    reference = dense_ntk(session.model, session.x if x is None else x, outputs="sum", readout=readout)
    kernel = session.ntk(x=x, outputs="sum")
    assert float((kernel - reference).abs().max()) <= tolerance * float(reference.abs().max())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Backward passes of each call that is appended."""
    counts: list[int] = []
    plain = torch.autograd.graph._engine_run_backward

    def counted(*arguments: Any, **named: Any) -> Any:
        counts[-1] += 1
        return plain(*arguments, **named)

    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", counted)
    return counts


def passes_of_ntk(passes: list[int], session: fl.Session, x: Any = None) -> int:
    passes.append(0)
    session.ntk(x=x)
    return passes[-1]


def changed(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape).to(p))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES[::5]])
def test_a_second_call_is_as_exact_as_the_first(case: Case):
    """With other weights, other samples and more of them."""
    model, x, _, readout = case.build()
    session = fl.Session(model, x, readout=readout)
    session.ntk()
    changed(model)
    assert_exact(session, x, case.tolerance, readout)
    samples = max(tensor.shape[0] for tensor in tensors_in(x) if tensor.dim())
    for _ in range(2 if samples > 1 else 0):
        more = take(x, torch.randint(samples, (20,)))
        assert_exact(session, more, case.tolerance, readout)
        changed(model)


class Ordered(nn.Module):
    """Works on its samples in an order of its own."""

    def __init__(self, there_and_back: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], deep: bool) -> None:
        super().__init__()
        self.there_and_back = there_and_back
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) if deep else nn.Linear(4, 2)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        there, back = self.there_and_back(x, key)
        return self.put_back(self.body(there), back)

    @staticmethod
    def put_back(h: Tensor, back: Tensor) -> Tensor:
        return h[back] if back.dim() == 1 else back @ h


def sorted_by_key(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    order = key.argsort(stable=True)
    return x[order], order.argsort()


def multiplied_by_key(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    matrix = torch.eye(len(x))[key.argsort(stable=True)]
    return matrix @ x, matrix.T


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("how", [sorted_by_key, multiplied_by_key])
def test_samples_that_come_in_another_order_than_before(how: Any, samples: int, deep: bool):
    """As in models that sort by length: the graph does not show in which order; nor do gradients, if not deep."""
    model, x = Ordered(how, deep), torch.randn(samples, 4)
    session = fl.Session(model, (x, torch.arange(samples)))
    assert_exact(session)
    assert_exact(session, (x, torch.randperm(samples)))
    assert_exact(session, (x, torch.arange(samples).flip(0)))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("how", [sorted_by_key, multiplied_by_key])
def test_samples_that_come_in_another_order_than_those_that_are_audited(how: Any, deep: bool):
    x, key = torch.randn(20, 4), torch.arange(20)
    assert not {1, 2} & set(range(20)[spread(20)])
    key[1], key[2] = 2, 1
    assert_exact(fl.Session(Ordered(how, deep), (x, key)))


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("kind", ["axes", "roll", "flip"])
def test_samples_along_another_axis_than_before(kind: str, samples: int):
    """As many tokens as an audit has samples: all shapes stay as they are."""
    model = Net(lambda self, x: self.back(self.linear(self.there(x).contiguous())).mean(1), linear=nn.Linear(4, 2))
    moves: dict[str, list[tuple[Callable[[Tensor], Tensor], ...]]] = {
        "axes": [(lambda h: h.permute(0, 1, 2),) * 2, (lambda h: h.permute(1, 0, 2),) * 2],
        "flip": [(lambda h: h.flip(1),) * 2, (lambda h: h.flip(0),) * 2],
        "roll": [(lambda h: h.roll(0, 0),) * 2, (lambda h: h.roll(2, 0), lambda h: h.roll(-2, 0))],
    }
    session = fl.Session(model, torch.randn(samples, AUDITED, 4))
    for model.there, model.back in (*moves[kind], *moves[kind]):
        assert_exact(session)


@pytest.mark.parametrize("samples", SIZES)
def test_outputs_that_are_reversed_since_are_refused(samples: int):
    def forward(self: Net, x: Tensor) -> Tensor:
        matrix = torch.eye(len(x))
        return (matrix.flip(0) if self.reversed else matrix) @ torch.tanh(self.linear(x))

    model = Net(forward, linear=nn.Linear(4, 2), reversed=False)
    session = fl.Session(model, torch.randn(samples, 4))
    session.ntk()
    model.reversed = True
    with pytest.raises(fl.FeatlearnError, match="depend"):
        session.ntk()


class Normalized(torch.autograd.Function):
    """Passes gradients on, or, switched on, divides them by their norm over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / (1 + grad.norm()) if ctx.on else grad, None


def coupled_by_mean(self: Net, h: Tensor) -> Tensor:
    return h + 0.001 * self.on * h.mean(0)


def coupled_by_hook(self: Net, h: Tensor) -> Tensor:
    if self.on:
        h.register_hook(lambda grad: grad / (1 + grad.norm()))
    return h


def coupled_by_function(self: Net, h: Tensor) -> Tensor:
    return Normalized.apply(h, self.on)


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("between", [coupled_by_mean, coupled_by_hook, coupled_by_function])
def test_samples_that_have_become_coupled_are_refused(between: Any, samples: int):
    model = Net(
        lambda self, x: self.last(between(self, torch.tanh(self.first(x)))),
        first=nn.Linear(4, 3),
        last=nn.Linear(3, 2),
        on=False,
    )
    session = fl.Session(model, torch.randn(samples, 4))
    assert_exact(session)
    for _ in range(2):
        model.on = True
        with pytest.raises(CoupledSamplesError):
            session.ntk()
        model.on = False
        assert_exact(session)


@pytest.mark.parametrize("samples", SIZES)
def test_batch_statistics_instead_of_running_ones(samples: int):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(samples, 4)
    model(x)
    session = fl.Session(model, x)
    assert_exact(session)
    norm, kept = model[1], (model[1].running_mean, model[1].running_var)
    norm.running_mean = norm.running_var = None
    with pytest.raises(CoupledSamplesError):
        session.ntk()
    norm.running_mean, norm.running_var = kept
    assert_exact(session)


def doubled_behind_the_first() -> Net:
    """A hook on an autograd node changes gradients where no rule can know: the audit sends `first` to the fallback."""

    def forward(self: Net, x: Tensor) -> Tensor:
        h = self.first(x)
        h.grad_fn.register_hook(lambda grads, _: tuple(None if grad is None else 2 * grad for grad in grads))
        return self.last(torch.tanh(h))

    return Net(forward, first=nn.Linear(4, 3), last=nn.Linear(3, 2))


@pytest.mark.parametrize("samples", SIZES)
def test_parameters_that_are_not_trusted_stay_so(samples: int):
    """An audit that is made anew, here because gradients vanish, does not forget what the one before has found."""
    model = doubled_behind_the_first()
    session = fl.Session(model, torch.randn(samples, 4))
    assert_exact(session)
    weight = model.last.weight.detach().clone()
    with torch.no_grad():
        model.last.weight.zero_()
    session.ntk(by="parameter")
    with torch.no_grad():
        model.last.weight.copy_(weight)
    assert_exact(session)


@pytest.mark.parametrize("samples", SIZES)
def test_an_audit_of_gradients_that_vanish_is_not_trusted(samples: int):
    """As behind a layer that begins at zero."""
    model = doubled_behind_the_first()
    session = fl.Session(model, torch.randn(samples, 4))
    nn.init.zeros_(model.last.weight)
    assert_exact(session)
    nn.init.normal_(model.last.weight)
    for _ in range(2):
        assert_exact(session)


@pytest.mark.parametrize("samples", SIZES)
def test_weights_that_are_untied_frozen_and_replaced(samples: int):
    model = Net(
        lambda self, x: self.head(torch.tanh(self.table(x).mean(1))),
        table=nn.Embedding(7, 5),
        head=nn.Linear(5, 7, bias=False),
    )
    model.head.weight = model.table.weight
    session = fl.Session(model, torch.randint(7, (samples, 6)))
    assert_exact(session)
    model.head.weight = nn.Parameter(torch.randn(7, 5))
    assert_exact(session)
    model.table.weight.requires_grad_(False)
    assert_exact(session)
    model.table = nn.Embedding(7, 5)
    assert_exact(session)
    assert_exact(fl.Session(copy.deepcopy(model), session.x))


def last_of_each(self: Net, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.arange(len(h)), (x[:, :, 0] > 0).sum(1) % h.shape[1]]


def some_tokens(self: Net, h: Tensor, x: Tensor) -> Tensor:
    return h[:, torch.tensor([4, 1])].mean(1)


def all_tokens(self: Net, h: Tensor, x: Tensor) -> Tensor:
    return h.mean(1)


class Doubled(torch.autograd.Function):
    """An op of which nothing is known."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2.0 * h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


def through_an_unknown_op(self: Net, h: Tensor, x: Tensor) -> Tensor:
    return Doubled.apply(h).mean(1)


@pytest.mark.parametrize(
    ("read", "confirmed"), [(last_of_each, 0), (some_tokens, 0), (all_tokens, 0), (through_an_unknown_op, 1)]
)
def test_a_second_call_asks_only_what_it_must(read: Any, confirmed: int, passes: list[int]):
    """One pass for each output; one more where the graph does not prove whose gradients are whose."""
    model = Net(
        lambda self, x: self.last(read(self, torch.tanh(self.first(x)), x)), first=nn.Linear(4, 3), last=nn.Linear(3, 2)
    )
    session = fl.Session(model, torch.randn(20, 7, 4))
    first = passes_of_ntk(passes, session)
    changed(model)
    assert passes_of_ntk(passes, session, torch.randn(20, 7, 4)) == 2 + confirmed < first
    assert_exact(session)


def test_a_call_that_fails_leaves_nothing_behind(passes: list[int]):
    def forward(self: Net, x: Tensor) -> Tensor:
        if len(x) == self.fails_at:
            raise RuntimeError("on purpose")
        return self.norm(torch.tanh(self.linear(x)))

    model = Net(forward, linear=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), fails_at=0)
    session = fl.Session(model, torch.randn(24, 4))
    model.linear.weight.grad = torch.ones(3, 4)
    before = copy.deepcopy(model.state_dict())
    passes_of_ntk(passes, session)
    for model.fails_at in (24, 7):
        session.forget()
        with pytest.raises(fl.FeatlearnError, match="on purpose"):
            session.ntk()
        assert gc.isenabled()
        assert model.training
        assert torch.equal(model.linear.weight.grad, torch.ones(3, 4))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.fails_at = 0
    assert passes_of_ntk(passes, session) == 3
    assert_exact(session)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Softmax(1)])
@pytest.mark.parametrize("one_session", [False, True])
def test_threads_share_a_model(activation: nn.Module, one_session: bool):
    model, x = nn.Sequential(nn.Linear(4, 9), activation, nn.Linear(9, 2)), torch.randn(20, 4)
    reference, found = fl.ntk(model, x), []
    shared = fl.Session(model, x)

    def measure() -> None:
        session = shared if one_session else fl.Session(model, x)
        found.extend(session.ntk() for _ in range(3))

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(torch.allclose(kernel, reference, rtol=1e-12) for kernel in found)
    assert gc.isenabled()
