"""Every way to contract, capture and confirm, forced in turn, gives the kernel of the dense Jacobian."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import measurement
from featlearn.audit import audit
from featlearn.audit.audit import AUDITED, Audit
from featlearn.contraction import blocking, gram, windows
from featlearn.contraction.gram import Route
from featlearn.gradients import formed
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import Graph, splits
from featlearn.planning import kernel_plan
from tests.references.jacobian import dense_jacobian, dense_ntk, kernel_of


def images() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, (2, 3), stride=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 4, 2, dilation=(1, 2), padding=(0, 1), bias=False),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x = torch.randn(7, 2, 7, 6)
    model(x[:1])
    return model, x, torch.randn(4, 2, 7, 6)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.norm = nn.Embedding(6, 5), nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + torch.tanh(self.mix(self.norm(torch.tanh(self.mix(x)))))
        return (x @ self.table.weight.T)[:, -1, :3]


def sequences() -> tuple[nn.Module, Tensor, Tensor]:
    return Sequences(), torch.randint(6, (7, 4)), torch.randint(6, (5, 4))


def perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.randn(40, 4), torch.randn(9, 4)


@pytest.fixture(params=[images, sequences, perceptron], ids=lambda build: build.__name__)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, x, x2 = request.param()
    finally:
        torch.set_default_dtype(default)
    return model.double(), x, x2


def assert_exact(case: tuple[nn.Module, Tensor, Tensor], *options: dict[str, object]) -> None:
    """Every mode, of one batch and of two, under each of the options."""
    model, x, x2 = case
    first, second = dense_jacobian(model, x), dense_jacobian(model, x2)
    for outputs in ("sum", "each", "full"):
        for other, jacobian in ((None, first), (x2, second)):
            expected = kernel_of(first, jacobian, outputs)
            for chosen in options or ({},):
                found = fl.ntk(model, x, x2=other, outputs=outputs, **chosen)  # type: ignore[call-overload]
                assert float((found - expected).abs().max()) <= 1e-11 * float(expected.abs().max())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("route", list(Route))
def test_both_routes(
    case: tuple[nn.Module, Tensor, Tensor], route: Route, shifted: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gram, "_route", lambda *_: route)
    monkeypatch.setattr(kernel_plan, "costs", lambda *_: {one: 0.0 if one is route else 1.0 for one in Route})
    monkeypatch.setattr(gram, "elementwise_cost", lambda device: -1e6 if shifted else 1e6)
    monkeypatch.setattr(blocking, "PANEL", 3)
    monkeypatch.setattr(gram, "MIRRORED", 3)
    monkeypatch.setattr(windows, "cached_bytes", lambda: 1)
    assert_exact(case)


@pytest.mark.parametrize("least", [1, 4])
def test_gradients_are_formed_slice_by_slice(least: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv1d(9, 16, 3), nn.Flatten(), nn.Linear(32, 2)).double(),
        torch.randn(5, 9, 4).double(),
    )
    monkeypatch.setattr(gram, "_route", lambda *_: Route.GRADIENTS)
    monkeypatch.setattr(blocking, "formed_bytes", lambda: 1)
    monkeypatch.setattr(blocking, "LEAST", least)
    assert_exact((model, x, x[:3] + 1))


def test_all_directions_in_one_pass(case: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch):
    calls = []
    original = formed._batched_gradients

    def counted(*arguments: object) -> bool:
        found = original(*arguments)  # type: ignore[arg-type]
        calls.append(found is not None)
        return found

    monkeypatch.setattr(formed, "_batched_gradients", counted)
    monkeypatch.setattr(formed, "_worth_batching", lambda *_: True)
    assert_exact(case)
    assert calls
    assert all(calls)


@pytest.fixture
def audited_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each audit had."""
    sizes: list[int] = []
    original = measurement.audited

    def counted(part: Chunk, generator: torch.Generator) -> Audit:
        sizes.append(len(part.outputs))
        return original(part, generator)

    monkeypatch.setattr(measurement, "audited", counted)
    return sizes


def test_sample_axes_are_looked_for_on_a_few_samples(audited_sizes: list[int]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 3)).double()
    x = torch.randn(40, 4).double()
    assert_exact((model, x, x[:9] + 1))
    assert set(audited_sizes) == {AUDITED}


def test_sample_axes_of_an_audit_that_do_not_fit_are_looked_for(
    case: tuple[nn.Module, Tensor, Tensor], audited_sizes: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Audit, "axes_in", lambda *_: None)
    assert_exact(case)
    assert {len(case[1]), len(case[2])} <= set(audited_sizes)


@pytest.mark.parametrize("wrong", ["another axis", "no axis"])
def test_sample_axes_that_are_not_confirmed_are_corrected(
    case: tuple[nn.Module, Tensor, Tensor], wrong: str, monkeypatch: pytest.MonkeyPatch
):
    """Whatever a smaller batch claims to have seen, the kernel is exact."""
    original = Audit.axes_in

    def turned(self: Audit, graph: Graph, samples: int) -> object:
        found = original(self, graph, samples)
        if found is None:
            return None
        axes = dict(found[0])
        for node, layout in axes.items():
            others = list(splits(graph.output_shape((node, 0)), samples)) if layout is not None else []
            if others:
                axes[node] = next((other for other in others if other != layout), layout)
        return axes, found[1]

    monkeypatch.setattr(Audit, "axes_in", turned)
    if wrong == "no axis":
        monkeypatch.setattr(audit, "sample_layout", lambda *_: None)
    assert_exact(case)


class Turned(nn.Module):
    """Large batches come out of the first layer in another order: what a few samples show does not hold for them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 6), nn.Linear(6, 3), change

    def forward(self, x: Tensor) -> Tensor:
        order = self.change(torch.arange(len(x)))
        hidden = torch.tanh(self.first(x[order]))
        return self.second(hidden[torch.argsort(order)])


@pytest.mark.parametrize("least", [6, 30])
def test_a_large_batch_that_is_turned_inside_is_not_read_like_a_small_one(least: int):
    torch.manual_seed(0)
    model = Turned(lambda order: order.flip(0) if len(order) >= least else order).double()
    assert_exact((model, torch.randn(40, 4).double(), torch.randn(33, 4).double()))


class Read(nn.Module):
    """Reads every sequence at places of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(6, 3), nn.Linear(3, 7), nn.Linear(7, 2)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(self.table(ids))))
        return hidden.gather(1, places[:, :, None].expand(-1, -1, 2)).sum(1)


@pytest.mark.parametrize(
    ("places", "used"),
    [
        (lambda n: torch.full((n, 1), 8), 1),  # the last token
        (lambda n: torch.tensor([[2, 7]] * n), 2),
        (lambda n: torch.arange(n)[:, None] % 3 * 4, 3),  # another place in every sequence
        (lambda n: torch.arange(n)[:, None] % 9, 9),  # the first one has a single place, all together have all
    ],
    ids=["last", "two", "three", "all"],
)
def test_positions_without_a_gradient_are_left_out(places, used: int, monkeypatch: pytest.MonkeyPatch):
    seen = []
    original = formed.stacked

    def counted(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
        seen.append((len(grads[0]), grads[0].shape[1]))
        return original(grads, dtype)

    monkeypatch.setattr(formed, "stacked", counted)
    torch.manual_seed(0)
    model, ids = Read().double(), torch.randint(6, (20, 9))
    x, x2 = (ids, places(20)), (ids[:5], places(5))
    assert_exact((model, x, x2))  # type: ignore[arg-type]
    assert {positions for samples, positions in seen if samples == 20} == {used}


def test_a_chunk_of_all_samples_and_many_chunks_agree():
    torch.manual_seed(0)
    model, x, x2 = images()
    model, x, x2 = model.double(), torch.randn(60, 2, 7, 6).double(), x2.double()
    assert {group.chunk for group in fl.plan(model, x).groups} == {60}
    small = 400_000
    assert max(group.chunk for group in fl.plan(model, x, memory=small).groups) < 60
    assert_exact((model, x, x2), {}, {"memory": small})


def test_many_passes_on_a_cpu_have_few_samples_each(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x, x2 = (each.double() for each in perceptron())
    assert {group.chunk for group in fl.plan(model, x, outputs="each").groups} == {40}
    monkeypatch.setattr(kernel_plan, "MANY", 3)
    monkeypatch.setattr(kernel_plan, "LEAST_CHUNK", 4)
    # Two layers of 6, two of 5 and the outputs: 25 numbers for each of the 40 samples.
    monkeypatch.setattr(kernel_plan, "SMALL", 8 * 25 * 15)
    assert {group.chunk for group in fl.plan(model, x, outputs="each").groups} == {14}
    assert {group.chunk for group in fl.plan(model, x, outputs=1).groups} == {40}
    assert_exact((model, x, x2))


class TwoWays(nn.Module):
    """Inputs of one kind meet a square weight on the right, those of the other look it up, or meet its transpose."""

    def __init__(self, lookup: bool) -> None:
        super().__init__()
        self.lookup, self.weight, self.last = lookup, nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            hidden = x @ self.weight
        else:
            hidden = nn.functional.embedding(x, self.weight) if self.lookup else x[:, 0] @ self.weight.T
        return self.last(torch.tanh(hidden).mean(1))


@pytest.mark.parametrize("lookup", [True, False])
def test_both_sides_of_a_cross_kernel_have_their_entries_in_one_order(lookup: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gram, "_route", lambda *_: Route.GRADIENTS)
    torch.manual_seed(0)
    model, first = TwoWays(lookup).double(), torch.randn(7, 3, 6, dtype=torch.float64)
    second = torch.randint(6, (5, 4)) if lookup else torch.randn(5, 1, 4, 6, dtype=torch.float64)
    for x, x2 in ((first, second), (second, first)):
        expected = dense_ntk(model, x, x2)
        assert float((fl.ntk(model, x, x2=x2) - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
