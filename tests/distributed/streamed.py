"""Operator, alignment and features over ranks, against the same calls without a group."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from featlearn.distributed import group as ranks
from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.gradients.directions import Directions
from featlearn.quantities.alignment_estimate import estimate_alignment
from featlearn.quantities.neural_features import neural_features
from featlearn.quantities.ntk import ntk
from featlearn.quantities.operator import NTKOperator

from .comparison import assert_close, assert_same_everywhere
from .networks import CASES, inputs, perceptron
from .ranks import on_ranks


@on_ranks(2, 4)
def products_are_those_of_one_process(rank: int, size: int) -> None:
    for make, data in [*CASES.values()][: 8 // size]:
        model, x = make(), data(13)
        one, divided = NTKOperator(model, x), NTKOperator(model, x, group="world")
        v = inputs(13, one.outputs, 3, seed=9)
        assert divided.shape == one.shape
        assert_close(divided @ v, one @ v)
        assert_same_everywhere(divided @ v)
        assert_close(divided.quadratic(v), one.quadratic(v))
        assert_close(divided.quadratic(v[..., 0])[None], one.quadratic(v[..., 0])[None])


@on_ranks(2)
def chunks_of_any_size_give_the_same(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(300, 5)
    one, divided = NTKOperator(model, x), NTKOperator(model, x, group="world", memory="300kB")
    v = inputs(300, 3, seed=2)
    assert_close(divided @ v, one @ v)


@on_ranks(2, 4)
def every_sample_is_run_by_one_rank(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(40, 5)
    operator = NTKOperator(model, x, group="world")
    seen = []
    handle = model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    operator.quadratic(inputs(40, 3))
    handle.remove()
    counted = torch.tensor([max(seen)])
    dist.all_reduce(counted)
    assert int(counted) == 40


@on_ranks(2)
def norms_traces_and_eigenvalues(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(23, 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(x).square().sum().backward()
    optimizer.step()
    one, divided = NTKOperator(model, x, optimizer=optimizer), NTKOperator(model, x, optimizer=optimizer, group="world")
    for exact in ("trace", "frobenius"):
        assert abs(float(getattr(divided, exact)()) / float(getattr(one, exact)()) - 1) < 1e-14
    few = [op.frobenius(vectors=9, generator=torch.Generator().manual_seed(1)) for op in (one, divided)]
    assert abs(float(few[1]) / float(few[0]) - 1) < 1e-12
    assert abs(few[1].stderr / few[0].stderr - 1) < 1e-9
    drawn = [op.trace(vectors=4) for op in (one, divided)]
    assert abs(float(drawn[1]) / float(drawn[0]) - 1) < 1e-14
    top = divided.top(2)
    assert_close(top.values, one.top(2).values)
    assert_same_everywhere(top.vectors)


@on_ranks(2, 4)
def alignments_are_those_of_one_process(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(60, 5)
    for y in (inputs(60, seed=5), torch.eye(3, dtype=torch.float64)[torch.arange(60) % 3]):
        for options in ({"centered": True}, {"vectors": 12}, {"vectors": 12, "centered": True})[: 6 // size]:
            one = estimate_alignment(model, x, y, **options)
            divided = estimate_alignment(model, x, y, group=dist.group.WORLD, **options)
            assert abs(float(divided) / float(one) - 1) < 1e-10
            assert_same_everywhere(torch.tensor([float(divided), float(divided.stderr)], dtype=torch.float64))


@on_ranks(2)
def loaders_are_streamed(rank: int, size: int) -> None:
    model, x, y = perceptron(1), inputs(31, 5), inputs(31, seed=5)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    one, divided = NTKOperator(model, x), NTKOperator(model, loader, group="world")
    v = inputs(31, 1, seed=2)
    assert_close(divided @ v, one @ v)
    both = [estimate_alignment(model, loader, vectors=9, group=group) for group in (None, "world")]
    assert abs(float(both[1]) / float(both[0]) - 1) < 1e-12


@on_ranks(2, 4)
def features_are_those_of_one_process(rank: int, size: int) -> None:
    for name in ("perceptron", "convolution")[: 4 // size]:
        make, data = CASES[name]
        model, initial = make(), {key: value.clone() for key, value in make().state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += inputs(*parameter.shape, seed=3) / 10
        for samples in (13, size - 1):
            for outputs in (None, 1, Directions(4)):
                calls = [
                    neural_features(model, data(samples), initial=initial, outputs=outputs, group=group)
                    for group in (None, "world")
                ]
                assert list(calls[0]) == list(calls[1])
                for one, divided in zip(calls[0].values(), calls[1].values(), strict=True):
                    assert one.rows == divided.rows
                    assert one.is_readout == divided.is_readout
                    assert_close(divided.ptk_covariance, one.ptk_covariance)
                    assert_close(divided.ptk_change, one.ptk_change)
                    assert torch.equal(divided.initial_weight, one.initial_weight)
                    assert_same_everywhere(divided.ptk_covariance)


@on_ranks(2)
def drawn_outputs_are_the_same_on_every_rank(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double(), torch.randn(9, 5).double()

    def directions() -> Directions:
        return Directions(3, torch.Generator().manual_seed(8))

    alone = neural_features(model, x, outputs=directions())
    found = neural_features(model, x, outputs=directions(), group="world")
    for name, layer in alone.items():
        torch.testing.assert_close(found[name].agop, layer.agop, rtol=1e-12, atol=1e-14)
    with pytest.raises(InputValueError, match="outputs"):
        neural_features(model, x, outputs=Directions(3, torch.Generator().manual_seed(rank)), group="world")


@on_ranks(2)
def views_are_the_same_as_copies(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)), torch.randn(6, 3)
    mine = x[1:] if rank == 0 else x[1:].clone()
    torch.testing.assert_close(ntk(model, mine, group="world").full_tensor(), ntk(model, mine))


@on_ranks(4)
def a_part_of_the_world_measures(rank: int, size: int) -> None:
    half = dist.new_group(list(range(size // 2, size)))
    if rank >= size // 2:
        model, x, v = perceptron(), inputs(11, 5), inputs(11, 3, seed=2)
        assert_close(NTKOperator(model, x, group=half) @ v, NTKOperator(model, x) @ v)


@on_ranks(2, 4)
def sums_of_tensors_of_all_kinds_are_those_of_each(rank: int, size: int) -> None:
    group = RankGroup("world")
    kinds = (torch.float64, torch.float32, torch.float32, torch.int64, torch.complex64, torch.float32)
    shapes = ((3, 4), (), (5, 2), (7,), (2, 3), (0, 4))
    made = [(torch.arange(max(1, math.prod(shape)))[: math.prod(shape)] + 1).reshape(shape) for shape in shapes]
    for least in (8 * 2**20, 60, 0):  # in one buffer, in some, each alone
        tensors = [(rank + 1) * one.to(kind) for one, kind in zip(made, kinds, strict=True)]
        tensors[2] = tensors[2].mT.contiguous().mT  # not contiguous
        before, ranks.BUFFER = ranks.BUFFER, least
        try:
            group.add_up(tensors)
        finally:
            ranks.BUFFER = before
        for tensor, one, kind in zip(tensors, made, kinds, strict=True):
            assert tensor.dtype == kind
            assert torch.equal(tensor, one.to(kind) * (size * (size + 1) // 2))


@on_ranks(2)
def a_product_takes_seven_exchanges(rank: int, size: int) -> None:
    operator, v = NTKOperator(perceptron(), inputs(9, 5), group="world"), inputs(9, 3)
    counted = 0

    def counting(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal counted
            counted += 1
            return exchange(*arguments, **options)

        return run

    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")
    before = {name: getattr(dist, name) for name in names}
    for name, exchange in before.items():
        setattr(dist, name, counting(exchange))
    try:
        operator @ v
    finally:
        for name, exchange in before.items():
            setattr(dist, name, exchange)
    assert counted == 7  # the vector; all agree; J^T v is done, added up; K v is done, put together; all are out
