"""Models sharded by FSDP2: measured whole, and trained as if nobody had measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from featlearn.errors import UnsupportedModelError
from featlearn.quantities.alignment_estimate import estimate_alignment
from featlearn.quantities.layer_pairs import layer_alignment
from featlearn.quantities.linearization_gap import linearization_gap
from featlearn.quantities.neural_features import neural_features
from featlearn.quantities.ntk import ntk
from featlearn.quantities.operator import NTKOperator
from featlearn.quantities.representation import representation_kernels
from featlearn.quantities.sample_gradients import ntk_diagonal
from featlearn.session import Session
from featlearn.torch_internals import sharding

from .comparison import assert_close
from .networks import inputs
from .ranks import on_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


def plain(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), Block(6), Block(6), nn.Linear(6, 3)).to(dtype)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    inner = dict(options)
    if "mp_policy" in options:  # what a block gives goes on as it is
        inner["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    for part in (model[1], model[2]):
        fully_shard(part, **inner)
    return fully_shard(model, **options)


def trained(model: nn.Module, between: Callable[[str], None], steps: int = 4) -> list[Tensor]:
    """Weights and moments of this rank after some steps of AdamW on its own samples."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = inputs(8, 5, seed=10 * step + dist.get_rank()).to(dtype)
        loss = model(x).square().mean()
        between("forward") if step == 1 else None
        loss.backward()
        between("backward") if step == 2 else None
        optimizer.step()
        optimizer.zero_grad() if step % 2 else None
        between("step") if step == 0 else None
    states = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*model.parameters(), *states, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in tensors]


def assert_untouched(model: nn.Module, measure: Callable[[], object]) -> None:
    """The same parameter and gradient objects, classes, hooks and flags after a measurement."""

    def state() -> list[object]:
        found: list[object] = [*map(id, model.parameters()), *(id(p.grad) for p in model.parameters())]
        for part in model.modules():
            found += [type(part), part.training, [*part._forward_hooks.values()], [*part._forward_pre_hooks.values()]]
        return found

    grads, before = [p.grad for p in model.parameters()], state()
    measure()
    assert state() == before
    assert len(grads) == len(list(model.parameters()))


@on_ranks(2, 4)
def a_sharded_model_is_measured_as_the_plain_one(rank: int, size: int) -> None:
    model, x = sharded(plain()), inputs(9, 5)
    expected = ntk(plain(), x, outputs="each")
    assert torch.equal(ntk(model, x, outputs="each"), expected)  # before the first forward pass
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_close(ntk(model, x, outputs="each", group="world").full_tensor(), expected)
    assert_untouched(model, lambda: ntk(model, x, by="layer", verify=True))


@on_ranks(2)
def every_quantity_of_a_sharded_model(rank: int, size: int) -> None:
    model, one, x, y = sharded(plain()), plain(), inputs(9, 5), inputs(9)
    v = inputs(9, 3)
    assert torch.equal(NTKOperator(model, x) @ v, NTKOperator(one, x) @ v)
    assert_close(NTKOperator(model, x, group="world") @ v, NTKOperator(one, x) @ v)
    assert float(estimate_alignment(model, x, y)) == float(estimate_alignment(one, x, y))
    initial = {name: value + 0.1 for name, value in plain().state_dict().items()}
    for group in (None, "world"):
        found, expected = (neural_features(m, x, initial=initial, group=group) for m in (model, one))
        assert all(torch.equal(found[name].agop, expected[name].agop) for name in expected)
    kernels, expected = (representation_kernels(m, x) for m in (model, one))
    assert all(torch.equal(kernels[name], expected[name]) for name in expected)
    for quantity in (ntk_diagonal, layer_alignment, lambda m, x: linearization_gap(m, x, initial)):
        found, expected = (quantity(m, x) for m in (model, one))
        assert str(found) == str(expected)
    single, whole = sharded(plain(torch.float32)), plain(torch.float32)
    assert torch.equal(ntk(single, x.float(), dtype=torch.float64), ntk(whole, x.float(), dtype=torch.float64))
    optimizers = [torch.optim.AdamW(m.parameters(), 0.02) for m in (model, one)]
    for m, optimizer in zip((model, one), optimizers, strict=True):
        m(x).square().mean().backward()
        optimizer.step()
    found, expected = (ntk(m, x, optimizer=o) for m, o in zip((model, one), optimizers, strict=True))
    assert_close(found, expected, 1e-12)
    divided = ntk(model, x, optimizer=optimizers[0], group="world")
    assert_close(divided.full_tensor(), found)
    assert_untouched(model, lambda: NTKOperator(model, x).top(1))


@on_ranks(2)
def training_does_not_see_measurements(rank: int, size: int) -> None:
    x = inputs(9, 5)
    for options in ({}, {"reshard_after_forward": False}):
        expected = trained(sharded(plain(), **options), lambda _: None)
        for group in (None, "world"):
            model = sharded(plain(), **options)
            session, seen = Session(model, x, group=group), []

            def measure(when: str, session: Session = session, model: Any = model, seen: list[str] = seen) -> None:
                assert_untouched(model, lambda: session.ntk(outputs="sum"))
                seen.append(when)

            found = trained(model, measure)
            assert seen == ["step", "forward", "backward"]
            assert len(found) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(2)
def mixed_precision_is_that_of_the_policy(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    x = inputs(9, 5).float()
    exact, model = ntk(plain(torch.float32), x), sharded(plain(torch.float32), mp_policy=policy)
    found = ntk(model, x)
    assert found.dtype == torch.float32
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 2e-2, error
    expected = trained(sharded(plain(torch.float32), mp_policy=policy), lambda _: None)
    model = sharded(plain(torch.float32), mp_policy=policy)
    again = trained(model, lambda _: assert_untouched(model, lambda: ntk(model, x)))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@on_ranks(2)
def an_error_leaves_a_sharded_model_as_it_was(rank: int, size: int) -> None:
    x = inputs(9, 5)
    expected = trained(sharded(plain()), lambda _: None)
    model = sharded(plain())

    def broken(readout: Any) -> None:
        with pytest.raises(UnsupportedModelError, match="out of luck"):
            ntk(model, x, readout=readout)

    def luck(outputs: Tensor) -> Tensor:
        raise ZeroDivisionError("out of luck")

    found = trained(model, lambda _: assert_untouched(model, lambda: broken(luck)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(2)
def what_cannot_be_measured_whole_is_refused(rank: int, size: int) -> None:
    x, said = inputs(9, 5), []
    model = sharded(plain())

    def inside(*_: Any) -> None:
        try:
            ntk(model, x)
        except UnsupportedModelError as error:
            said.append(str(error))

    handle = model[1].inner.register_forward_hook(inside)
    model(x).sum()
    handle.remove()
    model(x).sum().backward()
    assert len(said) == 1
    assert "in the middle of a forward or backward pass" in said[0]
    mesh = init_device_mesh("cpu", (size,))
    parallel = parallelize_module(plain(), mesh, {"0": ColwiseParallel()})
    name, sharding.ShardedModule = sharding.ShardedModule, None
    try:
        for wrong, word in ((parallel, "tensor parallel"), (model, "expected a version from 2.11")):
            sharding.ShardedModule = name if wrong is parallel else _no_such_name
            with pytest.raises(UnsupportedModelError, match=word):
                ntk(wrong, x)
    finally:
        sharding.ShardedModule = name


def _no_such_name(*_: Any) -> None:
    raise AttributeError("_no_such_name")
