"""What is proved of sample axes from ops alone must be what gradients show: a proof lets a kernel skip its check.

Soundness asks nothing of the model: row p of the outputs defines sample p. A proved layout is right if the gradient of
row p vanishes outside of the slice of sample p, for every p. That is asked of every proved node of every graph here.
"""

import random
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from featlearn.graph.graph import Graph, Layout, Node, backward_to, build_graph, splits
from featlearn.graph.samples import probed_graph
from featlearn.ops import attention, registry
from featlearn.ops.registry import SampleAxis, Step, proved_layouts
from tests.zoo.case import default_dtype


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def row_gradients(outputs: Tensor, nodes: list[Node]) -> dict[Node, list[Tensor | None]]:
    """The gradients of every row of the outputs at some nodes."""
    direction, found = torch.randn(outputs.shape[1]), {node: [] for node in nodes}
    for row in range(len(outputs)):
        cotangent = torch.zeros_like(outputs)
        cotangent[row] = direction
        for (node, _), gradient in backward_to(outputs, [(node, 0) for node in nodes], {}, cotangent)[0].items():
            found[node].append(gradient)
    return found


def is_local(gradients: list[Tensor | None], layout: Layout) -> bool:
    for row, gradient in enumerate(gradients):
        if gradient is not None:
            others = layout.split(gradient).nan_to_num().clone()
            others[:, row] = 0.0
            if bool(others.any()):
                return False
    return True


def soundly_proved(outputs: Tensor, parameters: dict[str, Tensor]) -> tuple[Graph, dict[Node, Layout]]:
    """Everything that is proved of a graph, after it was compared with the gradients of every row."""
    graph = build_graph(outputs, parameters)
    leaves = set(graph.leaves.values())
    proved = proved_layouts(graph, len(outputs), [node for node in graph.names_below if node not in leaves])
    by_value = probed_graph(outputs, graph, parameters, torch.Generator().manual_seed(0)).axes
    for node, gradients in row_gradients(outputs, list(proved)).items():
        shape = graph.output_shape((node, 0))
        assert is_local(gradients, proved[node]), f"{node.name()} {tuple(shape)}: {proved[node]} is wrong"
        fitting = [layout for layout in splits(shape, len(outputs)) if is_local(gradients, layout)]
        # Values alone may allow several, where gradients vanish; samples that lie across axes are never looked for.
        assert fitting != [proved[node]] or by_value.get(node, proved[node]) == proved[node]
    return graph, proved


SIZES = {"unequal": (5, 3, 4), "square": (4, 4, 4)}
"""Samples, positions, features."""


def first(h: Tensor) -> tuple[Tensor, int, int]:
    return h, 0, 1


def middle(h: Tensor) -> tuple[Tensor, int, int]:
    return h.permute(1, 0, 2), 1, 1


def last(h: Tensor) -> tuple[Tensor, int, int]:
    return h.permute(1, 2, 0), 2, 1


def behind_positions(h: Tensor) -> tuple[Tensor, int, int]:
    """(positions x samples, features)"""
    return h.transpose(0, 1).reshape(-1, h.shape[2]), 0, h.shape[1]


def before_positions(h: Tensor) -> tuple[Tensor, int, int]:
    """(samples x positions, features)"""
    return h.reshape(-1, h.shape[2]), 0, 1


def behind_positions_last(h: Tensor) -> tuple[Tensor, int, int]:
    """(features, positions x samples)"""
    return h.permute(2, 1, 0).flatten(1), 1, h.shape[1]


def single_axis(h: Tensor) -> tuple[Tensor, int, int]:
    """(positions x samples x features,)"""
    return h.transpose(0, 1).flatten(), 0, h.shape[1]


ARRANGEMENTS = [first, middle, last, behind_positions, before_positions, behind_positions_last, single_axis]
"""Each gives a tensor, the axis of the samples, and how many times they repeat in it."""


def read_out(y: Tensor, axis: int, outer: int, samples: int) -> Tensor:
    """(samples, C) from a tensor with the samples in this axis."""
    split = y.unflatten(axis, (outer, samples, -1))
    return torch.tanh(split.movedim(axis + 1, 0).flatten(1))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def hidden(sizes: tuple[int, int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """(samples, positions, features), made with a weight."""
    weight = drawn(sizes[2], sizes[2]).requires_grad_()
    return drawn(*sizes) @ weight, {"weight": weight}


def is_proved_at_the_weight(graph: Graph, proved: dict[Node, Layout]) -> bool:
    return any(node.name() == "MmBackward0" and node.next_functions[1][0] in graph.leaves.values() for node in proved)


ENTRY_BY_ENTRY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Add": lambda t: t + t.shape[-1],
    "Addcdiv": lambda t: torch.addcdiv(t, t, t * t + 1),
    "Addcmul": lambda t: torch.addcmul(t, drawn(*t.shape[1:]), t),
    "Alias": lambda t: torch.ops.aten.alias(t),
    "Atan2": lambda t: torch.atan2(t, drawn(*t.shape)),
    "Celu": F.celu,
    "Clamp": lambda t: t.clamp(-0.5, 0.5),
    "ClampMax": lambda t: t.clamp_max(0.3),
    "ClampMin": lambda t: t.clamp_min(-0.3),
    "Clone": torch.clone,
    "Cos": torch.cos,
    "Div": lambda t: drawn(t.shape[-1]) / (t * t + 1),
    "Elu": F.elu,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": lambda t: (t[None].expand(2, *t.shape)).sum(0),
    "Expm1": torch.expm1,
    "Gelu": F.gelu,
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Hardtanh": F.hardtanh,
    "LeakyRelu": F.leaky_relu,
    "Lerp": lambda t: torch.lerp(t, drawn(*t.shape), t),
    "Log": lambda t: (t * t + 1).log(),
    "Log1P": lambda t: (t * t).log1p(),
    "LogSigmoid": F.logsigmoid,
    "MaskedFill": lambda t: t.masked_fill(drawn(*t.shape) > 0, 0.3),
    "Maximum": lambda t: torch.maximum(t, drawn(t.shape[-1])),
    "Minimum": lambda t: torch.minimum(drawn(*t.shape), t),
    "Mish": F.mish,
    "Mul": lambda t: t * t,
    "NativeDropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "Neg": torch.neg,
    "Pow": lambda t: (t * t + 1) ** t,
    "PreluKernel": lambda t: F.prelu(t, drawn(1)),
    "Reciprocal": lambda t: (t * t + 1).reciprocal(),
    "Relu": F.relu,
    "ReshapeAlias": lambda t: torch.ops.aten._reshape_alias(t, t.shape, t.stride()),
    "Rsqrt": lambda t: (t * t + 1).rsqrt(),
    "Rsub": lambda t: torch.rsub(t, 1),
    "Sigmoid": torch.sigmoid,
    "Silu": F.silu,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Sqrt": lambda t: (t * t + 1).sqrt(),
    "Squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "Sub": lambda t: t - t.detach() ** 2,
    "Tanh": torch.tanh,
    "Threshold": lambda t: F.threshold(t, 0.1, 0.2),
    "ToCopy": lambda t: t.float().double(),
    "Unsqueeze": lambda t: t.unsqueeze(0).squeeze(0),
    "UnsafeView": lambda t: torch.ops.aten._unsafe_view(t.contiguous(), t.shape),
    "View": lambda t: t.contiguous().view(-1).view(t.shape),
    "Where": lambda t: torch.where(t > 0, t, t * t),
}


@settings(max_examples=4, derandomize=True, deadline=None)
@given(sizes=st.sampled_from(list(SIZES.values())), arrange=st.sampled_from(ARRANGEMENTS))
@pytest.mark.parametrize("name", ENTRY_BY_ENTRY)
def test_ops_that_keep_entries_in_place(name: str, sizes: tuple[int, int, int], arrange: Any):
    h, parameters = hidden(sizes)
    t, axis, outer = arrange(h)
    y = ENTRY_BY_ENTRY[name](t)
    graph, proved = soundly_proved(read_out(y, axis, outer, sizes[0]), parameters)
    assert any(node.name().startswith(f"{name}Backward") for node in graph.order)
    assert is_proved_at_the_weight(graph, proved)


def same(axis: int, along: int) -> int:
    return axis


def dropped(axis: int, along: int) -> int:
    return axis - (along < axis)


def added(axis: int, along: int) -> int:
    return axis + (along <= axis)


ALONG_AN_AXIS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[int, int], int]]] = {
    "Amax": (lambda t, a: t.amax(a), dropped),
    "Amin": (lambda t, a: t.amin(a, keepdim=True), same),
    "Cat": (lambda t, a: torch.cat([t, t.sin()], a), same),
    "Cumsum": (lambda t, a: t.cumsum(a), same),
    "Flip": (lambda t, a: t.flip(a), same),
    "Gather": (lambda t, a: t.gather(a, torch.randint(t.shape[a], t.shape)), same),
    "IndexAdd": (lambda t, a: t.sin().index_add(a, torch.arange(t.shape[a]).flip(0) // 2, t), same),
    "Scatter": (lambda t, a: t.scatter(a, torch.randint(t.shape[a], t.shape), t.sin()), same),
    "ScatterAdd": (lambda t, a: t.sin().scatter_add(a, torch.randint(t.shape[a], t.shape), t), same),
    "Index": (lambda t, a: t[(*[slice(None)] * (a % t.dim()), torch.arange(t.shape[a]).flip(0))], same),
    "IndexSelect": (lambda t, a: t.index_select(a, torch.arange(t.shape[a]).flip(0)), same),
    "LinalgVectorNorm": (lambda t, a: torch.linalg.vector_norm(t, dim=a), dropped),
    "LogSoftmax": (lambda t, a: t.log_softmax(a), same),
    "Logsumexp": (lambda t, a: t.logsumexp(a), dropped),
    "Max": (lambda t, a: t.max(a)[0], dropped),
    "Mean": (lambda t, a: t.mean(a), dropped),
    "Min": (lambda t, a: t.min(a, keepdim=True)[0], same),
    "Norm": (lambda t, a: torch.ops.aten.norm.ScalarOpt_dim(t, 2, [a], False), dropped),
    "Roll": (lambda t, a: t.roll(1, a), same),
    "SafeSoftmax": (lambda t, a: torch.ops.aten._safe_softmax(t, a), same),
    "Select": (lambda t, a: t.select(a, 1), dropped),
    "Sort": (lambda t, a: t.sort(a)[0], same),
    "Topk": (lambda t, a: t.topk(t.shape[a] - 1, a)[0], same),
    "Slice": (lambda t, a: t.narrow(a, 1, t.shape[a] - 1), same),
    "Softmax": (lambda t, a: t.softmax(a), same),
    "Split": (lambda t, a: torch.cat(t.split(1, a)[::-1], a), same),
    "SplitWithSizes": (lambda t, a: torch.cat(t.split([1, t.shape[a] - 1], a)[::-1], a), same),
    "Stack": (lambda t, a: torch.stack([t, t.sin()], a), added),
    "Std": (lambda t, a: t.std(a), dropped),
    "Sum": (lambda t, a: t.sum(a, keepdim=True), same),
    "Unbind": (lambda t, a: t.unbind(a)[0] * t.unbind(a)[1], dropped),
    "UnsafeSplit": (lambda t, a: torch.unsafe_split(t, 1, a)[1], same),
    "Var": (lambda t, a: t.var(a), dropped),
}
"""An op along an axis, and where another axis is behind it."""


@settings(max_examples=4, derandomize=True, deadline=None)
@given(sizes=st.sampled_from(list(SIZES.values())), arrange=st.sampled_from(ARRANGEMENTS), negative=st.booleans())
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_ops_along_an_axis(name: str, sizes: tuple[int, int, int], arrange: Any, negative: bool):
    """Along another axis than that of the samples everything is proved; along that of the samples nothing wrong is."""
    h, parameters = hidden(sizes)
    t, axis, outer = arrange(h)
    op, moved = ALONG_AN_AXIS[name]
    for along in range(t.dim()):
        place = along - t.dim() - (name == "Stack") if negative else along
        y = op(t, place)
        if along != axis or name == "Stack":
            graph, proved = soundly_proved(read_out(y, moved(axis, along), outer, sizes[0]), parameters)
            assert any(node.name().startswith(f"{name}Backward") for node in graph.order)
            # An index in front of the samples is left to the values.
            assert is_proved_at_the_weight(graph, proved) or (name == "Index" and along < axis)
        elif y.dim() and y.numel() % sizes[0] == 0:
            for start in range(y.dim()):
                outputs = torch.tanh(y.movedim(start, 0).reshape(sizes[0], -1))
                graph, proved = soundly_proved(outputs, parameters)
                assert start != axis or y.shape != t.shape or not is_proved_at_the_weight(graph, proved)


@pytest.mark.parametrize("arrange", [first, middle, last])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_permutations(sizes: tuple[int, int, int], arrange: Any):
    moves = [
        lambda t: t.permute(2, 0, 1),
        lambda t: t.permute(-1, 1, 0),
        lambda t: t.transpose(0, -1),
        lambda t: t.transpose(1, 2),
        lambda t: t.mT,
        lambda t: t.swapaxes(0, 1),
        lambda t: t.flatten(1).t(),
        lambda t: t.flatten(0, 1).T,
        lambda t: t.transpose(1, 1),
    ]
    h, parameters = hidden(sizes)
    t, _, _ = arrange(h)
    for move in moves:
        y = move(t)
        for axis in range(y.dim()):
            if y.shape[axis] % sizes[0] == 0:
                soundly_proved(torch.tanh(y.movedim(axis, 0).reshape(sizes[0], -1)), parameters)


def bilinear(h: Tensor) -> Tensor:
    return h.flatten(1) @ drawn(h[0].numel(), 3)


PRODUCTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "Mm, samples in rows": (lambda h: h.flatten(0, 1) @ drawn(h.shape[2], 3), True),
    "Mm, samples in columns": (lambda h: (drawn(3, h.shape[2]) @ h.flatten(0, 1).T).T, True),
    "Mm, samples contracted": (lambda h: drawn(len(h), len(h)) @ h.flatten(1), False),
    "Mm, samples with samples": (lambda h: h.flatten(1) @ h.flatten(1).T, False),
    "Addmm": (lambda h: torch.addmm(h[:, 0, :1], bilinear(h), drawn(3, 4)), True),
    "Addmm, samples contracted": (lambda h: torch.addmm(drawn(3), drawn(len(h), len(h)), bilinear(h)), False),
    "Bmm, samples in the batch": (lambda h: h @ h.mT, True),
    "Bmm, samples in rows": (lambda h: (h.transpose(0, 1) @ drawn(h.shape[1], h.shape[2], 3)).transpose(0, 1), True),
    "Bmm, samples in columns": (
        lambda h: (drawn(h.shape[1], 3, h.shape[2]) @ h.permute(1, 2, 0)).permute(2, 0, 1),
        True,
    ),
    "Bmm, samples contracted": (lambda h: drawn(h.shape[2], len(h), len(h)) @ h.permute(2, 0, 1), False),
    "Baddbmm": (lambda h: torch.baddbmm(h[:, :, :1], h, drawn(len(h), h.shape[2], 3)), True),
    "Mv": (lambda h: h.flatten(0, 1) @ drawn(h.shape[2]), True),
    "Mv, samples contracted": (lambda h: drawn(len(h), len(h)) @ h[:, 0, 0], False),
    "Mv, vector of samples": (lambda h: h[:, 0, 0] @ drawn(len(h), len(h)), False),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, sizes: tuple[int, int, int]):
    h, parameters = hidden(sizes)
    op, apart = PRODUCTS[name]
    y = op(torch.tanh(h))
    y = y.transpose(0, 1) if name == "Bmm, samples contracted" else y
    graph, proved = soundly_proved(torch.tanh(y.reshape(sizes[0], -1)), parameters)
    assert is_proved_at_the_weight(graph, proved) is apart


IMAGES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "Convolution": (lambda t: F.conv2d(t, drawn(t.shape[1], t.shape[1], 3, 3), padding=1), (0,)),
    "Convolution of channels": (lambda t: F.conv2d(t, drawn(t.shape[1], 1, 3, 3), padding=1, groups=t.shape[1]), (0,)),
    "Convolution, transposed": (lambda t: F.conv_transpose2d(t, drawn(t.shape[1], t.shape[1], 1, 1)), (0,)),
    "NativeGroupNorm": (lambda t: F.group_norm(t, 1), (0,)),
    "NativeBatchNorm": (lambda t: F.batch_norm(t, drawn(t.shape[1]), drawn(t.shape[1]) ** 2 + 1), (0,)),
    "NativeBatchNorm of the batch": (lambda t: F.batch_norm(t, None, None, training=True), ()),
    "AvgPool2D": (lambda t: F.avg_pool2d(t, 3, 1, 1), (0, 1)),
    "AvgPool3D": (lambda t: F.avg_pool3d(t, (3, 1, 1), 1, (1, 0, 0)), (0,)),
    "AvgPool3D of images": (lambda t: F.avg_pool3d(t[None], (3, 1, 1), 1, (1, 0, 0))[0], (0,)),
    "MaxPool2DWithIndices": (lambda t: F.max_pool2d(t, 3, 1, 1), (0, 1)),
    "MaxPool3DWithIndices": (lambda t: F.max_pool3d(t, 3, 1, 1), (0,)),
    "AdaptiveAvgPool2D": (lambda t: torch.ops.aten._adaptive_avg_pool2d(t, t.shape[2:]), (0, 1)),
    "ConstantPadNd": (lambda t: F.pad(t, (1, 1, 0, 2)), (0, 1)),
    "ConstantPadNd that shifts": (lambda t: F.pad(t, (1, -1, 1, -1)), (0, 1)),
    "NativeLayerNorm": (lambda t: F.layer_norm(t, t.shape[3:]), (0, 1, 2)),
    "NativeLayerNorm of images": (lambda t: F.layer_norm(t, t.shape[1:]), (0,)),
    "ScaledDotProductFlashAttentionForCpu": (lambda t: F.scaled_dot_product_attention(t, 2 * t, t + 1), (0, 1)),
    "Index of two axes": (lambda t: t[:, :, torch.tensor([0, 1]), torch.tensor([1, 0])], ()),
    "Index by a mask": (lambda t: t[:, :, drawn(*t.shape[2:]) > 0], (0, 1)),
    "Index by a mask of samples": (lambda t: t[torch.arange(len(t)) >= 0], ()),
}
"""Of four axes, and in which of them the samples keep their places."""


@pytest.mark.parametrize("sizes", [(5, 3, 4, 2), (4, 4, 4, 4), (3, 3, 3, 3), (3, 3, 2, 3)])
@pytest.mark.parametrize("name", IMAGES)
def test_images_norms_and_attention(name: str, sizes: tuple[int, ...]):
    op, apart = IMAGES[name]
    for axis in range(4):
        samples = sizes[axis]
        weight = drawn(*sizes[1:]).requires_grad_()
        h = (drawn(*sizes) * weight).sin()
        y = op(h)
        if axis >= y.dim() or y.shape[axis] % samples:
            continue
        graph, proved = soundly_proved(torch.tanh(y.movedim(axis, 0).reshape(samples, -1)), {"weight": weight})
        kind = name.split(" ")[0].split(",")[0]
        assert any(node.name().startswith(f"{kind}Backward") for node in graph.order)
        below = any(node.name() == "SinBackward0" for node in proved)
        if y.shape[axis] == samples:
            assert below is (axis in apart)


def test_the_bias_of_attention_has_keys_where_the_output_has_features():
    """Only a GPU gives such a bias a gradient in a fused op, so the rule itself is asked."""
    bias, output = torch.Size((1, 1, 6, 4)), torch.Size((1, 1, 6, 4))
    for axis, expected in ((2, Layout(1, 6, 4)), (3, None)):
        samples = output[axis]
        layout = Layout(prod(output[:axis]), samples, prod(output[axis + 1 :]))
        step = Step(lambda name: None, output, SampleAxis(axis, 1), layout, 3, bias)
        assert attention.attention(step) == expected


def broadcast_over_samples(h: Tensor) -> Tensor:
    return h[:1].expand_as(h) * h.detach()


def rolled(h: Tensor) -> Tensor:
    return h.roll(1, 0)


def padded_by_one_sample(h: Tensor) -> Tensor:
    return F.pad(h, (0, 0, 0, 0, 1, -1))


def one_sample_for_all(h: Tensor) -> Tensor:
    return h.select(0, 0)[None] + torch.zeros_like(h)


def shifted_by_a_slice(h: Tensor) -> Tensor:
    return torch.cat([h[1:], h[:1]])


def written_into(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[torch.arange(len(h)).flip(0)] = h
    return out


def samples_as_positions(h: Tensor) -> Tensor:
    return h.transpose(0, 1).reshape(h.shape)


def strided(h: Tensor) -> Tensor:
    return h.contiguous().as_strided(h.shape, (1, h.shape[0], h.shape[0] * h.shape[1]))


def samples_in_pieces(h: Tensor) -> Tensor:
    return h.reshape(2, -1, *h.shape[1:]).transpose(0, 1).reshape(h.shape)


def two_paths(h: Tensor) -> Tensor:
    """One of them is in order, the other is not."""
    return h + h.transpose(0, 1).reshape(h.shape)


def two_parts(h: Tensor) -> Tensor:
    one, other = h.split(2, 2)
    return one * other.transpose(0, 1).reshape(one.shape)


MIXING = [
    broadcast_over_samples,
    rolled,
    padded_by_one_sample,
    one_sample_for_all,
    shifted_by_a_slice,
    written_into,
    strided,
]
REORDERING = [samples_as_positions, samples_in_pieces, two_paths, two_parts]


@pytest.mark.parametrize("mix", MIXING)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 3, 4), (6, 6, 4)])
def test_nothing_is_proved_below_what_moves_samples(mix: Callable[[Tensor], Tensor], sizes: tuple[int, int, int]):
    h, parameters = hidden(sizes)
    graph, proved = soundly_proved(torch.tanh(mix(h).reshape(sizes[0], -1)), parameters)
    assert not is_proved_at_the_weight(graph, proved)


@pytest.mark.parametrize("reorder", REORDERING)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 3, 4), (6, 6, 4)])
def test_what_is_proved_of_other_orders_is_right(reorder: Callable[[Tensor], Tensor], sizes: tuple[int, int, int]):
    """A view of views may come back to something regular."""
    h, parameters = hidden(sizes)
    soundly_proved(torch.tanh(reorder(h).reshape(sizes[0], -1)), parameters)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


def test_nothing_is_proved_below_functions_of_the_user():
    for name in ("Mul", "MulBackward0", "Tanh", "TanhBackward1"):
        kind = type(name, (Reversed,), {})
        h, parameters = hidden((5, 3, 4))
        graph, proved = soundly_proved(torch.tanh(kind.apply(h).flatten(1)), parameters)
        assert not is_proved_at_the_weight(graph, proved)


def random_op(choice: random.Random, t: Tensor, earlier: Tensor) -> Tensor:
    """Any op of the lists above, or one that is on none of them, along any axis."""
    axis = choice.randrange(t.dim())
    factors = [size for size in range(2, t.numel()) if t.numel() % size == 0]
    order = choice.sample(range(t.dim()), t.dim())
    ops: list[Callable[[], Tensor]] = [
        lambda: choice.choice(list(ENTRY_BY_ENTRY.values()))(t),
        lambda: choice.choice(list(ALONG_AN_AXIS.values()))[0](t, axis),
        lambda: t.permute(order),
        lambda: t.reshape(choice.choice(factors), -1),
        lambda: t.unflatten(axis, (choice.choice([2, 3]), -1)),
        lambda: t.flatten(0, 1),
        lambda: t.roll(1, axis),
        lambda: F.pad(t, choice.choice([(1, 0), (1, -1), (0, 0, 1, -1)])),
        lambda: t @ drawn(t.shape[-1], choice.choice([t.shape[-1], 2])),
        lambda: drawn(t.shape[-2], t.shape[-2]) @ t,
        lambda: t @ t.mT,
        lambda: t * earlier.reshape(-1)[: t.shape[-1]],
        lambda: t + earlier.reshape(-1)[: t.numel() // t.shape[0]].reshape(t.shape[1:]),
        lambda: t * earlier.reshape(t.shape),
        lambda: choice.choice(list(IMAGES.values()))[0](t),
    ]
    return choice.choice(ops)()


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int):
    """Whatever is done to tensors, and whatever their axes mean."""
    choice, count = random.Random(seed), 0
    for _ in range(60):
        sizes = choice.choice([(5, 3, 4), (4, 4, 4), (2, 2, 2), (3, 2, 3), (6, 2, 3), (2, 3, 2, 3), (3, 3)])
        weight = drawn(*sizes).requires_grad_()
        t = earlier = weight.sin()
        for _ in range(choice.randrange(2, 8)):
            try:
                found = random_op(choice, t, earlier)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # shapes that do not fit
            if 1 < found.numel() < 1000 and found.dim() > 1 and found.requires_grad:
                t, earlier = found, t
        t = t.movedim(choice.randrange(t.dim()), 0)
        samples = len(t) if len(t) > 1 else choice.choice([s for s in range(2, 99) if t.numel() % s == 0])
        outputs = torch.tanh(0.3 * t.reshape(samples, -1))
        if bool(torch.isfinite(outputs).all()) and len(outputs) <= 24:
            count += len(soundly_proved(outputs, {"weight": weight})[1])
    assert count > 100


def rows_and_weight() -> tuple[Tensor, Tensor]:
    weight = torch.randn(4, 3, requires_grad=True)
    return torch.randn(5, 4) @ weight, weight


@pytest.mark.parametrize(
    ("function", "proved_op"),
    [
        (lambda h: F.bilinear(h, h.sin(), torch.randn(2, 3, 3)), True),
        (lambda h: F.bilinear(torch.randn(5, 3), h, torch.randn(2, 3, 3)), True),
        (lambda h: torch.cdist(h, torch.randn(6, 3)), True),
        (lambda h: torch.cdist(h, torch.randn(30, 3)), True),
        (lambda h: torch.cdist(h[:, None], torch.randn(5, 6, 3)).flatten(1), True),
        (lambda h: torch.cdist(torch.randn(5, 6, 3), h[:, None]).flatten(1), True),
        (lambda h: torch.cdist(torch.randn(6, 3), h).T, False),
        (lambda h: torch.cdist(h, h.sin()), False),
        (lambda h: torch.cdist(torch.randn(5, 3), h), False),
    ],
)
def test_bilinear_forms_and_distances(function: Callable[[Tensor], Tensor], proved_op: bool):
    h, weight = rows_and_weight()
    graph, proved = soundly_proved(function(h), {"weight": weight})
    products = [node for node in graph.order if node.name() == "MmBackward0" and node in graph.names_below]
    assert all((node in proved) == proved_op for node in products[:1])


def test_every_rule_has_a_test():
    tested = {name.split(" ")[0].split(",")[0] for name in (*ENTRY_BY_ENTRY, *ALONG_AN_AXIS, *PRODUCTS, *IMAGES)}
    elsewhere = {"Permute", "Transpose", "T", "Swapaxes"}  # test_permutations; torch swaps by Transpose today
    elsewhere |= {"Trilinear", "Cdist", "EuclideanDist"}  # test_bilinear_forms_and_distances
    same_as_another = {
        "Selu",
        "FusedRmsNorm",
        "ConvolutionOverrideable",
        "CudnnConvolution",
        "CudnnBatchNorm",
        "MiopenBatchNorm",
        "ScaledDotProductFlashAttention",
        "ScaledDotProductCudnnAttention",
        "ScaledDotProductEfficientAttention",
        "ScaledDotProductFusedAttentionOverrideable",
    }
    assert {name for kind, name in registry._FLOWS if kind == "backward"} <= tested | elsewhere | same_as_another
