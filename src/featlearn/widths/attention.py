"""Record attention logits, computed by fused kernels or by a matrix product and a softmax."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from featlearn.torch_internals import DispatchMode, dispatching

MASKED = -1e4
"""Logits below this value belong to masked positions."""


@dataclass(frozen=True)
class Logits:
    """Logits of an attention layer."""

    size: float
    """root mean square over unmasked positions"""
    queries: float
    keys: float
    """root mean squares of queries and keys"""
    head: int
    """size of a query"""
    values: Tensor
    scale: float | None = None
    """factor of the product, if known"""


@contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, Logits]]:
    """Record the attention logits of a forward pass inside, by module name."""
    logits: dict[str, Logits] = {}
    module_stack: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters()):
            handles.append(module.register_forward_pre_hook(partial(_enter, module_stack, name)))
            handles.append(module.register_forward_hook(partial(_leave, module_stack)))
    try:
        with _RecordAttention(logits, module_stack):
            yield logits
    finally:
        for handle in handles:
            handle.remove()


def _enter(module_stack: list[str], name: str, *_: Any) -> None:
    module_stack.append(name)


def _leave(module_stack: list[str], *_: Any) -> None:
    module_stack.pop()


class _RecordAttention(DispatchMode):
    """Dispatch mode that records attention logits."""

    def __init__(self, logits: dict[str, Logits], module_stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logits, self.module_stack = logits, module_stack
        self._product: tuple[Tensor, Tensor] | None = None
        self._factors: dict[int, tuple[float, Tensor]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the logits of one op, and run it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name and "backward" not in name:
            query, key = args[0].detach(), args[1].detach()
            scale = kwargs.get("scale")
            if key.shape[1] != query.shape[1]:  # grouped queries
                key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            self._record(query @ key.transpose(-1, -2) * scale, query, key, scale)
        elif name == "bmm":
            first, second = (operand.detach() / self._factor(operand) for operand in args[:2])
            self._product = (first, second.transpose(-1, -2))
        elif name.removeprefix("_") in ("softmax", "safe_softmax") and args[0].dim() >= 3 and self._product is not None:
            self._record(args[0].detach(), *self._product)
            self._product = None
        result = func(*args, **kwargs)
        if name in ("mul", "div") and _is_constant(args[1]):
            factor = self._factor(args[0]) * (float(args[1]) if name == "mul" else 1 / float(args[1]))
            self._factors[result.untyped_storage().data_ptr()] = (factor, result)
        elif name == "clone" and self._factor(args[0]) != 1:
            self._factors[result.untyped_storage().data_ptr()] = (self._factor(args[0]), result)
        return result

    def _factor(self, operand: Tensor) -> float:
        """Return the constant factor on queries or keys, which belongs to the scale of the product."""
        return self._factors.get(operand.untyped_storage().data_ptr(), (1.0, operand))[0]

    def _record(self, scores: Tensor, query: Tensor, key: Tensor, scale: float | None = None) -> None:
        module = self.module_stack[-1] if self.module_stack else ""
        unmasked = scores.masked_select(scores > MASKED)
        if unmasked.numel():
            self.logits[module] = Logits(
                _rms(unmasked), _rms(query), _rms(key), int(query.shape[-1]), scores.clone(), scale
            )


dispatching(_RecordAttention, _RecordAttention.dispatch)


def _is_constant(operand: Any) -> bool:
    return not isinstance(operand, Tensor) or (operand.numel() == 1 and not operand.requires_grad)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
