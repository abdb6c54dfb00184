"""A network in two states, and what its linearization at the earlier one misses of the change between them."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.errors import UnsupportedModelError
from featlearn.kernel.jacobian_products import JvpMethod, Tangents, divides, forward_mode, jvp_method
from featlearn.linearization.division import UNDIVIDED, Division, divided, weights_at
from featlearn.linearization.effective_weights import steps_between
from featlearn.linearization.linearized import Linearized, linearized
from featlearn.measurement import Measurement
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, ModelWithInputs, batch_size

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


@dataclass
class GapMemory:
    """What repeated gaps of one network share. It holds no weights."""

    method: JvpMethod | None = None
    """How Jacobian-vector products are made."""
    divisions: dict[frozenset[str], Division] = field(default_factory=dict)
    """Parameters that have moved -> where the network is divided."""


class TwoStates:
    """A model, and the same model with the parameters of an earlier state and the buffers of now."""

    def __init__(
        self,
        audited: AuditedModel,
        initial: Mapping[str, Any],
        *,
        unshrunk: bool = False,
        link: bool = True,
        effective: bool = True,
        memory: GapMemory | None = None,
        inside: Measurement | None = None,
    ) -> None:
        """Compare a model with an earlier state.

        Args:
            audited: The model as it is now.
            initial: State dict of the earlier state.
            unshrunk: Multiply the earlier parameters of each layer by what is left of them, see `shrinking`.
            link: As for `linearization_gap`.
            effective: As for `linearization_gap`.
            memory: What earlier gaps of this network have shown.
            inside: A measurement of the model, in whose isolation the earlier state is run where no copy is needed.
        """
        low = any(p.dtype in LOW_PRECISION for p in audited.model.parameters()) and audited.request.dtype is None
        if low:  # rounding would pass for a gap
            audited = AuditedModel(audited.model, replace(audited.request, dtype=torch.float32))
        self._audited, self._link, self._effective, self._cast = audited, link, effective, low
        self._memory = memory or GapMemory()
        self._now = {name: p.detach() for name, p in audited.model.named_parameters()}
        if low or self._memory.method is not forward_mode or not _fits(initial, self._now):
            inside = None
        self._inside = inside
        if inside is None:
            earlier = _with_buffers_of(audited.model, network_at(audited.model, initial))
            self._earlier = audited.of_copy(earlier)
            parameters: dict[str, Tensor] = dict(earlier.named_parameters())
        else:
            parameters = {name: initial[name].to(now, copy=True) for name, now in self._now.items()}
        self.shrinking = _shrinking(parameters, self._now)
        """Layer -> share of its earlier weights that is left, between 0 and 1."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                if unshrunk:
                    parameter.mul_(self.shrinking[_layer(name)])
                parameter.requires_grad_(not torch.equal(parameter, self._now[name]))
        self._before = parameters
        self._moved = {name: p for name, p in parameters.items() if p.requires_grad}

    def gap(self, x: Inputs, *, outputs: Tensor | None = None) -> Gap:
        """Return the gap on these samples; `outputs` of now where they are known."""
        return self.gaps(x, [self._outputs_now(x) if outputs is None else outputs])[0]

    def gaps(self, x: Inputs, groups: Sequence[Tensor]) -> list[Gap]:
        """Return the gap of each group of samples. Groups follow each other in `x`; their outputs now are passed."""
        sizes = [len(outputs) for outputs in groups]
        f = self._outputs_now(x) if self._cast else torch.cat([outputs.to(groups[0].device) for outputs in groups])
        if not self._moved:
            return [_gap(part, Linearized(part, torch.zeros_like(part), part), UNDIVIDED) for part in f.split(sizes)]
        with self._at_earlier_state(x) as measurement:
            line, whole = self._line(measurement, f)
            parts = zip(f.split(sizes), *(column.split(sizes) for column in whole), strict=True)
            return [_gap(now, Linearized(*linear), line.division) for now, *linear in parts]

    @contextmanager
    def _at_earlier_state(self, x: Inputs) -> Iterator[Measurement]:
        """Measure the earlier state: a copy, or the model itself with other tensors in the places of its parameters."""
        if self._inside is None:
            with self._earlier.measuring([x]) as measurement:
                yield measurement
        else:
            batch = replace(self._inside.batches[0], x=self._audited.paired(x), samples=batch_size(x))
            yield replace(self._inside, batches=(batch,), parameters=self._before)

    def parts(self, x: Inputs) -> dict[str, float]:
        """Return layer -> its part of the gap."""
        layers = list(dict.fromkeys(map(_layer, self._now)))
        changed = [layer for layer in layers if any(_layer(name) == layer for name in self._moved)]
        f = self._outputs_now(x)
        if not changed:
            return dict.fromkeys(layers, math.nan)
        with self._earlier.measuring([x]) as measurement:
            line, linear = self._line(measurement, f)
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

    def _line(self, measurement: Measurement, now: Tensor) -> tuple["_Line", Linearized]:
        """Linearize at the earlier state, divided where that is possible for the whole batch."""
        before = {name: p for name, p in measurement.parameters.items() if name in self._moved}
        way = {name: (self._now[name] - p.detach())[None] for name, p in before.items()}
        memory = self._memory
        memory.method = method = memory.method or jvp_method(measurement)
        undivided = _Line(measurement, method, way, UNDIVIDED, {}, {})
        if divides(method) and (self._link or self._effective):
            try:
                line = self._divided(undivided, now)
                return line, line.at(self._moved)
            except UnsupportedModelError:  # other samples take another path
                pass
        return undivided, undivided.at(self._moved)

    def _divided(self, line: "_Line", now: Tensor) -> "_Line":
        """Divide the network, with the weights that products of parameters stand for in both states."""
        key = frozenset(self._moved)
        if key not in self._memory.divisions:
            found = divided(line.measurement, link=self._link, effective=self._effective)
            self._memory.divisions[key] = found
        division = self._memory.divisions[key]
        if not division.merged:
            return replace(line, division=division)
        parameters = dict(line.measurement.parameters)
        moved = {
            name: p.detach() + line.way[name][0].to(p) if name in line.way else p.detach()
            for name, p in parameters.items()
        }
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
    """Parameters that have moved: now less the earlier state."""
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


def _fits(initial: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> bool:
    """Whether a state dict has a tensor for each parameter, under its name."""
    states = {name: initial.get(name) for name in parameters}
    return all(isinstance(t, Tensor) and t.shape == parameters[name].shape for name, t in states.items())


def _with_buffers_of(model: nn.Module, copy: nn.Module) -> nn.Module:
    """Give a copy of a model the buffers that the model has now."""
    buffers = dict(copy.named_buffers())
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffers[name].copy_(buffer)
    return copy


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
