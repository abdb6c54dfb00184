"""Find the uses of parameters in the autograd graph: the ops through which data meet a parameter.

A parameter may pass through ops that no sample touches (views, factors, a weight norm); the first op that combines it
with data is its use. Constant factors belong to the use that they follow, up to the next nonlinearity, or else to the
use whose operand they multiply. A factor on the inputs of a module belongs to the parameters of that module.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from featlearn.graph.graph import Edge, Graph, Value, build_graph
from featlearn.network.inputs import tensors_in
from featlearn.torch_internals import DispatchMode, dispatching, output_forms, saved, sequence_number

INPUT = "<input>"
CONTRACTED: dict[str, dict[int, int]] = {
    **{key: {0: -1, 1: -2} for key in ("Mm", "Bmm")},
    **{key: {1: -1, 2: -2} for key in ("Addmm", "Baddbmm")},
    **{key: {0: -1, 1: -1} for key in ("Mv", "Dot")},
    "Addmv": {1: -1, 2: -1},
    "Linear": {1: -1},
}
"""Op -> the axis of each operand that the op sums over."""
LOOKUPS = ("Embedding", "Index", "IndexSelect", "Gather")
PRODUCTS = ("Bmm", "Baddbmm", "ScaledDotProduct")
_PASSED = """
    Alias Clone Expand Narrow Permute ReshapeAlias Select Slice Squeeze T ToCopy Transpose UnsafeView Unsqueeze View
"""
VIEWS = frozenset(_PASSED.split())
SCALARS = frozenset(("Mul", "Div", "Neg", "Mean"))
SUMS = frozenset(("Add", "Sub", "Sum"))
_UNARY = """
    Celu Dropout Elu Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu LogSigmoid LogSoftmax Mish NativeDropout Relu Selu
    Sigmoid Silu Softmax Softplus Tanh Threshold
"""
ACTIVATIONS = frozenset(_UNARY.split())
_ELEMENTWISE = """
    Add Cat CudnnBatchNorm Div FusedRmsNorm IndexAdd NativeBatchNorm NativeGroupNorm NativeLayerNorm Mul Prelu Stack
    Sub Where
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())


@dataclass(eq=False)
class ParameterUse:
    """A use of a parameter, at all calls of the same kind."""

    name: str
    """name of the parameter; `name#2` for its second kind of use"""
    parameter: str
    op: str
    operand: int
    fan_in: int
    """number of products that one entry of the op's output sums over"""
    fan_out: int
    factor: float
    """product of the constant factors before and after the op, and of those on the parameter"""
    after: float
    """the part of the factor that follows the op"""
    is_vector: bool
    is_readout: bool
    """whether nothing but factors follows until the network's output"""
    closes_branch: bool
    """whether its output is added to a residual stream"""
    calls: list[tuple[Value, Any]] = field(default_factory=list)
    """(value of the parameter after ops without samples, node of the op) of each call"""

    def gradient(self, parameter: Tensor, arriving: Mapping[Any, Tensor | None]) -> Tensor:
        """Return the part of the gradient that reaches the parameter through this use."""
        total = torch.zeros_like(parameter)
        for (node, number), consumer in self.calls:
            at_output = arriving.get(consumer)
            if at_output is None:
                continue
            at_operand = _operand_gradient(consumer, at_output, self.operand)
            if "AccumulateGrad" in node.name():
                total += at_operand.sum_to_size(parameter.shape)
                continue
            shape = output_forms([node])[0][number][0]
            (part,) = torch.autograd.grad(
                [GradientEdge(node, number)], [parameter], [at_operand.sum_to_size(shape)], retain_graph=True
            )
            total += part.to_dense() if part.is_sparse else part
        return total


def _operand_gradient(node: Any, arriving: Tensor, operand: int) -> Tensor:
    """Run the backward pass of one op; nodes with one input return no tuple."""
    others = len(output_forms([node])[0]) - 1
    with torch.no_grad():
        gradients = node(arriving, *[None] * others)
    gradient: Tensor = gradients if isinstance(gradients, Tensor) else gradients[operand]
    return gradient.to_dense() if gradient.is_sparse else gradient


def base_name(node: Any) -> str:
    """Return the name of an op without its ending."""
    name: str = node.name().partition("Backward")[0]
    return name


def find_uses(
    output: Tensor, parameters: Mapping[str, list[str]], tensors: Mapping[str, Tensor], inputs: Any, entries: set[Value]
) -> dict[str, ParameterUse]:
    """Return the uses of parameters in a forward pass, by name.

    Args:
        output: Output of the network.
        parameters: All names of each parameter, by its first name.
        tensors: Each parameter by its first name.
        inputs: Inputs of the pass; those that require gradients mark what depends on data.
        entries: Inputs of modules that hold parameters.
    """
    data = {f"{INPUT}{k}": t for k, t in enumerate(tensors_in(inputs)) if t.requires_grad}
    graph = build_graph(output, {**tensors, **data})
    finder = _Finder(graph, entries, any_float=bool(data))
    groups: dict[str, dict[tuple[Any, ...], list[Edge]]] = defaultdict(lambda: defaultdict(list))
    for edge in finder.edges:
        for name in graph.names_below[edge.value[0]]:
            signature = (base_name(edge.consumer), edge.operand, graph.output_shape(edge.value))
            groups[name][signature].append(edge)
    uses = {}
    chains = {edge.consumer: finder.chain(edge.consumer) for edge in finder.edges}
    claimed = {node for chain in chains.values() for node, _ in chain.nodes}
    for name, kinds in groups.items():
        names = parameters[name] if len(parameters[name]) == len(kinds) else []
        ordered = sorted(kinds.values(), key=lambda edges: min(sequence_number(edge.consumer) for edge in edges))
        if not names:
            ordered.sort(key=len, reverse=True)
        for number, edges in enumerate(ordered):
            key = names[number] if names else name if not number else f"{name}#{number + 1}"
            use = finder.use(key, names[number] if names else name, tensors[name], edges[0], chains, claimed)
            use.calls = [(edge.value, edge.consumer) for edge in edges]
            uses[key] = use
    order = {name: k for k, name in enumerate(tensors)}
    return dict(sorted(uses.items(), key=lambda item: order.get(item[1].parameter, len(order))))


@dataclass(frozen=True)
class _Chain:
    """Ops after a use that multiply by constants, rearrange, or sum."""

    nodes: tuple[tuple[Any, int], ...]
    end: Any
    """the op that takes the result; None for the network's output, or if several ops take it"""
    reaches_output: bool
    factor: float


class _Finder:
    """Search of one graph."""

    def __init__(self, graph: Graph, entries: Collection[Value], any_float: bool) -> None:
        self.graph, self._entries = graph, entries
        self._mixed: set[Any] = set()
        self.edges: list[Edge] = []
        below = graph.names_below
        for node in graph.order:
            children = graph.inputs[node]
            name = base_name(node)
            mixed = any(child in self._mixed for child, _ in children if child is not None)
            leaf = not children and any(n.startswith(INPUT) for n in below.get(node, ()))
            lookup = name in LOOKUPS and bool(below.get(node))
            constant = (name in CONTRACTED or name == "Convolution") and not any_float
            alone = constant and sum(child is not None for child, _ in children) < 2
            if mixed or leaf or lookup or alone:
                self._mixed.add(node)
                for operand, (child, number) in enumerate(children):
                    if child is not None and child not in self._mixed and below.get(child):
                        self.edges.append(Edge((child, number), node, operand))

    def chain(self, node: Any) -> _Chain:
        """Follow the output of an op through factors, views and sums with what depends on no sample.

        Factors behind an activation count if the result is added to a residual stream or given out.
        """
        nodes: list[tuple[Any, int]] = []
        factor, value = 1.0, node
        end = None
        certain: tuple[int, float, Any] | None = None  # what counts whatever follows
        activated = sums_units = False
        while True:
            takers = self.graph.consumers.get(value, [])
            if len(takers) != 1 or (value, 0) in self._entries:
                break
            taker, operand = takers[0].consumer, takers[0].operand
            scale, by_parameter = self._scale(taker, operand), self._multiplies_parameter(taker, operand)
            if scale is None and base_name(taker) in ACTIVATIONS:
                certain, activated, scale = certain or (len(nodes), factor, taker), True, 1.0
            elif by_parameter and not activated:
                certain = certain or (len(nodes), factor, taker)
            sums_units = certain is not None and base_name(taker) in ("Sum", "Mean")
            if scale is None or sums_units or (by_parameter and activated):
                end = taker
                break
            nodes.append((taker, operand))
            factor, value = factor * scale, taker
        reaches_output = value is self.graph.root[0]
        if certain is not None and (activated or sums_units) and not reaches_output and not self._is_residual(end):
            count, factor, end = certain
            nodes = nodes[:count]
        if end is not None and base_name(end).startswith(PRODUCTS) and self._data_operands(end) > 1:
            nodes, factor = [], 1.0  # the scale of attention belongs to neither operand
        return _Chain(tuple(nodes), end, reaches_output, factor)

    def _multiplies_parameter(self, node: Any, operand: int) -> bool:
        if base_name(node) not in ("Mul", "Div"):
            return False
        return any(k != operand and child is not None for k, (child, _) in enumerate(self.graph.inputs[node]))

    def _is_residual(self, node: Any) -> bool:
        return node is not None and base_name(node) in ("Add", "Sub") and self._data_operands(node) > 1

    def _data_operands(self, node: Any) -> int:
        return sum(child in self._mixed for child, _ in self.graph.inputs[node] if child is not None)

    def _scale(self, node: Any, operand: int) -> float | None:
        """Return the factor of an op on this operand; None if it is not constant."""
        name = base_name(node)
        if self._data_operands(node) > 1:
            return None
        if name in VIEWS or name in SUMS:
            return 1.0
        if name not in SCALARS:
            return None
        shape = self.graph.output_shape((node, 0))
        ones = torch.ones(shape, dtype=self.graph.output_dtype((node, 0)), device=self._device)
        sizes = _operand_gradient(node, ones, operand).double().abs()
        if not self._multiplies_parameter(node, operand) and float(sizes.max() - sizes.min()) > 1e-5 * float(
            sizes.max()
        ):
            return None  # a mask
        return float(sizes.square().mean().sqrt())

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(iter(self.graph.leaves.values())).variable.device
        return device

    def use(
        self,
        key: str,
        name: str,
        parameter: Tensor,
        edge: Edge,
        chains: Mapping[Any, _Chain],
        claimed: Collection[Any],
    ) -> ParameterUse:
        """Describe the use at an edge."""
        node, op, chain = edge.consumer, base_name(edge.consumer), chains[edge.consumer]
        shape = self.graph.output_shape(edge.value)
        fan_in, fan_out = self._fans(edge, shape, chain, parameter)
        factor = chain.factor * self._factor_on_parameter(edge.value, parameter)
        contracts = edge.operand in CONTRACTED.get(op, ()) or (op == "Convolution" and edge.operand == 1)
        for k, (child, _) in enumerate(self.graph.inputs[node]):
            if (contracts or op == "Mul") and k != edge.operand and child in self._mixed:
                factor *= self._factor_before(child, claimed)
        expanded = 2 * parameter.numel() <= shape.numel()
        is_vector = fan_in == 1 and parameter.numel() == max(parameter.shape, default=1) and op not in LOOKUPS
        return ParameterUse(
            name=key,
            parameter=name,
            op=op,
            operand=edge.operand,
            fan_in=fan_in,
            fan_out=fan_out,
            factor=factor,
            after=chain.factor,
            is_vector=is_vector and (expanded or not contracts),
            is_readout=chain.reaches_output,
            closes_branch=self._is_residual(chain.end),
        )

    def _fans(self, edge: Edge, shape: torch.Size, chain: _Chain, parameter: Tensor) -> tuple[int, int]:
        op, operand = base_name(edge.consumer), edge.operand
        if 2 * parameter.numel() <= shape.numel():  # expanded, as gains of a weight norm
            return 1, parameter.numel()
        axis = CONTRACTED.get(op, {}).get(operand)
        if axis is not None:
            fan_in = shape[axis]
            return fan_in, (shape[-1 - (axis == -1)] if len(shape) > 1 else 1)
        if op == "Convolution" and operand == 1:
            taps = math.prod(shape[2:])
            if saved(edge.consumer, "transposed"):
                return shape[0] * taps, shape[1]
            return shape[1] * taps, shape[0]
        if op not in ELEMENTWISE and op not in LOOKUPS and parameter.dim() > 1:
            return parameter.numel() // len(parameter), len(parameter)
        if op in LOOKUPS:
            return 1, shape[-1] if shape else 1
        reduced = 1
        for node, _ in chain.nodes:
            if base_name(node) in ("Sum", "Mean"):
                before = self.graph.output_shape(node.next_functions[0]).numel()
                reduced *= before // max(self.graph.output_shape((node, 0)).numel(), 1)
        largest = max(shape, default=1)
        fan_in = largest if op == "Mul" and largest > 1 and reduced % largest == 0 else 1
        return fan_in, max(shape.numel() // fan_in, 1)

    def _factor_on_parameter(self, value: Value, parameter: Tensor) -> float:
        node = value[0]
        if "AccumulateGrad" in node.name():
            return 1.0
        shape, dtype = self.graph.output_shape(value), self.graph.output_dtype(value)
        generator = torch.Generator().manual_seed(0)
        signs = (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(self._device, dtype)
        (pulled,) = torch.autograd.grad([GradientEdge(*value)], [parameter], [signs], retain_graph=True)
        return float(pulled.double().norm()) / max(float(signs.double().norm()), 1e-300)

    def _factor_before(self, node: Any, claimed: Collection[Any]) -> float:
        """Return the constant factor on an operand."""
        factor = 1.0
        while node not in claimed and base_name(node) in VIEWS | {"Mul", "Div", "Neg"}:
            children = [(k, child) for k, (child, _) in enumerate(self.graph.inputs[node]) if child is not None]
            if len(children) != 1:
                break
            ((operand, child),) = children
            scale = self._scale(node, operand)
            if scale is None or child not in self._mixed:
                break
            factor, node = factor * scale, child
        return factor


@contextmanager
def module_entries(model: nn.Module) -> Iterator[set[Value]]:
    """Record the inputs of modules that hold parameters, as values of the graph."""
    values: set[Value] = set()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.grad_fn is not None:
                values.add((tensor.grad_fn, tensor.output_nr))

    holders = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in holders]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class OpCall:
    """A recorded op."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def with_operand(self, operand: int, value: Tensor) -> Tensor:
        """Return the output with another tensor for one operand."""
        position = -1

        def replace(item: Any) -> Any:
            nonlocal position
            if not isinstance(item, Tensor):
                return item
            position += item.is_floating_point()
            if item.is_floating_point() and position == operand:
                return value.clone() if value.shape == item.shape else item
            return item.clone()

        args = tuple(replace(item) for item in self.args)
        result = self.function(*args, **self.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple | list) else result
        return output

    def operand(self, number: int) -> Tensor | None:
        """Return a floating-point operand."""
        tensors = [item for item in self.args if isinstance(item, Tensor) and item.is_floating_point()]
        return tensors[number] if number < len(tensors) else None


class RecordedOps(DispatchMode):
    """Record differentiable ops of a forward pass by the number of their node."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[int, OpCall] = {}

    def of(self, node: Any) -> OpCall | None:
        """Return the op that made a node."""
        return self.calls.get(sequence_number(node))


def _record(mode: RecordedOps, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    number = sequence_number()
    kwargs = kwargs or {}
    is_new = number not in mode.calls
    copies = tuple(item.detach().clone() if isinstance(item, Tensor) else item for item in args) if is_new else ()
    result = func(*args, **kwargs)
    first = result[0] if isinstance(result, tuple | list) and result else result
    if is_new and isinstance(first, Tensor) and first.is_floating_point():
        mode.calls[number] = OpCall(func, copies, dict(kwargs), first.detach().clone())
    return result


dispatching(RecordedOps, _record)
