"""The network as a function of its probe inputs: calls, readouts, chunks of samples."""

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, NotFiniteError, UnsupportedModelError
from featlearn.network.isolation import OPERANDS, compiler_not_imported
from featlearn.readouts import DefaultReadout, LogProbability, TargetedInputs
from featlearn.shapes import describe

if TYPE_CHECKING:
    from featlearn.network.large_weights import LargeWeights

Inputs = Any
"""A tensor, a tuple (`model(*x)`) or a mapping (`model(**x)`), batch first."""
Readout = Callable[..., Any]


def map_tensors(thing: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `thing` with `change` applied to every tensor in it. Containers keep their type."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, Mapping):
        return _mapping_like(thing, {key: map_tensors(value, change) for key, value in thing.items()})
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(map_tensors(value, change) for value in thing))
    if isinstance(thing, tuple | list):
        return type(thing)(map_tensors(value, change) for value in thing)
    return thing


def _mapping_like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type with other entries; a plain dictionary if the type cannot hold them."""
    if type(mapping) is dict:
        return entries
    try:
        twin: Any = copy.copy(mapping)
        if hasattr(twin, "batch_size"):  # a TensorDict checks its entries against their common first axes
            twin.batch_size = []
        for key, value in entries.items():
            twin[key] = value
        if hasattr(twin, "batch_size"):
            axes, tensors = len(mapping.batch_size), tensors_in(entries)  # type: ignore[attr-defined]
            twin.batch_size = tuple(tensors[0].shape[:axes]) if tensors else ()
    except Exception:  # from a class of the user
        return entries
    assert isinstance(twin, Mapping)
    return twin


def tensors_in(thing: Any) -> list[Tensor]:
    """Return every tensor in nested inputs."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    return [tensor for part in thing for tensor in tensors_in(part)] if isinstance(thing, tuple | list) else []


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the `dtype` argument, refused unless it is a precision to measure in."""
    if dtype not in (None, torch.float32, torch.float64):
        raise InputTypeError(f"dtype is {dtype!r}, expected torch.float32, torch.float64 or None")
    return dtype


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return floating point numbers in `dtype`, complex ones with parts in it."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def cast_inputs(x: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Return floating point inputs in `dtype`, and none of them inference tensors."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone() if tensor.is_inference() else tensor
        if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return cast(tensor.detach(), dtype).requires_grad_(tensor.requires_grad)

    return map_tensors(x, change)


def input_kind(x: Inputs) -> tuple[object, ...]:
    """What two batches share that the same code treats alike, the number of samples aside."""
    return tuple([(tensor.shape[1:], tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors_in(x)])


def batch_size(x: Inputs, name: str = "x") -> int:
    """The number of samples in `x`, after a check that it is something a model can be called with."""
    if isinstance(x, nn.utils.rnn.PackedSequence):
        raise InputTypeError(f"{name} is a PackedSequence, expected padded tensors, batch first; pack inside the model")
    if not isinstance(x, Tensor | tuple | Mapping):
        remedy = "convert arrays with torch.as_tensor"
        if type(x).__module__.partition(".")[0] == "torch_geometric":
            remedy = "hold edge_index in the model, and pass node features of shape (graphs, nodes, features)"
        raise InputTypeError(
            f"{name} is {describe(x)}, expected a tensor, a tuple (called as model(*{name})) or a mapping "
            f"(called as model(**{name})); {remedy}"
        )
    tensors = tensors_in(x)
    if not tensors:
        raise InputTypeError(f"{name} is {describe(x)}, expected at least one tensor in it")
    odd = [tensor for tensor in tensors if tensor.is_nested or tensor.layout != torch.strided]
    if odd:
        kind = "nested" if odd[0].is_nested else str(odd[0].layout).removeprefix("torch.")
        raise InputTypeError(f"{name} holds a {kind} tensor, expected dense ones; pad it, or call .to_dense()")
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim() > 0]
    if not sizes:
        raise InputValueError(f"{name} is {describe(x)}, expected the samples along its first axis; add one: x[None]")
    samples = max(sizes) if all(size in (1, max(sizes)) for size in sizes) else -1
    if samples < 0:
        raise InputValueError(
            f"{name} is {describe(x)}: the first axes differ; expected the same number of samples everywhere, "
            f"or 1 for what all samples share{_graph_advice(tensors)}"
        )
    if samples == 0:
        raise InputValueError(f"{name} is {describe(x)}: no samples; expected at least one")
    if not isinstance(x, Tensor):
        _refuse_uncut(x, samples, name)
    return samples


def _graph_advice(tensors: Sequence[Tensor]) -> str:
    """Return how graphs are measured, where one of the tensors looks like the edges of one."""
    if not any(t.dim() == 2 and t.shape[0] == 2 and not t.is_floating_point() for t in tensors):
        return ""
    return (
        ". Nodes of one graph influence each other and are no samples: hold edge_index in the model, and pass node "
        "features of shape (graphs, nodes, features)"
    )


def _refuse_uncut(thing: Any, samples: int, name: str) -> None:
    """Arrays, and lists of as many plain values as there are samples: they could not be cut into chunks."""
    if isinstance(thing, numpy.ndarray):
        raise InputTypeError(f"{name} holds a numpy array, expected tensors; convert it with torch.as_tensor")
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    elif isinstance(thing, list) and len(thing) == samples and not tensors_in(thing):
        raise InputTypeError(
            f"{name} holds a list with one entry for each of the {samples} samples, expected a tensor; "
            "convert it with torch.as_tensor"
        )
    if isinstance(thing, list | tuple):
        for part in thing:
            _refuse_uncut(part, samples, name)


def _takes_inputs(readout: Readout) -> bool:
    """Whether a readout wants (output, x) rather than the output alone."""
    try:
        parameters = inspect.signature(
            readout.forward if isinstance(readout, nn.Module) else readout
        ).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) >= 2


PassContext = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""Makes a context in which a model runs, from the inputs that it is given."""


def _unnoted(inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
    del inputs
    return nullcontext()


@dataclass
class ModelWithInputs:
    """A network with the inputs on which it is measured."""

    model: nn.Module
    x: Inputs
    samples: int
    readout: Readout | None
    rewind: Callable[[], None]
    """Sets random generators and the model's state to where they stood when the measurement began."""
    name: str = "x"
    """The argument that the inputs were given as."""
    default: DefaultReadout | None = None
    """The readout that stands in for None; known once samples were run."""
    waiting: bool = True
    """Whether outputs are looked at, which has to be waited for on a GPU; otherwise they may not be finite."""
    held: Sequence[Tensor] = ()
    """The tensors that the model held when the measurement began."""
    guard: "LargeWeights | None" = None
    """Weights that are too large to copy: writes to them are refused."""

    def __post_init__(self) -> None:
        self.kind = input_kind(self.x)

    def take(self, indices: Tensor | slice) -> Inputs:
        """A copy of some of the samples: a model may write into what it is given."""
        whole = self.samples

        def rows(tensor: Tensor) -> Tensor:
            chosen = tensor.detach()
            if not tensor.dim() or tensor.shape[0] != whole:
                chosen = chosen.clone()
            elif isinstance(indices, slice):
                chosen = (chosen if indices == slice(0, whole) else chosen[indices]).clone()
            else:
                chosen = chosen.index_select(0, indices.to(tensor.device, non_blocking=True))
            # A model may differentiate by its inputs.
            return chosen.requires_grad_(True) if tensor.requires_grad else chosen

        return map_tensors(self.x, rows)

    def call(self, indices: Tensor | slice) -> tuple[Any, Inputs]:
        """What the model returns for some of the samples, and the inputs it was given."""
        result: tuple[Any, Inputs] = self._run(indices, _unnoted, lambda x: (call_model(self.model, x), x))
        return result

    def outputs(self, indices: Tensor | slice, noting: PassContext = _unnoted) -> Tensor:
        """(samples, C) outputs with their graph. All code that makes them runs inside of `noting`."""
        read = self._run(indices, noting, lambda x: self._read(call_model(self.model, x), x))
        count = len(range(self.samples)[indices]) if isinstance(indices, slice) else len(indices)
        outputs = _checked(read, count, self.readout is not None, self.waiting)
        if outputs.dim() == 2:
            return outputs
        with noting(()):
            return outputs[:, None]

    def paired_outputs(self, indices: Tensor) -> Tensor:
        """(samples, C) outputs with their graph; a single sample is run beside a copy of itself.

        torch's backward pass of BatchNorm2d in eval mode mixes up the channels of a batch of one whose gradient lies
        in channels-last order (torch 2.13, CPU).
        """
        return self.outputs(indices.repeat(2) if len(indices) == 1 else indices)[: len(indices)]

    def _run(self, indices: Tensor | slice, noting: PassContext, code: Callable[[Inputs], Any]) -> Any:
        """Run code of the user on a copy of some of the samples."""
        x = self.take(indices)
        self.rewind()
        try:
            return self._explained(x, noting, code)
        except UnsupportedModelError:  # some code fails where its ops are watched
            if self.guard is None or self.guard.has_refused or noting is not _unnoted:
                raise
            self.guard = None
        return self._run(indices, noting, code)

    def _explained(self, x: Inputs, noting: PassContext, code: Callable[[Inputs], Any]) -> Any:
        """What code of the user gives; its errors say what it was called with."""
        try:
            if noting is _unnoted and self.guard is None:
                return code(x)
            guarded = nullcontext() if self.guard is None else self.guard.watching()
            with compiler_not_imported(), noting(tensors_in(x)), guarded:
                return code(x)
        except (FeatlearnError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shown = x.inputs if isinstance(x, TargetedInputs) else x
            raise UnsupportedModelError(
                f"the model or its readout failed on {self.name}, {describe(shown)} (a few of the {self.samples} "
                f"samples are run at a time): {type(error).__name__}: {error}{_advice(self, x, error)}"
            ) from error

    def _read(self, raw: Any, x: Inputs) -> Any:
        if self.readout is None and self.default is None and not (isinstance(raw, Tensor) and raw.dim() <= 2):
            from featlearn.network.default_readout import default_readout  # late: few models need it

            self.default = default_readout(raw, x)
        return read_output(raw, x, self.readout or self.default)


def call_model(model: Callable[..., Any], x: Inputs) -> Any:
    """Return what a model gives for inputs: a tensor, a tuple (`model(*x)`) or a mapping (`model(**x)`)."""
    passed: dict[str, Any] = {}
    if isinstance(x, TargetedInputs):
        passed = {} if x.keyword is None else {x.keyword: x.passed}
        x = x.inputs
    if isinstance(x, tuple):
        return model(*x, **passed)
    return model(**x, **passed) if isinstance(x, Mapping) else model(x, **passed)


def _advice(batch: ModelWithInputs, x: Inputs, error: Exception) -> str:
    """Return what to do about frequent causes of an error: precision, arguments, and tensors of an earlier pass."""
    text, weights = str(error), list(batch.model.parameters())
    kinds = {weight.dtype for weight in weights if weight.is_floating_point()}
    passed = {tensor.dtype for tensor in tensors_in(x) if tensor.is_floating_point() or tensor.is_complex()}
    if len(kinds) == 1 and passed and not passed & kinds:
        return (
            f"; {batch.name} is {' and '.join(map(str, passed))}, expected {kinds.pop()} as the weights are; "
            "cast it, or pass dtype= to measure both in that precision"
        )
    if "FakeTensorMode" in text:  # weights that `torch.cond` does not see
        return "; " + OPERANDS
    if getattr(getattr(batch.model, "config", None), "is_encoder_decoder", False) and isinstance(error, ValueError):
        return "; an encoder-decoder needs `labels` or `decoder_input_ids` among the inputs"
    if isinstance(error, TypeError) and ("unexpected keyword argument" in text or "positional argument" in text):
        return (
            "; everything in x is passed to the model: leave targets out of it, or, for a readout that needs them, "
            "wrap the model in a module whose forward takes them and passes on the rest"
        )
    sizes, own = set(map(int, re.findall(r"\d+", text))) - {1}, set(map(id, weights))
    for tensor in (tensor for tensor in batch.held if id(tensor) not in own and tensor.dim()):
        if tensor.grad_fn is not None or tensor.shape[0] in sizes:
            return (
                f"; the model holds {describe(tensor)}, perhaps the state of an earlier pass: reset it first "
                "(snntorch: utils.reset(net) or init_hidden at the beginning of forward; spikingjelly: "
                "functional.reset_net(net))"
            )
    return ""


def read_output(raw: Any, x: Inputs, readout: Readout | None) -> Any:
    """Return what a readout makes of a model's output; the default one if it is None."""
    if readout is None and isinstance(raw, Tensor) and raw.dim() <= 2:
        return raw
    if readout is None:
        from featlearn.network.default_readout import default_readout  # late: few models need it

        readout = default_readout(raw, x)
    if isinstance(readout, LogProbability | DefaultReadout):
        return readout(raw, x)
    inputs = x.inputs if isinstance(x, TargetedInputs) else x
    return readout(raw, inputs) if _takes_inputs(readout) else readout(raw)


def read_any_shape(raw: Any, x: Inputs, readout: Readout | None) -> Any:
    """Return what a readout makes of a model's output; the tensor in it, in any shape, if the readout is None."""
    from featlearn.network.default_readout import output_tensor  # late: few models need it

    return output_tensor(raw)[1] if readout is None else read_output(raw, x, readout)


def _checked(outputs: Any, samples: int, has_readout: bool, look: bool) -> Tensor:
    source = "the readout" if has_readout else "the model"
    if not isinstance(outputs, Tensor):
        raise InputTypeError(f"{source} gives {describe(outputs)}, expected a tensor of shape (P,) or (P, C)")
    if outputs.dim() not in (1, 2) or outputs.shape[0] != samples:
        remedy = (
            "return one row per sample from it"
            if has_readout
            else "pass readout=, for example fl.readouts.last_token or lambda out: out.mean(1)"
        )
        raise InputValueError(
            f"{source} gives {describe(outputs)} for {samples} samples, expected (P,) = ({samples},) or "
            f"(P, C) = ({samples}, C); {remedy}"
        )
    if not outputs.is_floating_point():
        raise InputTypeError(f"{source} gives {describe(outputs)}, expected real floating point numbers")
    if outputs.numel() == 0:
        raise InputValueError(f"{source} gives {describe(outputs)}: no outputs; expected C >= 1")
    if look and not bool(torch.isfinite(outputs).all()):
        broken = (~torch.isfinite(outputs.detach())).reshape(samples, -1).any(1).nonzero().flatten().tolist()
        raise NotFiniteError(
            f"{source} gives values that are not finite, at least for samples {_few(broken)} of the batch; "
            "a kernel cannot be measured there"
        )
    return outputs


def _few(items: Sequence[int]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
