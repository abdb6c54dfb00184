"""Models sharded by FSDP2 whose weights do not fit: gathered layer by layer, the same numbers, and nothing left."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from featlearn.audited_model import AuditedModel
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.layered_weights import LayeredWeights
from featlearn.errors import InputValueError, RankError, UnsupportedModelError
from featlearn.network.isolation import collector_paused
from featlearn.quantities.alignment_estimate import estimate_alignment
from featlearn.quantities.neural_features import neural_features
from featlearn.quantities.ntk import ntk
from featlearn.quantities.ntk_plan import plan
from featlearn.quantities.operator import NTKOperator
from featlearn.quantities.sample_gradients import ntk_diagonal
from featlearn.session import Session

from .comparison import assert_close
from .networks import CASES, inputs
from .ranks import on_ranks
from .sharded import Block, assert_untouched, plain, sharded, trained


@contextmanager
def layer_by_layer() -> Iterator[list[int]]:
    """As if no weights fitted into memory; gives the bytes that were gathered after each gathering."""
    fits, served, held = AuditedModel._fits, LayeredWeights._served, []

    def noted(self: LayeredWeights, wanted: int) -> bool:
        found = served(self, wanted)
        leaves = {id(p): p for layer in self._layers for p in layer.parameters}
        held.append(sum(p.untyped_storage().nbytes() for p in leaves.values()))
        return found

    AuditedModel._fits = lambda self, shards, *, by_layer: not by_layer  # type: ignore[method-assign]
    LayeredWeights._served = noted  # type: ignore[method-assign]
    try:
        yield held
    finally:
        AuditedModel._fits, LayeredWeights._served = fits, served  # type: ignore[method-assign]


def whole(kernel: Tensor) -> Tensor:
    return kernel.full_tensor() if hasattr(kernel, "full_tensor") else kernel


@on_ranks(2, 4)
def kernels_from_sharded_weights_are_those_of_the_plain_model(rank: int, size: int) -> None:
    model, one, x, v = sharded(plain()), plain(), inputs(9, 5), inputs(9, 3)
    with layer_by_layer() as held:
        for options in ({"outputs": "each"}, {"x2": inputs(4, 5, seed=3), "outputs": "full"}):
            assert torch.equal(ntk(model, x, **options), ntk(one, x, **options)), options
            assert_close(whole(ntk(model, x, group="world", **options)), ntk(one, x, **options))
        product = NTKOperator(one, x) @ v
        for group in (None, "world"):
            assert_close(NTKOperator(model, x, group=group) @ v, product)
    assert held


@on_ranks(2)
def other_quantities_from_sharded_weights(rank: int, size: int) -> None:
    model, one, x, y = sharded(plain()), plain(), inputs(9, 5), inputs(9)
    with layer_by_layer() as held:
        found, expected = (ntk(m, x, by="parameter", verify=True) for m in (model, one))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        divided = ntk(model, x, by="layer", verify=True, group="world")
        expected = ntk(one, x, by="layer")
        assert all(torch.allclose(whole(divided[name]), expected[name], rtol=1e-13) for name in expected)
        assert str(ntk_diagonal(model, x)) == str(ntk_diagonal(one, x))
        exact = float(estimate_alignment(one, x, y))
        for group in (None, "world"):
            assert abs(float(estimate_alignment(model, x, y, group=group)) - exact) < 1e-14
        with pytest.MonkeyPatch.context() as patch:  # as on a GPU
            patch.setattr("featlearn.gradients.formed._worth_batching", lambda chunk, directions: True)
            found, expected = (ntk(m, x, outputs="each") for m in (model, one))
            assert_close(found, expected)
        drawn = [
            ntk(m, x, sketch=Sketch(k=32, repeats=2, generator=torch.Generator().manual_seed(1))) for m in (model, one)
        ]
        assert_close(drawn[0].value, drawn[1].value)
    assert held


class Odd(nn.Module):
    """Weights that are read outside of a layer's own backward pass: divisors, centers, recomputed ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.divisor, self.one = nn.Parameter(torch.rand(width) + 1), nn.Parameter(torch.rand(1) + 1)
        self.centers = nn.Parameter(torch.randn(width, width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.block = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, self.centers).tanh() * self.frozen
        return checkpoint(self.block, x / self.divisor + near / self.one, use_reentrant=False)


class Tower(nn.Module):
    """A layer in use twice, one checkpoint around two layers, outputs in a container, gradients inside a pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.first(x).square().sum(), x, retain_graph=True)
        hidden = checkpoint(lambda z: self.second(self.first(z)), x + slope, use_reentrant=False)
        return self.first(hidden) + hidden


def odd() -> nn.Module:
    torch.manual_seed(8)
    normalized = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(5, 6), Odd(6), Tower(6), normalized, nn.Linear(6, 3)).double()


@on_ranks(2)
def unusual_models_keep_their_kernels(rank: int, size: int) -> None:
    def wrapped(model: nn.Module, parts: list[nn.Module]) -> nn.Module:
        for part in parts:
            fully_shard(part)
        return model

    model, one = odd(), odd()
    cases = [(wrapped(model, [model[1], model[2].first, model[2].second, model[3], model]), one, inputs(9, 5))]
    for make, samples in (CASES["attention"], CASES["branches"]):
        model = make()
        children = [model.first, model.second] if hasattr(model, "first") else []
        cases.append((wrapped(model, [*children, model]), make(), samples(9)))
    loose = plain()  # whose first and last layers are nobody's
    cases.append((wrapped(loose, [loose[1], loose[2]]), plain(), inputs(9, 5)))
    with layer_by_layer() as held:
        for model, one, x in cases:
            held.clear()
            assert torch.equal(ntk(model, x, outputs="each"), ntk(one, x, outputs="each"))
            assert held
            assert_close(whole(ntk(model, x, group="world")), ntk(one, x))  # branches: ranks run other layers
        model, one, x = cases[0]
        assert_close(NTKOperator(model, x) @ inputs(9, 3), NTKOperator(one, x) @ inputs(9, 3))


def deep(width: int = 64) -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(5, width), *[Block(width) for _ in range(5)], nn.Linear(width, 3)).double()


@on_ranks(2, 4)
def only_one_layer_and_the_root_are_gathered_at_a_time(rank: int, size: int) -> None:
    model, one, x = deep(), deep(), inputs(3, 5)
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    sizes = [sum(p.nbytes for p in part.parameters()) for part in (one[0], one[1], one[-1], one)]
    memory = int(1.9 * sizes[-1])
    text = str(plan(model, x, memory=memory))
    assert "weights stay sharded, at most" in text
    assert "checked by its ops" in text  # gathering is not taken for ops of the model
    assert "weights stay sharded" not in str(plan(model, x))
    served, held, left = LayeredWeights._served, [0], []

    def noted(self: LayeredWeights, wanted: int) -> bool:
        found = served(self, wanted)
        leaves = [p for layer in self._layers for p in layer.parameters]
        held.append(sum(p.untyped_storage().nbytes() for p in leaves))
        left[:] = leaves
        return found

    LayeredWeights._served = noted  # type: ignore[method-assign]
    try:
        gc.collect()  # what other checks have left
        with collector_paused():
            assert_close(ntk(model, x, memory=memory), ntk(one, x))
            assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "_Saved"]
        passes = len(held)
        assert_close(whole(ntk(model, x, memory=memory, group="world")), ntk(one, x))
    finally:
        LayeredWeights._served = served  # type: ignore[method-assign]
    # Rows are padded to a multiple of the ranks. With group= ranks may ask for different layers.
    assert sizes[1] < max(held[:passes]) <= 1.05 * (sizes[0] + sizes[1] + sizes[2]) < 0.3 * sizes[-1]
    assert max(held) <= 1.05 * (sizes[0] + 2 * sizes[1] + sizes[2])
    assert left
    assert sum(p.untyped_storage().nbytes() for p in left) == 0
    model(x).sum()  # after which the root stays whole
    with layer_by_layer() as gathered:
        assert_close(ntk(model, x), ntk(one, x))
    assert max(gathered) <= 1.05 * sizes[1]
    assert not hasattr(model[0].weight, "placements")
    assert all(hasattr(p, "placements") for block in model[1:-1] for p in block.parameters())


@on_ranks(2)
def training_does_not_see_measurements_layer_by_layer(rank: int, size: int) -> None:
    x = inputs(9, 5)

    def reducing_all(model: Any) -> Any:
        model.set_reduce_scatter_unused_params(True)
        return model

    makers: list[Callable[[], Any]] = [lambda: sharded(plain()), lambda: sharded(plain(), reshard_after_forward=False)]
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        makers.append(lambda: reducing_all(sharded(plain())))
    for make in makers:
        expected = trained(make(), lambda _: None)
        for group in (None, "world") if make is makers[0] else ("world",):
            model = make()
            session = Session(model, x, group=group)

            def measure(when: str, session: Session = session, model: Any = model) -> None:
                assert_untouched(model, lambda: session.ntk(outputs="sum"))

            with layer_by_layer() as held:
                found = trained(model, measure)
            assert held
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(2)
def gradients_that_are_not_reduced_yet_are_kept(rank: int, size: int) -> None:
    x, y = inputs(9, 5), inputs(8, 5, seed=rank)

    def accumulated(between: Callable[[nn.Module], object]) -> list[Tensor]:
        model: Any = sharded(plain())
        model.set_requires_gradient_sync(False)
        model(y).square().sum().backward()
        between(model)
        model.set_requires_gradient_sync(True)
        model(y).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    expected = accumulated(lambda model: None)
    with layer_by_layer() as held:
        found = accumulated(lambda model: ntk(model, x))
    assert held
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(2)
def mixed_precision_layer_by_layer_is_that_of_the_policy(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    x = inputs(9, 5).float()
    model = sharded(plain(torch.float32), mp_policy=policy)
    expected = ntk(model, x)
    with layer_by_layer() as held:
        assert torch.equal(ntk(model, x), expected)
        again = sharded(plain(torch.float32), mp_policy=policy)
        after = trained(again, lambda _: assert_untouched(again, lambda: ntk(again, x)))
    assert held
    assert max(held) < 2 * sum(p.numel() for p in plain().parameters())
    untouched = trained(sharded(plain(torch.float32), mp_policy=policy), lambda _: None)
    assert all(torch.equal(a, b) for a, b in zip(after, untouched, strict=True))


@on_ranks(2)
def an_error_of_one_rank_strands_nobody(rank: int, size: int) -> None:
    x, model, one = inputs(9, 5), sharded(plain()), plain()
    own = inputs(3 + 4 * rank, 5, seed=rank)  # other samples, and another number of them, on every rank

    def luck(outputs: Tensor) -> Tensor:
        if rank == 1 and len(outputs) >= 3:
            raise ZeroDivisionError("out of luck")
        return outputs

    def alone() -> None:
        if rank == 1:
            with pytest.raises(UnsupportedModelError, match="out of luck"):
                ntk(model, own, readout=luck)
        else:
            assert torch.equal(ntk(model, own, readout=luck), ntk(one, own, readout=luck))

    def together() -> None:
        kind, word = (UnsupportedModelError, "luck") if rank == 1 else (RankError, "rank 1 .* out of luck")
        with pytest.raises(kind, match=word):
            ntk(model, x, readout=luck, group="world")

    with layer_by_layer() as held:
        for broken in (alone, together):
            assert_untouched(model, broken)
            assert torch.equal(ntk(model, own), ntk(one, own))
    assert held
    expected, found = (trained(each, lambda _: None) for each in (sharded(plain()), model))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Rewriting(nn.Module):
    """Writes to its weights, which a gathered layer forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(1.5)
        return x * self.weight


class Overwriting(nn.Module):
    """Writes to what a backward pass needs."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().add_(1.0)


class CallingItself(nn.Module):
    """Its forward pass calls the whole model again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        found: Tensor = self.layer(torch.tanh(self(x, False)) if again else x)
        return found


@on_ranks(2)
def nothing_is_saved_for_us_after_a_model_that_calls_itself(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, x = CallingItself(6).double(), torch.randn(5, 6).double()
    expected = ntk(model, x, outputs="sum")
    fully_shard(model.layer)
    fully_shard(model)
    with layer_by_layer():
        found = ntk(model, x, outputs="sum")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@on_ranks(2)
def what_cannot_be_measured_layer_by_layer_is_refused(rank: int, size: int) -> None:
    x, model = inputs(9, 5), sharded(plain())
    free = "featlearn.audited_model.free_bytes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(free, lambda device: 500)
        patch.setattr("featlearn.audited_model.byte_budget", lambda memory, device: 250)
        for call in (lambda: neural_features(model, x), lambda: ntk(model, x, dtype=torch.float32)):
            with pytest.raises(UnsupportedModelError, match=r"the weights take 1\.3 KiB and 250 B are free"):
                call()
    with layer_by_layer():
        rewriting = nn.Sequential(Rewriting(), nn.Linear(5, 3)).double()
        for part in (rewriting[0], rewriting):
            fully_shard(part)
        with pytest.raises(UnsupportedModelError, match="rewrites"):
            ntk(rewriting, x)
        assert torch.equal(rewriting[0].weight.full_tensor(), torch.ones(5).double())
        overwriting = nn.Sequential(nn.Linear(5, 3), Overwriting()).double()
        for wrong in (overwriting, fully_shard(overwriting)):
            with pytest.raises(UnsupportedModelError, match="modified by an inplace operation"):
                ntk(wrong, x)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
        hybrid = sharded(plain(), mesh=mesh)
        assert torch.equal(ntk(hybrid, x), ntk(plain(), x))
        with pytest.raises(InputValueError, match="expected a mesh with one axis"):
            ntk(hybrid, x, group="world")
        alone = [dist.new_group([one]) for one in range(size)][rank]
        with pytest.raises(InputValueError, match="of ranks that are all in the group"):
            ntk(model, x, group=alone)
        assert torch.equal(ntk(model, x), ntk(plain(), x))
