"""Kernels over ranks, against the kernel of one process and a dense Jacobian."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from featlearn.contraction import proportional_outputs
from featlearn.contraction.factors import Dense, Factors
from featlearn.errors import FeatlearnError
from featlearn.gradients.directions import Directions
from featlearn.kernel import divided_execution, stored_tiles
from featlearn.planning.exchange import SharedKernel
from featlearn.quantities.ntk import ntk
from featlearn.quantities.ntk_plan import plan
from featlearn.session import Session
from tests.references.jacobian import dense_ntk

from .comparison import assert_close, assert_same_everywhere
from .networks import CASES, branches, convolution, heads, inputs, perceptron
from .ranks import on_ranks

MODES: tuple[Any, ...] = ("mean", "sum", "each", "full", 1, Directions(4))


@contextmanager
def exchanged_by(kind: str | None) -> Iterator[set[str]]:
    """Every parameter by one of the two exchanges, or as the plan says; gives those that were sliced."""
    before: Any = SharedKernel.sliced
    found: set[str] = set()

    def choice(kernel: SharedKernel, parameters: Any, groups: Any) -> frozenset[str]:
        parameters = list(parameters)
        chosen = before(kernel, parameters, groups)
        if kind is not None:
            chosen = frozenset(one.name for one in parameters if kind == "slices")
        found.update(chosen)
        return chosen

    SharedKernel.sliced = choice
    try:
        yield found
    finally:
        SharedKernel.sliced = before


def assert_divided(found: Any, expected: Any, size: int) -> None:
    """Equal to 1e-14, and every rank holds the rows of its samples, or the kernels of its outputs."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_divided(found[key], expected[key], size)
        return
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(0),)
    assert found.shape == expected.shape
    whole = found.full_tensor()
    assert_close(whole, expected)
    assert_same_everywhere(whole)
    chunks = expected.chunk(size)
    own = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else expected[:0]
    assert found.to_local().shape == own.shape
    if own.numel():
        assert_close(found.to_local(), own, 1e-13)


@on_ranks(2, 4)
def all_modes_of_all_networks_by_either_exchange(rank: int, size: int) -> None:
    for name, (make, data) in [*CASES.items()][size - 2 :]:
        model, x = make(), data(9)
        for outputs in MODES if name == "attention" and size == 2 else ("mean", "each", "full"):
            expected = ntk(model, x, outputs=outputs)
            if outputs == "full" and size == 2:
                assert_close(expected, dense_ntk(model, x, outputs=outputs), 1e-12)
            for kind in ("ring", "slices"):
                with exchanged_by(kind) as chosen:
                    found = ntk(model, x, outputs=outputs, group="world")
                assert (kind == "ring") or any(chosen)
                assert_divided(found, expected, size)


@on_ranks(2, 4)
def parts_cross_kernels_optimizers_and_verification(rank: int, size: int) -> None:
    for name in ("convolution", "attention")[: 4 // size]:
        make, data = CASES[name]
        model, x = make(), data(11)
        x2 = data(18)[11:]
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model(x).square().sum().backward()
        optimizer.step()
        for kind in ("ring", "slices"):
            for options in (
                {"by": "layer"},
                {"by": "parameter", "verify": True},
                {"optimizer": optimizer, "outputs": "each"},
                {"parameters": "*weight*", "verify": True, "outputs": "full"},
            ):
                for second in (None, x2)[1 if options.get("by") == "layer" else 0 :]:
                    expected = ntk(model, x, x2=second, **options)
                    with exchanged_by(kind):
                        assert_divided(ntk(model, x, x2=second, group="world", **options), expected, size)


@on_ranks(2, 4)
def any_number_of_samples(rank: int, size: int) -> None:
    model = perceptron()
    for samples in (1, 3, 5):
        x, x2 = inputs(samples, 5), inputs(4, 5, seed=3)
        for kind in ("ring", "slices"):
            with exchanged_by(kind):
                found, crossed = (ntk(model, x, x2=second, outputs="sum", group="world") for second in (None, x2))
            assert_divided(found, ntk(model, x, outputs="sum"), size)
            assert_divided(crossed, ntk(model, x, x2=x2, outputs="sum"), size)


@on_ranks(4)
def weights_in_another_order_that_some_ranks_do_not_use(rank: int, size: int) -> None:
    model, x = heads(), inputs(32, 32, 64)
    formed: list[str] = []
    before = divided_execution.DividedExecution._formed_once

    def once(self: Any, name: str, gradients: Any) -> Any:
        found = before(self, name, gradients)
        formed.extend([name] * (isinstance(found, Dense) and isinstance(gradients.own, Factors)))
        return found

    divided_execution.DividedExecution._formed_once = once
    try:
        for samples, second, memory in ((32, inputs(5, 32, 64, seed=3), None), (32, None, None), (29, None, "4MB")):
            formed.clear()
            with exchanged_by("ring"):
                found = ntk(model, x[:samples], x2=second, memory=memory, group="world")
            assert_divided(found, ntk(model, x[:samples], x2=second), size)
            assert memory is not None or "heads" in formed
    finally:
        divided_execution.DividedExecution._formed_once = before


@on_ranks(2, 4)
def little_memory_makes_blocks_and_passes(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(45, 5)
    small, picture = convolution(), inputs(30, 2, 6, 6)
    for outputs in ("sum", "each", "full"):
        expected = ntk(model, x, outputs=outputs)
        room = expected.nbytes // size + 40_000
        assert_divided(ntk(model, x, outputs=outputs, memory=room, group="world"), expected, size)
        expected = ntk(small, picture, outputs=outputs, verify=True)
        with exchanged_by("slices"):
            room = 2 * expected.nbytes + 400_000
            found = ntk(small, picture, outputs=outputs, memory=room, group="world", verify=True)
        assert_divided(found, expected, size)


def many_positions() -> nn.Module:
    """Forming a gradient takes longer here than sending it, and it is larger than its factors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(16, 24, 5), nn.ReLU(), nn.AvgPool1d(40), nn.Flatten(), nn.Linear(24, 2)).double()


@on_ranks(2, 4)
def the_exchange_is_that_of_the_plan(rank: int, size: int) -> None:
    expect_planned_exchanges(size)


def expect_planned_exchanges(size: int) -> None:
    """What `fl.plan` says is what is run."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    positions = many_positions()
    cases: list[tuple[nn.Module, torch.Tensor, dict[str, Any], bool, int]] = [
        (wide, inputs(21, 40), {}, False, 10**8),
        (positions, inputs(13, 16, 44), {}, True, 10**8),
        (positions, inputs(13, 16, 44), {"outputs": "each"}, True, 10**8),
        (positions, inputs(13, 16, 44), {"by": "layer"}, True, 10**8),
        (positions, inputs(41, 16, 44), {}, False, 300_000),  # blocks of samples
    ]
    for model, x, options, some, memory in cases:
        with exchanged_by(None) as sliced:
            found = ntk(model, x, memory=memory, group="world", **options)
        assert_divided(found, ntk(model, x, **options), size)
        planned = plan(model, x, memory=memory, ranks=size, **options).rank_costs
        assert planned is not None
        assert {one.name for one in planned.parameters if one.exchange == "slices"} == sliced
        assert bool(sliced) == some, (size, options, sliced)


@on_ranks(4)
def columns_in_blocks_travel_around_a_ring(rank: int, size: int) -> None:
    """Few rows are held at once, many columns are not."""
    model, x, x2 = many_positions(), inputs(4, 16, 44), inputs(200, 16, 44, seed=3)
    for memory in (400_000, 10**8):
        with exchanged_by(None) as sliced:
            found = ntk(model, x, x2=x2, memory=memory, group="world")
        assert_divided(found, ntk(model, x, x2=x2), size)
        assert ("0.weight" in sliced) == (memory == 10**8), (memory, sliced)


@on_ranks(2)
def one_direction_stands_for_all_outputs_everywhere(rank: int, size: int) -> None:
    torch.manual_seed(2)
    wide = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 9)).double()
    x = inputs(30, 7)
    single, before = [], divided_execution.same_directions

    def noted(ranks: Any, found: Any) -> Any:
        result = before(ranks, found)
        single.extend(name for name in found if result[name].directions < found[name].directions)
        return result

    worthwhile, proportional_outputs.worthwhile = proportional_outputs.worthwhile, lambda _: True
    divided_execution.same_directions = noted
    try:
        found = ntk(wide, x, group="world")
        # Where one rank does not look for it, none takes it.
        proportional_outputs.worthwhile = lambda _: rank != size - 1
        assert single == ["2.weight", "4.weight"], single
        again = ntk(wide, x, group="world")
    finally:
        divided_execution.same_directions, proportional_outputs.worthwhile = before, worthwhile
    assert single == ["2.weight", "4.weight"], single
    for kernel in (found, again):
        assert_divided(kernel, ntk(wide, x), size)


@on_ranks(2, 4)
def samples_of_some_ranks_use_other_parameters(rank: int, size: int) -> None:
    model, x = branches(), inputs(12, 5)
    x[:, 0] = torch.where(torch.arange(12) < 12 // size, 1.0, -1.0)
    for kind in ("ring", "slices"):
        with exchanged_by(kind):
            assert_divided(ntk(model, x, by="parameter", group="world"), ntk(model, x, by="parameter"), size)


@on_ranks(2)
def a_session_measures_again(rank: int, size: int) -> None:
    model, x = perceptron(), inputs(10, 5)
    divided, one = Session(model, x, group="world"), Session(model, x)
    for step in range(3):
        with torch.no_grad():
            model[0].weight += 0.1 * inputs(8, 5, seed=step)
        assert_divided(divided.ntk(), one.ntk(), size)
        assert_divided(divided.ntk(x=x[:7], outputs="each"), one.ntk(x=x[:7], outputs="each"), size)
    model[4] = nn.Linear(7, 2).double()
    torch.nn.init.constant_(model[4].weight, 0.3)
    torch.nn.init.constant_(model[4].bias, 0.1)
    assert_divided(divided.ntk(), one.ntk(), size)
    assert list(divided.neural_features()) == list(one.neural_features())


@on_ranks(2)
def single_precision_is_as_good_as_in_one_process(rank: int, size: int) -> None:
    for make, data in CASES.values():
        model, x = make(), data(13)
        exact = ntk(model, x)
        model.float()
        x = x.float() if x.is_floating_point() else x
        found, one = ntk(model, x, group="world").full_tensor(), ntk(model, x)
        bound = 4 * float((one - exact).abs().max()) + 1e-6 * float(exact.abs().max())
        assert float((found - exact).abs().max()) <= bound
        assert_divided(ntk(model, x, dtype=torch.float64, group="world"), ntk(model, x, dtype=torch.float64), size)


@on_ranks(2, 4)
def ranks_write_their_tiles_into_one_file(rank: int, size: int) -> None:
    model, x, limit = perceptron(), inputs(23, 5), stored_tiles.LARGEST_TILE
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    path, other = f"{folder[0]}/kernel.npy", f"{folder[0]}/other.npy"
    stored_tiles.LARGEST_TILE = 4
    try:
        for _ in range(2):
            kernels = ntk(model, x, by="layer", out=path, group="world")
            for name, kernel in ntk(model, x, by="layer").items():
                assert_close(kernels[name][:], kernel)
        lines = Path(f"{path}.manifest").read_text().splitlines()
        assert sorted(json.loads(line)["tile"] for line in lines[1:]) == list(range(21))
        with pytest.raises(FeatlearnError):  # on all ranks, though only the last has other samples
            ntk(model, x + float(rank == size - 1), out=other, group="world")
    finally:
        stored_tiles.LARGEST_TILE = limit
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])
