"""The linearization gap: how much of the change of a network's outputs its linearization at the start misses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.distributed.sharded_model import whole_weights
from featlearn.errors import InputValueError
from featlearn.kernel.jacobian_products import JvpMethod, Tangents, jvp_method, outputs_and_product
from featlearn.measurement import Measurement
from featlearn.network.checks import unwrapped
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, ModelWithInputs, batch_size
from featlearn.request import Settings
from featlearn.signatures import name_keywords

FOLDS = 16
"""Groups of samples that are left out in turn for a standard error."""
TOGETHER = 128
"""Samples of one Jacobian-vector product: as many as a training batch may have."""
LEAST = 3
"""Fewest samples that show a standard error."""
ROUNDING = 4.0
"""A change of the outputs below this many units of rounding is none."""


@overload
def linearization_gap(
    model: nn.Module,
    x: Inputs,
    initial: Mapping[str, Tensor],
    *,
    by: Literal["network"] = "network",
    **settings: Unpack[Settings],
) -> float: ...
@overload
def linearization_gap(
    model: nn.Module, x: Inputs, initial: Mapping[str, Tensor], *, by: Literal["layer"], **settings: Unpack[Settings]
) -> dict[str, float]: ...
@name_keywords()
def linearization_gap(
    model: nn.Module, x: Inputs, initial: Mapping[str, Tensor], *, by: str = "network", **settings: Unpack[Settings]
) -> float | dict[str, float]:
    """|f - f0 - J0 (theta - theta0)| / |f - f0|: 0 for lazy training, near 1 where features were learned.

    f and f0 are the outputs with the parameters of now and of `initial`, J0 the Jacobian at `initial`. Outputs are
    centered over the samples: a constant that all outputs learn does not count. Buffers are those of now in all three
    terms: BatchNorm averages that settle are no learning. No labels, loss or optimizer are needed, and any two states
    of a model can be compared. It takes forward passes with both weights, and one Jacobian-vector product.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: probe inputs as for `fl.ntk`, P >= 2 samples.
        initial: the `state_dict()` of an earlier state, **cloned** when it was taken.
        by: `"network"` gives one number, `"layer"` a dict of parts that add up to it. Layers are moved from `initial`
            to now one after the other; the part of a layer is what its linearization misses of the change that it
            makes, along all that is missed, as a mean over the orders first to last and last to first. This takes
            three more passes for every layer.
        **settings: As for `fl.ntk`. Every rank of a `group` measures all samples.

    Returns:
        The gap; nan where the outputs have not changed by more than rounding.
    """
    return linearization_gap_of(AuditedModel(model, **settings), x, initial, by=by)


def linearization_gap_of(
    audited: AuditedModel, x: Inputs, initial: Mapping[str, Tensor], *, by: str = "network"
) -> float | dict[str, float]:
    """The gap of an audited model: see `fl.linearization_gap`."""
    if by not in ("network", "layer"):
        raise InputValueError(f"by={by!r}, expected 'network' or 'layer'")
    if batch_size(x) < 2:
        raise InputValueError("x has 1 sample, expected at least 2: outputs are centered over the samples")
    with whole_weights(unwrapped(audited.model)):
        states = TwoStates(audited, initial)
        return states.parts(x) if by == "layer" else states.gap(x).value


@dataclass(frozen=True, eq=False)
class Gap:
    """The linearization gap on some samples."""

    change: Tensor
    """(P, C) change of the centered outputs, float64"""
    missed: Tensor
    """(P, C) what the linearization misses of it"""
    rounding: float
    """size of a change that is rounding"""

    @property
    def value(self) -> float:
        """|missed| / |change|; nan where the change is rounding."""
        change = float(self.change.norm())
        return float(self.missed.norm()) / change if change > self.rounding else math.nan

    @property
    def stderr(self) -> float:
        """Standard error for other samples of the same kind: groups of samples are left out in turn (jackknife)."""
        samples = len(self.change)
        count = min(FOLDS, samples)
        if count < LEAST or math.isnan(self.value):
            return math.nan
        group = torch.arange(samples, device=self.change.device) % count
        values = torch.stack(
            [
                centered(self.missed[group != fold]).norm() / centered(self.change[group != fold]).norm()
                for fold in range(count)
            ]
        )
        return math.sqrt(float((values - values.mean()).square().sum()) * (count - 1) / count)


class TwoStates:
    """A model, and a copy with the parameters of an earlier state and the buffers of now."""

    def __init__(self, audited: AuditedModel, initial: Mapping[str, Any], *, unshrunk: bool = False) -> None:
        """`unshrunk`: the earlier parameters of each layer are multiplied by what is left of them, see `shrinking`."""
        self._audited = audited
        earlier = network_at(audited.model, initial)
        self._now = {name: p.detach() for name, p in audited.model.named_parameters()}
        parameters = dict(earlier.named_parameters())
        self.shrinking = _shrinking(parameters, self._now)
        """layer -> share of its earlier weights that is left, between 0 and 1"""
        with torch.no_grad():
            buffers = dict(earlier.named_buffers())
            for name, buffer in audited.model.named_buffers():
                buffers[name].copy_(buffer)
            for name, parameter in parameters.items():
                if unshrunk:
                    parameter.mul_(self.shrinking[_layer(name)])
                parameter.requires_grad_(not torch.equal(parameter, self._now[name]))
        self._moved = {name: p for name, p in parameters.items() if p.requires_grad}
        self._earlier = audited.of_copy(earlier)

    def gap(self, x: Inputs, *, method: JvpMethod | None = None, outputs: Tensor | None = None) -> Gap:
        """The gap on these samples; `method` and `outputs` of now where they are known."""
        f = self._outputs_now(x) if outputs is None else outputs
        if not self._moved:
            return _gap(f, f, torch.zeros_like(f))
        with self._earlier.measuring([x]) as measurement:
            first, (linear,) = self._pushed(measurement, method or jvp_method(measurement), [set(self._moved)])
            return _gap(f, first, linear)

    def method(self, x: Inputs) -> JvpMethod | None:
        """How Jacobian-vector products are made for this model; None where nothing has moved."""
        if not self._moved:
            return None
        with self._earlier.measuring([x]) as measurement:
            return jvp_method(measurement)

    def parts(self, x: Inputs) -> dict[str, float]:
        """Layer -> its part of the gap."""
        layers = list(dict.fromkeys(map(_layer, self._now)))
        changed = [layer for layer in layers if any(_layer(name) == layer for name in self._moved)]
        f = self._outputs_now(x)
        if not changed:
            return dict.fromkeys(layers, math.nan)
        with self._earlier.measuring([x]) as measurement:
            groups = [{name for name in self._moved if _layer(name) == layer} for layer in changed]
            first, pushed = self._pushed(measurement, jvp_method(measurement), groups)
            linear = dict(zip(changed, pushed, strict=True))
        whole = _gap(f, first, sum(linear.values(), torch.zeros_like(f)))
        if math.isnan(whole.value):
            return dict.fromkeys(layers, math.nan)
        missed = {layer: -centered(linear[layer].double()) for layer in changed}
        for order in (changed, changed[::-1]):
            for layer, before, after in self._one_by_one(x, order, first, f):
                missed[layer] += centered(after.double() - before.double()) / 2
        # Along all that is missed, in units of the change: parts add up to the gap.
        unit = float(whole.missed.norm() * whole.change.norm())
        found = {layer: float((part * whole.missed).sum()) / unit if unit else 0.0 for layer, part in missed.items()}
        return {layer: found.get(layer, 0.0) for layer in layers}

    def _one_by_one(
        self, x: Inputs, order: Sequence[str], first: Tensor, last: Tensor
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Layer, outputs before and after it is moved, in this order; the earlier state is put back."""
        kept = {name: p.detach().clone() for name, p in self._moved.items()}
        before = first
        try:
            for layer in order:
                self._set({name: self._now[name] for name in self._moved if _layer(name) == layer})
                with self._earlier.measuring([x]) as measurement:
                    after = last if layer == order[-1] else measurement.outputs(measurement.batches[0])
                yield layer, before, after
                before = after
        finally:
            self._set(kept)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._moved[name].copy_(value)

    def _outputs_now(self, x: Inputs) -> Tensor:
        with self._audited.measuring([x]) as measurement:
            return measurement.outputs(measurement.batches[0])

    def _pushed(
        self, measurement: Measurement, method: JvpMethod, groups: Sequence[set[str]]
    ) -> tuple[Tensor, list[Tensor]]:
        """(P, C) outputs of the earlier state, and J0 (theta - theta0) for the parameters of each group."""
        (batch,) = measurement.batches
        way = {name: (self._now[name] - p.detach())[None] for name, p in measurement.parameters.items()}
        found = []
        for group in groups:
            tangents: Tangents = {name: u if name in group else torch.zeros_like(u) for name, u in way.items()}
            pieces = [outputs_and_product(method, measurement, part, tangents) for part in _parts(batch)]
            found.append([torch.cat(column) for column in zip(*pieces, strict=True)])
        return found[0][0], [linear for _, linear in found]


def centered(outputs: Tensor) -> Tensor:
    """Outputs (P, C) less their mean over samples."""
    return outputs - outputs.mean(0)


def _gap(now: Tensor, first: Tensor, linear: Tensor) -> Gap:
    now, linear = now.to(first.device), linear.to(first.device)
    change = now.double() - first.double()
    rounding = ROUNDING * torch.finfo(now.dtype).eps * float(torch.maximum(now.abs(), first.abs()).double().norm())
    return Gap(centered(change), centered(change - linear.double()), rounding)


def _parts(batch: ModelWithInputs) -> Iterator[ModelWithInputs]:
    for indices in torch.arange(batch.samples, device="cpu").split(TOGETHER):
        yield replace(batch, x=batch.take(indices), samples=len(indices))


def _shrinking(earlier: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, float]:
    """Layer -> the share c of its earlier weights that is left, the c in [0, 1] for which |w - c w0| is smallest."""
    products: dict[str, list[tuple[float, float]]] = {}
    for name, before in earlier.items():
        first, last = (torch.view_as_real(t) if t.is_complex() else t for t in (before.detach(), now[name]))
        pair = float((first.double() * last.double()).sum()), float(first.double().square().sum())
        products.setdefault(_layer(name), []).append(pair)
    left = {layer: (sum(a for a, _ in found), sum(b for _, b in found)) for layer, found in products.items()}
    return {layer: min(max(along / size, 0.0), 1.0) if size else 1.0 for layer, (along, size) in left.items()}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
