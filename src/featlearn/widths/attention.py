"""Logits of attention, wherever they are computed: fused, or as a product of matrices and a softmax."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from featlearn.torch_internals import DispatchMode

MASKED = -1e4
"""Logits below are those of masked positions."""


@dataclass(frozen=True)
class Logits:
    """The logits of one attention layer."""

    size: float
    """root mean square over unmasked positions"""
    queries: float
    keys: float
    """root mean squares of what they are products of"""
    head: int
    """numbers in one query"""
    values: Tensor
    scale: float | None = None
    """what their product is multiplied by, where it is known"""


@contextmanager
def attention_noted(model: nn.Module) -> Iterator[dict[str, Logits]]:
    """Note the attention logits of a forward pass inside, by the module that computes them."""
    found: dict[str, Logits] = {}
    running: list[str] = []
    handles = []
    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters()):
            handles.append(module.register_forward_pre_hook(partial(_enter, running, name)))
            handles.append(module.register_forward_hook(partial(_leave, running)))
    try:
        with _Mode(found, running):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _enter(running: list[str], name: str, *_: Any) -> None:
    running.append(name)


def _leave(running: list[str], *_: Any) -> None:
    running.pop()


class _Mode(DispatchMode):
    """Sees every operation that is computed."""

    def __init__(self, found: dict[str, Logits], running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.running = found, running
        self._product: tuple[Tensor, Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name and "backward" not in name:
            query, key = args[0].detach(), args[1].detach()
            scale = kwargs.get("scale")
            if key.shape[1] != query.shape[1]:  # grouped queries
                key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            self._note(query @ key.transpose(-1, -2) * scale, query, key, scale)
        elif name == "bmm":
            self._product = (args[0].detach(), args[1].detach().transpose(-1, -2))
        elif name.removeprefix("_") in ("softmax", "safe_softmax") and args[0].dim() >= 3 and self._product is not None:
            self._note(args[0].detach(), *self._product)
            self._product = None
        return func(*args, **kwargs)

    def _note(self, scores: Tensor, query: Tensor, key: Tensor, scale: float | None = None) -> None:
        place = self.running[-1] if self.running else ""
        kept = scores.masked_select(scores > MASKED)
        if kept.numel():
            self.found[place] = Logits(_rms(kept), _rms(query), _rms(key), int(query.shape[-1]), scores.clone(), scale)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
