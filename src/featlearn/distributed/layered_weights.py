"""Weights that stay sharded by FSDP2 while a model is measured: a layer is gathered when a pass needs it.

A layer is a module that `fully_shard` was applied to. Meanwhile the model holds whole parameters in the places of its
shards, always the same ones, which have memory only while their layer is gathered; FSDP makes and fills them itself.
Forward passes gather a layer when they enter it and drop it when they leave it. Backward passes do so when a gradient
arrives at what a layer has given, in the opposite order of the forward pass, and drop it when one arrives at another.
What autograd has saved of a weight is gathered again whenever an op asks for it, for ops that run in no such order.

All ranks must take part in a gathering. Each says which layer it needs, or that it needs none, and all gather what any
of them has asked for: so ranks may make different numbers of passes, and one that fails serves the others until they
have ended theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from featlearn.distributed.group import RankGroup
from featlearn.distributed.sharded_model import cast, own_modules, replace_hook
from featlearn.errors import UnsupportedModelError
from featlearn.network.inputs import tensors_in
from featlearn.torch_internals import (
    NO_FUNCTION_OVERRIDES,
    after_backward,
    before_gradient,
    forward_hooks,
    hooks_always_called,
    in_backward,
    is_observed,
    parameter_table,
    unobserved,
    version,
    wrapper_of,
)
from featlearn.torch_internals.sharding import ShardedModule

_NONE = -1


@dataclass(eq=False)
class _Layer:
    """A sharded module and its parameters while gathered."""

    number: int
    part: ShardedModule
    modules: list[nn.Module]
    """The module, and submodules that belong to no other layer."""
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Table and name of every shard."""
    shards: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_whole: bool = False

    def gather(self) -> None:
        """Gather the parameters, on all ranks, without changing the entries of the model's tables."""
        if not self.is_whole:
            current = self._current()
            self.part.module.unshard()
            gathered = self._current()
            self._put(current)
            self.is_whole = True
            if any(parameter is not expected for parameter, expected in zip(gathered, self.parameters, strict=True)):
                raise UnsupportedModelError(
                    "fully_shard has made new parameters for a layer, expected the same at every gathering; measure "
                    "with a larger memory=, so that the weights are gathered once"
                )

    def drop(self) -> None:
        """Free the memory of the parameters."""
        if self.is_whole:
            current = self._current()
            self.part.module.reshard()
            self._put(current)
            self.is_whole = False

    def find_parameters(self) -> None:
        """Gather once, and replace the shards by the full parameters, without memory."""
        tables = [parameter_table(inner) for inner in self.modules]
        before = [dict(table) for table in tables]
        if not any(hasattr(shard, "placements") for entries in before for shard in entries.values()):
            return  # already gathered, for example after a forward pass
        self.part.module.unshard()
        self.places = [
            (table, name)
            for table, entries in zip(tables, before, strict=True)
            for name in table
            if table[name] is not entries[name]
        ]
        self.parameters = self._current()
        self.versions = [version(parameter) for parameter in self.parameters]
        self.part.module.reshard()
        self.shards = self._current()
        self._put(self.parameters)

    def put_back(self) -> None:
        """Restore the shards."""
        self.drop()
        self._put(self.shards)

    def is_rewritten(self) -> bool:
        """Return whether the model wrote to its parameters."""
        return [version(parameter) for parameter in self.parameters] != self.versions

    def _current(self) -> list[Any]:
        return [table[name] for table, name in self.places]

    def _put(self, tensors: Sequence[Any]) -> None:
        for (table, name), tensor in zip(self.places, tensors, strict=True):
            table[name] = tensor


class LayeredWeights:
    """Layers of a model, gathered one at a time."""

    def __init__(self, model: nn.Module, parts: Sequence[ShardedModule], ranks: RankGroup) -> None:
        self._model, self._ranks = model, ranks
        self._layers = [_Layer(number, part, own_modules(part.module, parts)) for number, part in enumerate(parts)]
        self._entered: list[tuple[_Layer, bool]] = []
        """Layers entered by a forward pass, and whether each was gathered before."""
        self._needed: tuple[_Layer, ...] = ()
        """Layers reached by a backward pass."""
        self._at: dict[int, _Layer] = {}
        """Layers by the memory address of their gathered parameters."""
        self._saving: list[saved_tensors_hooks] = []
        """Hooks of every running call of the model, which may be recursive."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gather layer by layer in passes inside, on all ranks, and restore everything afterwards."""
        tables = [
            table
            for layer in self._layers
            for module in [layer.part.module]
            for table in (*forward_hooks(module), hooks_always_called(module))
        ]
        saved = [dict(table) for table in tables]
        handles: list[Any] = []
        try:
            for layer in self._layers:
                layer.find_parameters()
                self._hook(layer)
                # Code that is run again outside of any pass (checkpoints, of which something is read) enters no layer.
                for inner in layer.modules[1:]:
                    handles.append(inner.register_forward_pre_hook(lambda *_, layer=layer: self._at_hand(layer)))
            handles.append(self._model.register_forward_pre_hook(self._begin_saving, prepend=True))
            handles.append(self._model.register_forward_hook(self._end_saving, always_call=True))
            yield
            self._refuse_rewriting()
        finally:
            while self._saving:
                self._end_saving()
            for handle in handles:
                handle.remove()
            for table, hooks in zip(tables, saved, strict=True):
                table.clear()
                table.update(hooks)
            try:
                self.settle()
            finally:
                for layer in self._layers:
                    layer.put_back()

    def settle(self) -> None:
        """Serve other ranks until none needs a layer, before any other communication."""
        with unobserved():
            while self._served(_NONE):
                pass

    def _begin_saving(self, *_: Any) -> None:
        self._saving.append(saved_tensors_hooks(self._packed, self._unpacked))
        self._saving[-1].__enter__()

    def _end_saving(self, *_: Any) -> None:
        if self._saving:
            self._saving.pop().__exit__()

    def gathers(self, parameter: Tensor) -> bool:
        """Return whether the parameter is gathered from shards, layer by layer."""
        return any(own_parameter is parameter for layer in self._layers for own_parameter in layer.parameters)

    @property
    def largest(self) -> int:
        """Largest size of gathered weights in bytes: a layer, its outer layers, and a layer requested by another
        rank."""
        sizes = [(layer, _bytes(layer.parameters)) for layer in self._layers]
        around = [sum(size for outer, size in sizes if _holds(outer, layer)) for layer in self._layers]
        return max(around) + max(size for _, size in sizes)

    def _hook(self, layer: _Layer) -> None:
        """Replace FSDP's hooks by hooks that gather and drop layers."""
        module = layer.part.module

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            with unobserved():
                self._entered.append((layer, layer.is_whole))
                self._gather(layer)
            return cast((args, kwargs), layer.part.input_dtype)

        def leave(_: nn.Module, args: Any, outputs: Any) -> Any:
            if not self._entered or self._entered[-1][0] is not layer:
                return outputs  # a hook of the user's raised before the layer was entered
            outputs = cast(outputs, layer.part.output_dtype)
            needed = tuple(entered_layer for entered_layer, _was_whole in self._entered)
            was_whole = self._entered.pop()[1]
            with unobserved():
                for tensor in _tensors(outputs):
                    if tensor.grad_fn is not None:
                        before_gradient(tensor, lambda: self._arrived(needed))
                if not was_whole:
                    self._drop(layer)
            return outputs

        before, after = forward_hooks(module)
        replace_hook(before, layer.part.pre_forward, enter)
        hooks_always_called(module)[replace_hook(after, layer.part.post_forward, leave)] = True

    def _arrived(self, needed: tuple[_Layer, ...]) -> None:
        """Handle a gradient at the output of a layer: gather that layer, and drop later layers."""
        with unobserved():
            self._needed = needed
            self._hold(())
            for layer in needed:
                self._gather(layer)
        after_backward(self._ended)

    def _ended(self) -> None:
        """Handle the end of a backward pass."""
        self._needed = ()
        with unobserved():
            self._hold(())

    def _hold(self, more: Sequence[_Layer]) -> None:
        """Drop all layers that no pass uses."""
        used = {*more, *self._needed, *(layer for layer, _ in self._entered)}
        for layer in self._layers:
            if layer not in used:
                self._drop(layer)

    def _gather(self, layer: _Layer) -> None:
        while not layer.is_whole and layer.places:
            self._served(layer.number)

    def _drop(self, layer: _Layer) -> None:
        for parameter in layer.parameters if layer.is_whole else ():
            self._at.pop(_address(parameter), None)
        layer.drop()

    def _served(self, needed_number: int) -> bool:
        """Gather all layers that any rank requests; return whether there were any."""
        requested = sorted({number for (number,) in self._ranks.numbers([needed_number]) if number != _NONE})
        for number in requested:
            layer = self._layers[number]
            keep = layer.is_whole or number == needed_number
            self._drop(layer)  # all ranks, or none, take part
            layer.gather()
            self._at |= {address: layer for address in map(_address, layer.parameters) if address}
            if not keep:
                self._drop(layer)
        return bool(requested)

    def _packed(self, tensor: Tensor) -> "_Saved":
        with unobserved() if is_observed() else nullcontext():
            # Detached: the output of an op that is saved by it would hold itself.
            return _Saved(tensor.detach(), version(tensor), self._at.get(_address(tensor)))

    def _unpacked(self, saved: "_Saved") -> Tensor:
        with unobserved() if is_observed() else nullcontext():
            if saved.layer is None:
                if version(saved.tensor) != saved.version:
                    raise RuntimeError(
                        "a tensor needed for a backward pass was modified by an inplace operation: "
                        f"{tuple(saved.tensor.shape)}, version {version(saved.tensor)} instead of {saved.version}"
                    )
                return saved.tensor
            if not in_backward():
                return WeightWhenRead.of(saved.tensor, lambda: self._read(saved))
        self._at_hand(saved.layer)
        return saved.tensor

    def _read(self, saved: "_Saved") -> Tensor:
        """Return a copy of the values of a weight."""
        assert saved.layer is not None
        self._at_hand(saved.layer)
        with unobserved():
            return saved.tensor.clone()

    def _at_hand(self, layer: _Layer) -> None:
        """Gather a layer that no pass entered."""
        if not layer.is_whole and layer.places:
            with unobserved():
                self._hold([layer])
                self._gather(layer)

    def _refuse_rewriting(self) -> None:
        if any(layer.is_rewritten() for layer in self._layers):
            raise UnsupportedModelError(
                "a forward pass in eval mode rewrites weights, expected a model that only reads them; the shards have "
                "not changed"
            )


@dataclass(frozen=True)
class _Saved:
    """A tensor saved by autograd, and the layer that owns its memory, if any."""

    tensor: Tensor
    version: int
    layer: _Layer | None


class WeightWhenRead(Tensor):
    """A saved weight outside of passes, gathered and copied only if its values are read."""

    values_now: Callable[[], Tensor]

    @staticmethod
    def of(weight: Tensor, values: Callable[[], Tensor]) -> "WeightWhenRead":
        """Create a wrapper with the shape and dtype of a weight."""
        wrapper: WeightWhenRead = wrapper_of(
            WeightWhenRead, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=weight.device
        )
        wrapper.values_now = values
        return wrapper

    __torch_function__ = NO_FUNCTION_OVERRIDES


def _read_weights(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    del cls, types
    if func is torch.ops.aten.detach.default:
        return WeightWhenRead.of(args[0], args[0].values_now)

    def values(thing: Any) -> Any:
        if isinstance(thing, tuple | list):
            return type(thing)(map(values, thing))
        return thing.values_now() if isinstance(thing, WeightWhenRead) else thing

    return func(*values(args), **{name: values(value) for name, value in (kwargs or {}).items()})


# Not in the body of the class, where torch would look for it and wrap it by its compiler: seconds to import.
WeightWhenRead.__torch_dispatch__ = classmethod(_read_weights)  # type: ignore[assignment]


def _tensors(outputs: Any) -> list[Tensor]:
    """Return all tensors in the output of a module."""
    if is_dataclass(outputs) and not isinstance(outputs, type | dict):
        return [tensor for entry in fields(outputs) for tensor in _tensors(getattr(outputs, entry.name))]
    return tensors_in(outputs)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for tensors without storage."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
    except (NotImplementedError, RuntimeError):  # batched by a transform, say
        return 0


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(entry): entry for entry in tensors}.values())


def _holds(outer: _Layer, inner: _Layer) -> bool:
    return any(part is inner.part.module for part in outer.part.module.modules())
