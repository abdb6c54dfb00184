"""A network in two states, and what its linearization at the earlier one misses of the change between them."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.errors import UnsupportedModelError
from featlearn.kernel.jacobian_products import JvpMethod, Tangents, divides, jvp_method
from featlearn.linearization.division import UNDIVIDED, Division, divided, weights_at
from featlearn.linearization.effective_weights import steps_between
from featlearn.linearization.linearized import Linearized, linearized
from featlearn.measurement import Measurement
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, ModelWithInputs

FOLDS = 16
"""Groups of samples that are left out in turn for a standard error."""
TOGETHER = 128
"""Samples of one Jacobian-vector product: as many as a training batch may have."""
LEAST = 3
"""Fewest samples that show a standard error."""
LOW_PRECISION = (torch.float16, torch.bfloat16)
ROUNDING = 4.0
"""A change of the outputs below this many units of rounding is none."""


@dataclass(frozen=True, eq=False)
class Gap:
    """The linearization gap on some samples."""

    change: Tensor
    """(P, C) change of the centered outputs, float64"""
    missed: Tensor
    """(P, C) what the linearization misses of it"""
    missed_plainly: Tensor
    """(P, C) what the linearization of the outputs themselves misses of it"""
    rounding: float
    """size of a change that is rounding"""
    division: Division = UNDIVIDED
    """where the network was divided"""

    @property
    def plain(self) -> "Gap":
        """The gap of the outputs themselves."""
        return replace(self, missed=self.missed_plainly, division=UNDIVIDED)

    @property
    def relative_rounding(self) -> float:
        """Rounding error of the gap."""
        change = float(self.change.norm())
        return self.rounding / change if change else math.inf

    @property
    def error(self) -> float:
        """Standard error for other samples of the same kind, with the rounding error."""
        return math.hypot(self.stderr, self.relative_rounding)

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

    def __init__(
        self,
        audited: AuditedModel,
        initial: Mapping[str, Any],
        *,
        unshrunk: bool = False,
        link: bool = True,
        effective: bool = True,
    ) -> None:
        """`unshrunk`: the earlier parameters of each layer are multiplied by what is left of them, see `shrinking`."""
        low = any(p.dtype in LOW_PRECISION for p in audited.model.parameters()) and audited.request.dtype is None
        if low:  # rounding would pass for a gap
            audited = AuditedModel(audited.model, replace(audited.request, dtype=torch.float32))
        self._audited, self._link, self._effective, self._cast = audited, link, effective, low
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
        """Return the gap on these samples; `method` and `outputs` of now where they are known."""
        f = self._outputs_now(x) if outputs is None or self._cast else outputs
        if not self._moved:
            return _gap(f, Linearized(f, torch.zeros_like(f), f), UNDIVIDED)
        with self._earlier.measuring([x]) as measurement:
            line, whole = self._line(measurement, f, method)
            return _gap(f, whole, line.division)

    def method(self, x: Inputs) -> JvpMethod | None:
        """Return how Jacobian-vector products are made for this model; None where nothing has moved."""
        if not self._moved:
            return None
        with self._earlier.measuring([x]) as measurement:
            return jvp_method(measurement)

    def parts(self, x: Inputs) -> dict[str, float]:
        """Return layer -> its part of the gap."""
        layers = list(dict.fromkeys(map(_layer, self._now)))
        changed = [layer for layer in layers if any(_layer(name) == layer for name in self._moved)]
        f = self._outputs_now(x)
        if not changed:
            return dict.fromkeys(layers, math.nan)
        with self._earlier.measuring([x]) as measurement:
            line, linear = self._line(measurement, f, None)
            whole = _gap(f, linear, line.division)
            if math.isnan(whole.value):
                return dict.fromkeys(layers, math.nan)
            orders = (changed, changed[::-1])
            approximations = [list(line.along([self._names(layer) for layer in order])) for order in orders]
        missed = {layer: torch.zeros_like(whole.missed) for layer in changed}
        for order, approximated in zip(orders, approximations, strict=True):
            outputs = list(self._outputs_along(x, order, f))
            for number, layer in enumerate(order):
                made = outputs[number + 1].double() - outputs[number].double()
                missed[layer] += centered(made - (approximated[number + 1] - approximated[number])) / 2
        # Along all that is missed, in units of the change: parts add up to the gap.
        unit = float(whole.missed.norm() * whole.change.norm())
        shares = {layer: float((part * whole.missed).sum()) / unit if unit else 0.0 for layer, part in missed.items()}
        return {layer: shares.get(layer, 0.0) for layer in layers}

    def _names(self, layer: str) -> set[str]:
        return {name for name in self._moved if _layer(name) == layer}

    def _outputs_along(self, x: Inputs, order: Sequence[str], last: Tensor) -> Iterator[Tensor]:
        """Yield the outputs at the earlier state and after each layer is moved; the earlier state is put back."""
        before = {name: p.detach().clone() for name, p in self._moved.items()}
        try:
            for count in range(len(order)):
                with self._earlier.measuring([x]) as measurement:
                    yield measurement.outputs(measurement.batches[0])
                self._set({name: self._now[name] for name in self._names(order[count])})
            yield last
        finally:
            self._set(before)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._moved[name].copy_(value)

    def _outputs_now(self, x: Inputs) -> Tensor:
        with self._audited.measuring([x]) as measurement:
            return measurement.outputs(measurement.batches[0])

    def _line(self, measurement: Measurement, now: Tensor, method: JvpMethod | None) -> tuple["_Line", Linearized]:
        """Linearize at the earlier state, divided where that is possible for the whole batch."""
        way = {name: (self._now[name] - p.detach())[None] for name, p in measurement.parameters.items()}
        undivided = _Line(measurement, method or jvp_method(measurement), way, UNDIVIDED, {}, {})
        if divides(undivided.method) and (self._link or self._effective):
            try:
                line = self._divided(undivided, now)
                return line, line.at(self._moved)
            except UnsupportedModelError:  # other samples take another path
                pass
        return undivided, undivided.at(self._moved)

    def _divided(self, line: "_Line", now: Tensor) -> "_Line":
        """Divide the network, with the weights that products of parameters stand for in both states."""
        division = divided(line.measurement, link=self._link, effective=self._effective)
        if not division.merged:
            return replace(line, division=division)
        parameters = dict(line.measurement.parameters)
        moved = {name: p.detach() + line.way[name][0].to(p) for name, p in parameters.items()}
        before, _ = weights_at(division, line.measurement, parameters)
        after, outputs = weights_at(division, line.measurement, moved)
        expected = now[: len(outputs)].to(outputs)
        slack = torch.finfo(outputs.dtype).eps ** 0.5 * float(expected.abs().max())
        if float((outputs - expected).abs().max()) > slack:  # it reaches parameters past its modules
            return replace(line, division=replace(division, merged=()))
        return replace(line, division=division, before=before, now=after)


@dataclass(frozen=True, eq=False)
class _Line:
    """The network linearized at its earlier state, in directions between the two states."""

    measurement: Measurement
    method: JvpMethod
    way: Tangents
    """All parameters now less those of the earlier state."""
    division: Division
    before: Mapping[int, Tensor]
    """Call -> merged weight that it forms or applies at the earlier state."""
    now: Mapping[int, Tensor]
    """The same now."""

    def at(self, names: Collection[str]) -> Linearized:
        """Linearize in the direction of some parameters."""
        tangents = {name: u if name in names else torch.zeros_like(u) for name, u in self.way.items()}
        (batch,) = self.measurement.batches
        steps = steps_between(self.division.merged, self.before, self.now, set(names))
        pieces = [
            linearized(self.method, self.measurement, part, tangents, self.division, steps) for part in _parts(batch)
        ]
        return Linearized(*[torch.cat(column) for column in zip(*pieces, strict=True)])

    def along(self, groups: Sequence[set[str]]) -> Iterator[Tensor]:
        """Yield the approximated outputs with the first 0, 1, 2 ... groups moved, in double."""
        if self.division.head is None:
            pieces = [self.at(group) for group in groups]
            approximated = pieces[0].outputs.double()
            yield approximated
            for piece in pieces:
                approximated = approximated + (piece.through_link.double() - piece.outputs.double())
                yield approximated
        else:
            for count in range(len(groups) + 1):
                yield self.at(set().union(*groups[:count])).through_link.double()


def centered(outputs: Tensor) -> Tensor:
    """Outputs (P, C) less their mean over samples."""
    return outputs - outputs.mean(0)


def _gap(now: Tensor, line: Linearized, division: Division) -> Gap:
    first, product, through = (part.double() for part in line)
    now, precision = now.to(first.device), torch.finfo(now.dtype).eps
    change = now.double() - first
    rounding = ROUNDING * precision * float(torch.maximum(now.abs(), first.abs()).double().norm())
    plain = centered(change - product)
    divided = division.head is not None or division.merged
    missed = centered(now.double() - through) if divided else plain
    return Gap(centered(change), missed, plain, rounding, division)


def _parts(batch: ModelWithInputs) -> Iterator[ModelWithInputs]:
    # No part of one sample, which shows no sample axis.
    for indices in torch.arange(batch.samples, device="cpu").tensor_split(-(-batch.samples // TOGETHER)):
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
