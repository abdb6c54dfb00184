"""What one rank does otherwise than the others: every rank says so within seconds, and the next call works."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from featlearn.contraction import kernel_sum
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.errors import FeatlearnError, InputValueError, MemoryBudgetError, RankError, VerificationError
from featlearn.gradients.directions import Directions
from featlearn.planning import memory
from featlearn.quantities.alignment_estimate import estimate_alignment
from featlearn.quantities.neural_features import neural_features
from featlearn.quantities.ntk import ntk
from featlearn.quantities.operator import NTKOperator

from .comparison import assert_close
from .networks import inputs, perceptron
from .ranks import on_ranks


def refusal(call: Callable[[], Any], kind: Any = FeatlearnError) -> str:
    """What a call says that is refused, after a few seconds at most; the ranks are still together afterwards."""
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert time.monotonic() - begun < 10
    dist.barrier()
    return said


def quantities(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], Any], ...]:
    """Calls that ranks make together."""
    return (
        lambda: ntk(model, x, group="world"),
        lambda: NTKOperator(model, x, group="world").quadratic(inputs(len(x), 3)),
        lambda: estimate_alignment(model, x, y, vectors=5, group="world"),
        lambda: neural_features(model, x, group="world"),
    )


def works() -> None:
    """A call that all ranks make alike."""
    model, x = perceptron(), inputs(6, 5)
    assert_close(ntk(model, x, group="world").full_tensor(), ntk(model, x))


@on_ranks(2, 4)
def other_weights_are_refused(rank: int, size: int) -> None:
    x, y = inputs(6, 5), inputs(6)
    for place in ("2.weight", "running"):
        model = perceptron()
        model.register_buffer("running", torch.zeros(3, dtype=torch.float64))
        with torch.no_grad():
            if rank == size - 1:
                model.get_parameter(place)[1, 2].add_(1e-12) if place != "running" else model.running.add_(1)
        for call in quantities(model, x, y):
            said = refusal(call, InputValueError)
            assert f"{place} of rank {size - 1} differs" in said, said
    model = perceptron()
    model[0].bias.requires_grad_(rank < size - 1)  # its gradients would be missing for some of the samples
    for call in quantities(model, x, y):
        said = refusal(call, InputValueError)
        assert f"requires_grad of 0.bias is False on rank {size - 1} and True on rank 0" in said, said
    operator = NTKOperator(model := perceptron(), x, group="world")
    operator @ inputs(6, 3)
    with torch.no_grad():
        model[0].bias[rank] += 1  # between two products
    assert "0.bias of rank 1 differs" in refusal(lambda: operator @ inputs(6, 3))
    works()


@on_ranks(2)
def other_arguments_and_samples_are_refused(rank: int, size: int) -> None:
    model, odd = perceptron(), rank == 1
    x = inputs(6, 5)
    for call, word in (
        (lambda: ntk(model, x, outputs="sum" if odd else "mean", group="world"), "outputs is sum on rank 1 and mean"),
        (lambda: ntk(model, x[:5] if odd else x, group="world"), "shape (5, 5) on rank 1"),
        (lambda: ntk(model, x + odd, group="world"), "argument x of rank 1 differs"),
        (lambda: ntk(model, x, x2=x[:2] + odd, group="world"), "argument x2 of rank 1 differs"),
        (lambda: ntk(model, x, by="layer" if odd else "network", group="world"), "by is layer on rank 1"),
        (lambda: ntk(model, x, parameters="0.*" if odd else None, group="world"), "parameters is 0.* on rank 1"),
        (
            lambda: ntk(model, x, outputs=Directions(3, torch.Generator().manual_seed(rank)), group="world"),
            "outputs of",
        ),
        (lambda: NTKOperator(model, x + odd, group="world"), "tensor 0 of rank 1 differs"),
        (lambda: NTKOperator(model, x[: 6 - odd], group="world"), "number of samples is 5 on rank 1 and 6"),
        (lambda: NTKOperator(model, x, group="world") @ inputs(6, 3, seed=rank), "v of rank 1 differs"),
        (lambda: NTKOperator(model, x, group="world").top(1, generator=torch.Generator().manual_seed(rank)), "seed"),
        (lambda: estimate_alignment(model, x, inputs(6, seed=rank), group="world"), "targets y of rank 1"),
        (lambda: neural_features(model, x + odd, group="world"), "argument x of rank 1 differs"),
        (lambda: NTKOperator(model, x, group="world").top(1 + odd), "k is 2 on rank 1 and 1"),
        (lambda: NTKOperator(model, x, group="world").top(1, tolerance=10.0 ** -(1 + odd)), "tolerance is 0.01"),
        (lambda: NTKOperator(model, x, group="world").frobenius(vectors=4 + odd), "vectors is 5 on rank 1 and 4"),
        (lambda: estimate_alignment(model, x, inputs(6), centered=odd, group="world"), "centered is True on rank 1"),
        (lambda: NTKOperator(model, permuted_within_samples(odd), group="world"), "batches of the loader of rank 1"),
        (lambda: ntk(model, x, readout=(lambda f: f.float()) if odd else None, group="world"), "other outputs on rank"),
        (lambda: ntk(model, x, group="world") if odd else NTKOperator(model, x, group="world"), "different calls"),
    ):
        said = refusal(call, InputValueError)
        assert word in said, (word, said)
    works()


def permuted_within_samples(odd: bool) -> DataLoader[Any]:
    """Batches of which one rank has the last in another order within its samples: their sums are the same."""
    x = (inputs(6, 5) * 8).round()
    if odd:
        x[3:] = x[3:].flip(1)
    return DataLoader(TensorDataset(x), batch_size=3)


@on_ranks(2)
def what_one_rank_alone_may_not_ask_for_is_refused_by_all(rank: int, size: int) -> None:
    model, x, y, odd = perceptron(), inputs(6, 5), inputs(6), rank == 1
    operator, v = NTKOperator(model, x, group="world"), inputs(6, 3)
    for call, word in (
        (lambda: operator @ (v * float("nan") if odd else v), "v"),
        (lambda: operator.quadratic(v[:5] if odd else v), "expected (P, C)"),
        (lambda: operator.top(0 if odd else 1), "k=0"),
        (lambda: operator.top(1, generator=3 if odd else None), "torch.Generator"),
        (lambda: operator.frobenius(vectors=2 if odd else 5), "vectors=2"),
        (lambda: operator.trace(vectors=1 if odd else None), "vectors=1"),
        (lambda: estimate_alignment(model, x, y, vectors=1 if odd else None, group="world"), "vectors"),
        (lambda: estimate_alignment(model, x, None if odd else y, group="world"), "y is None"),
        (lambda: ntk(model, x, by="zz" if odd else "layer", group="world"), "by='zz'"),
        (lambda: ntk(model, x, sketch=Sketch(16, 3) if odd else None, group="world"), "sketch= with group="),
        (lambda: ntk(3 if odd else model, x, group="world"), "nn.Module"),
        (lambda: neural_features(3 if odd else model, x, group="world"), "nn.Module"),
        (lambda: neural_features(model, x, outputs="mean" if odd else None, group="world"), "outputs='mean'"),
    ):
        said = refusal(call)
        assert word in said, (word, said)
        works()


class V(nn.Module):
    """A parameter with the name of the vector that an operator is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.v, self.w = (nn.Parameter(torch.randn(*shape).double()) for shape in ((5, 3), (3, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.v).tanh() @ self.w


@on_ranks(2)
def rates_of_any_parameter_are_compared(rank: int, size: int) -> None:
    model = V()
    optimizer = torch.optim.SGD([{"params": [model.v], "lr": 0.1}, {"params": [model.w], "lr": 0.2}])
    operator = NTKOperator(model, inputs(6, 5), optimizer=optimizer, group="world")
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    assert "rate of v of rank 1 differs" in refusal(lambda: operator @ inputs(6, 2), InputValueError)
    works()


@on_ranks(2)
def a_pass_that_fails_between_two_exchanges_is_heard(rank: int, size: int) -> None:
    x, y = inputs(30, 5), inputs(30)
    for number in range(2, 14):  # in the first looks at a model, in sweeps, between them
        for call in (
            lambda model: NTKOperator(model, x, group="world").top(2),
            lambda model: estimate_alignment(model, x, y, vectors=9, centered=True, group="world"),
        ):
            model, passes = perceptron(), [0]

            def fail(gradient: Tensor) -> None:
                raise ZeroDivisionError("rank one is out of luck")

            def counted(module: nn.Module, given: Any, output: Tensor, number=number, passes=passes, fail=fail) -> Any:
                passes[0] += 1
                if rank == 1 and passes[0] >= number and output.requires_grad:
                    output = output * 1
                    output.register_hook(fail)
                return output

            model.register_forward_hook(counted)
            said = refusal(lambda call=call, model=model: call(model), Exception if rank == 1 else RankError)
            assert "out of luck" in said
    works()


class Scaled(nn.Module):
    """A factor that is neither a weight nor a buffer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inside, self.factor = perceptron(), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inside(x)


@on_ranks(2, 4)
def other_attributes_and_readouts_are_refused(rank: int, size: int) -> None:
    x, y, last = inputs(6, 5), inputs(6), size - 1
    for call in quantities(Scaled(1.001 if rank == last else 1.0), x, y):
        said = refusal(call, InputValueError)
        assert f"other outputs on rank {last} than on rank 0" in said, said
    model = perceptron()
    said = refusal(lambda: ntk(model, x, readout=lambda out: out[:, : 1 + min(rank, 1)], group="world"))
    assert f"on rank{'s' * (size > 2)} {', '.join(map(str, range(1, size)))} than" in said, said
    x[2:, 0] += 0.5 * rank  # of samples that are not compared
    assert "argument x of rank 1 differs" in refusal(lambda: ntk(model, x, group="world"))
    # Rounding is no difference: other hardware adds up in another order.
    near = Scaled(1.0 + 1e-12 * rank)
    assert_close(ntk(near, inputs(6, 5), group="world").full_tensor(), ntk(model, inputs(6, 5)), 1e-11)
    works()


@on_ranks(2)
def other_memory_is_agreed_on(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(400, 5)
    expected, v = ntk(model, x), inputs(400, 3, 5)
    before = memory.free_bytes
    memory.free_bytes = lambda _: (8 if rank else 3) * 2**20  # half of it, divided among the ranks of this machine
    try:
        found = ntk(model, x, group="world")
        features = neural_features(model, x, group="world")
        # Here one rank would take five vectors at a time, the other three, and they would add up different things.
        memory.free_bytes = lambda _: 30_000 if rank else 2**20
        product = NTKOperator(model, x[:40], group="world") @ v[:40]
    finally:
        memory.free_bytes = before
    assert_close(found.full_tensor(), expected)
    assert_close(product, NTKOperator(model, x[:40]) @ v[:40])
    for budgets in ((None, 300_000), (300_000, None), (None, 10**30)):  # free memory is shared, what is given is not
        given = NTKOperator(model, x, memory=budgets[rank], group="world")
        assert_close(given @ v[..., 0], NTKOperator(model, x) @ v[..., 0])
        assert float(given.trace()) == pytest.approx(float(NTKOperator(model, x).trace()), rel=1e-12)
    assert_close(features["2"].ptk_covariance, neural_features(model, x)["2"].ptk_covariance)
    uneven = x[:301]  # what one rank would say of its own samples is not what the other would
    said = refusal(lambda: ntk(model, uneven, memory=2**20 if rank else 60_000, group="world"), MemoryBudgetError)
    assert "of the budget 58.6 KiB" in said, said
    texts: list[str] = [""] * size
    dist.all_gather_object(texts, said)
    assert len(set(texts)) == 1, texts
    works()


class Failing(nn.Module):
    """Fails on one rank, in a forward pass or in a backward pass, of many samples or of any."""

    def __init__(self, where: str, least: int) -> None:
        super().__init__()
        self.inside, self.where, self.least = perceptron(), where, least

    def forward(self, x: Tensor) -> Tensor:
        fails = dist.get_rank() == 1 and len(x) >= self.least
        if fails and self.where == "forward":
            raise ZeroDivisionError("rank one is out of luck")
        return Refusing.apply(self.inside(x), fails)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError("rank one is out of luck")
        return gradient, None


@contextmanager
def products_fail(rank: int) -> Iterator[None]:
    before = kernel_sum.add_gram

    def broken(*arguments: Any, **options: Any) -> None:
        if rank == 1:
            raise ZeroDivisionError("rank one is out of luck")
        before(*arguments, **options)

    kernel_sum.add_gram = broken
    try:
        yield
    finally:
        kernel_sum.add_gram = before


@on_ranks(2, 4)
def a_rank_that_fails_alone_is_heard_by_all(rank: int, size: int) -> None:
    x, y = inputs(60, 5), inputs(60)
    for where in ("forward", "backward"):
        for least in (1, 9):  # in the first look at a few samples, or later
            model = Failing(where, least)
            for call in quantities(model, x, y):
                said = refusal(call, Exception if rank == 1 else RankError)
                assert "out of luck" in said
                assert rank == 1 or said.startswith("rank 1 of the group"), said
    with products_fail(rank):
        said = refusal(lambda: ntk(perceptron(), x, group="world"), ZeroDivisionError if rank == 1 else RankError)
        assert "out of luck" in said
    # An argument that one rank cannot have: it raises before it has measured anything.
    said = refusal(lambda: ntk(perceptron(), x, outputs="all" if rank == 1 else "sum", group="world"))
    assert "outputs='all'" in said
    works()


@on_ranks(2)
def a_wrong_block_of_one_rank_is_seen_by_verification(rank: int, size: int) -> None:
    model, x, before = perceptron(), inputs(30, 5), kernel_sum.add_gram

    def wrong(out: Tensor, left: Any, right: Any, *arguments: Any, **options: Any) -> None:
        before(out, left, right, *arguments, **options)
        if rank == 1 and not options["symmetric"]:
            out[:1] *= 1.01

    kernel_sum.add_gram = wrong
    try:
        ntk(model, x, group="world")  # nothing is seen without it
        said = refusal(lambda: ntk(model, x, verify=True, group="world"), (VerificationError, RankError))
    finally:
        kernel_sum.add_gram = before
    assert "fails its check" in said
    ntk(model, x, verify=True, group="world")


@on_ranks(2)
def a_rank_outside_of_the_group_is_refused(rank: int, size: int) -> None:
    first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(InputValueError, match="not in the group"):
            ntk(perceptron(), inputs(3, 5), group=first)
    else:
        assert_close(ntk(perceptron(), inputs(3, 5), group=first).to_local(), ntk(perceptron(), inputs(3, 5)))
