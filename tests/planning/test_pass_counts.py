"""What `fl.plan` says is what is run: forward and backward passes of a repeated call, checks included."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.gradients.directions import OutputSelection
from featlearn.graph import graph as graph_module
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning.kernel_plan import grouped
from featlearn.planning.plan import ParameterPlan
from tests.zoo.case import Net


def note_backward_passes(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], None]) -> None:
    """Call `note` with the first start of every backward pass."""

    def noting(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda starts, *args, **options: note(starts[0]) or differentiate(starts, *args, **options)

    monkeypatch.setattr(graph_module, "engine_gradients", noting(graph_module.engine_gradients))
    monkeypatch.setattr(torch.autograd, "grad", noting(torch.autograd.grad))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Forward passes by their number of samples, and backward passes from the outputs."""
    found: Counter[str] = Counter()
    outputs = ModelWithInputs.outputs

    def counting_outputs(self: ModelWithInputs, *args: Any) -> Tensor:
        result = outputs(self, *args)
        found["forward of one" if len(result) == 1 else "forward"] += 1
        return result

    def note(start: Any) -> None:
        from_outputs = isinstance(start, Tensor)
        found["backward of one" if from_outputs and start.dim() == 0 else "backward"] += from_outputs

    monkeypatch.setattr(ModelWithInputs, "outputs", counting_outputs)
    note_backward_passes(monkeypatch, note)
    return found


def own() -> nn.Module:
    parts = {"a": nn.Linear(3, 7), "b": nn.Linear(7, 2)}
    return Net(lambda self, x: self.b(torch.tanh(self.a(x))), **parts).double()


def with_an_index() -> nn.Module:
    """An index may reorder samples: that it does not is seen in all parts of the batch."""
    parts = {"a": nn.Linear(3, 7), "b": nn.Linear(7, 2)}
    return Net(lambda self, x: self.b(torch.tanh(self.a(x[torch.arange(len(x))]))), **parts).double()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()


class Twice(torch.autograd.Function):
    """An op of which nothing is known: twice its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


def behind_an_unknown_op() -> nn.Module:
    """Which sample a gradient of the first layer belongs to must be confirmed."""
    parts = {"a": nn.Linear(3, 7), "b": nn.Linear(7, 2)}
    return Net(lambda self, x: self.b(torch.tanh(Twice.apply(self.a(x)))), **parts).double()


def without_rule() -> nn.Module:
    """A parameter that goes to the fallback."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * torch.stack([self.scale * row.sum() for row in x]).cos()[:, None]

    return Net(forward, a=nn.Linear(3, 7), b=nn.Linear(7, 2), scale=nn.Parameter(torch.ones(()))).double()


@pytest.mark.parametrize("outputs", ["mean", "each", 1])
@pytest.mark.parametrize("build", [own, with_an_index, sequential])
@pytest.mark.parametrize("samples", [29, 130])
def test_passes_are_those_of_the_plan(build: Any, samples: int, outputs: Any, counted: Counter[str]):
    torch.manual_seed(0)
    session = fl.Session(build(), torch.randn(samples, 3, dtype=torch.float64))
    session.ntk(outputs=outputs)
    plan = session.plan(outputs=outputs)
    counted.clear()
    session.ntk(outputs=outputs)
    assert counted["forward"] == plan.passes + plan.check_passes
    assert counted["backward"] == plan.backward_passes
    assert counted["forward of one"] == counted["backward of one"] == plan.sample_passes == 0


def test_passes_of_several_chunks(counted: Counter[str]):
    torch.manual_seed(0)
    session = fl.Session(own(), torch.randn(130, 3, dtype=torch.float64), memory="400kB")
    for outputs in ("each", "sum"):
        session.ntk(outputs=outputs)
        plan = session.plan(outputs=outputs)
        counted.clear()
        session.ntk(outputs=outputs)
        assert counted["forward"] == plan.passes + plan.check_passes
        assert counted["backward"] == plan.backward_passes
    session.ntk(torch.randn(47, 3, dtype=torch.float64))
    cross = session.plan(torch.randn(47, 3, dtype=torch.float64))
    counted.clear()
    session.ntk(torch.randn(47, 3, dtype=torch.float64))
    assert cross.passes > 1
    assert counted["forward"] == cross.passes + cross.check_passes


def test_confirming_passes_are_counted(counted: Counter[str]):
    torch.manual_seed(0)
    session = fl.Session(behind_an_unknown_op(), torch.randn(29, 3, dtype=torch.float64))
    session.ntk()
    plan = session.plan()
    assert plan.confirmed
    counted.clear()
    session.ntk()
    assert counted["forward"] == plan.passes + plan.check_passes
    assert counted["backward"] == plan.backward_passes == 3


def test_passes_of_the_fallback_are_counted(counted: Counter[str]):
    torch.manual_seed(0)
    session = fl.Session(without_rule(), torch.randn(11, 3, dtype=torch.float64))
    session.ntk()
    plan = session.plan()
    assert list(plan.fallbacks) == ["scale"]
    counted.clear()
    session.ntk()
    assert counted["forward of one"] == plan.sample_passes == 11
    assert counted["backward of one"] == 11 * 2


def test_the_table_says_it():
    torch.manual_seed(0)
    text = str(fl.plan(own(), torch.randn(29, 3, dtype=torch.float64)))
    assert "1 forward pass of 29 samples and 2 backward passes, checked by its ops, then" in text
    text = str(fl.plan(with_an_index(), torch.randn(29, 3, dtype=torch.float64)))
    assert "1 forward pass of 29 samples and 2 backward passes, checked by 10 forward passes over parts" in text


def as_it_is(x: Tensor) -> Tensor:
    return x


def with_a_copy(x: Tensor) -> Tensor:
    """An index, of which nothing is proved."""
    return x[torch.arange(len(x))]


def convolutional(first: Any) -> tuple[nn.Module, Tensor]:
    parts = {"a": nn.Conv2d(2, 6, 3), "b": nn.Conv2d(6, 5, 3), "c": nn.Linear(5, 3)}

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(first(x))))).mean((2, 3)))

    return Net(forward, **parts).float(), torch.randn(23, 2, 11, 9)


def transformer(first: Any) -> tuple[nn.Module, Tensor]:
    parts = {"e": nn.Embedding(19, 16), "l": nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)}
    model = Net(lambda self, x: self.c(self.l(self.e(first(x))).mean(1)), **parts, c=nn.Linear(16, 3))
    return model.float(), torch.randint(19, (23, 8))


def fully_connected(first: Any) -> tuple[nn.Module, Tensor]:
    parts = {"a": nn.Linear(30, 60), "b": nn.Linear(60, 3)}
    return Net(lambda self, x: self.b(torch.tanh(self.a(first(x)))), **parts).float(), torch.randn(53, 30)


@pytest.mark.parametrize("first", [as_it_is, with_a_copy])
@pytest.mark.parametrize("build", [fully_connected, convolutional, transformer])
@pytest.mark.parametrize("verify", [False, True])
def test_samples_run_as_often_as_planned(build: Any, first: Any, verify: bool, monkeypatch: pytest.MonkeyPatch):
    """Also where memory leaves room for a few samples, or one, in a pass."""
    torch.manual_seed(0)
    runs: Counter[str] = Counter()
    outputs = ModelWithInputs.outputs

    def counting_outputs(self: ModelWithInputs, indices: Any, *args: Any) -> Tensor:
        runs["forward"] += len(range(self.samples)[indices]) if isinstance(indices, slice) else len(indices)
        return outputs(self, indices, *args)

    def note(start: Any) -> None:
        runs["backward"] += len(start) if isinstance(start, Tensor) else 0

    monkeypatch.setattr(ModelWithInputs, "outputs", counting_outputs)
    note_backward_passes(monkeypatch, note)
    model, x = build(first)
    smallest = None
    for memory in (None, "2MiB", "1MiB", "600KiB", "400KiB"):
        session = fl.Session(model, x, memory=memory)
        try:
            session.ntk(verify=verify)
        except fl.FeatlearnError:
            continue  # not even one sample fits
        plan = session.plan(verify=verify)
        runs.clear()
        session.ntk(verify=verify)
        assert runs["forward"] == pytest.approx(len(x) * plan.forward_runs)
        assert runs["backward"] == pytest.approx(len(x) * plan.backward_runs)
        smallest = min(group.chunk for group in plan.groups)
    assert smallest is not None
    assert smallest <= 16


@pytest.mark.parametrize(("proved", "graph_bytes", "chunk"), [(True, 180, 2), (False, 90, 4), (True, 260, 1)])
def test_chunks_of_few_samples_are_not_run_beside_copies(proved: bool, graph_bytes: int, chunk: int):
    """A chunk of one is run as two, and one of two again as six: so it has two, or four, where they fit."""
    one = ParameterPlan(
        name="a", shape=(3,), uses=(), route="direct", reason="", operations=0.0, kept=1, passing=10, form_early=True
    )
    (group,) = grouped(
        [one],
        graph_bytes=graph_bytes,
        available=1000,
        samples=(90, 90),
        symmetric=True,
        directions=OutputSelection(1, 1, "sum", 1),
        largest_chunk=90,
        one_by_one=False,
        proved=proved,
    )
    assert group.chunk == chunk
