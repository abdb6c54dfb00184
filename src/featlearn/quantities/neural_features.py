"""Neural features of any network by capture: what arrives at every layer, streamed over the samples."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, UnsupportedModelError
from featlearn.gradients.directions import Directions, Probes, output_directions
from featlearn.layers.preactivation_gradients import PreactivationGradients, chosen_layers
from featlearn.layers.projections import Projection, Projections, projections
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs, Readout
from featlearn.planning.chunks import samples_within
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.progress_line import ProgressLine
from featlearn.preparation import Preparation
from featlearn.quantities.layer_features import LayerFeatures, NeuralFeatures


def neural_features(
    model: nn.Module, x: Inputs, *, initial: Mapping[str, Tensor] | None = None,
    layers: str | Sequence[str] | None = None, readout: Readout | None = None, outputs: int | Probes | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None,
) -> NeuralFeatures:  # fmt: skip
    """NFM, AGOP and PTK covariance of every linear map in a network, and how far they agree (Beaglehole et al. 2024).

    Every trainable weight that multiplies rows counts: linear layers with or without tokens, convolutions (over
    patches), attention projections. A fused query-key-value projection is taken apart into `layer.q`, `layer.k` and
    `layer.v`, found from the computation and not from names. Embedding tables are no linear maps of their input and
    are left out, tied output layers with them; `.left_out` names them and everything else that is not in the result.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: probe inputs, as for `fl.ntk`. They are streamed: memory does not grow with their number.
        initial: the `state_dict()` at initialisation, cloned then, for everything that compares with it. Both networks
            see the same samples and the same random directions.
        layers: globs of layer names; by default all.
        readout: turns the model's output into (P,) or (P, C), as for `fl.ntk`.
        outputs: by default all C outputs, summed, one backward pass each; an int for one of them; `fl.Probes(k)` for an
            unbiased estimate of the sum from k random directions, drawn anew for every sample.
        dtype: `torch.float64` measures a copy of the network in double.
        memory: a byte budget such as `"2GiB"`; by default half of what is free.

    Returns:
        Layer name -> `LayerFeatures`, in the order of the model's parameters.
    """
    prepared = Preparation(model, readout=readout, dtype=dtype, memory=memory)
    return prepared_features(prepared, x, initial=initial, layers=layers, outputs=outputs)


def prepared_features(
    prepared: Preparation, x: Inputs, *, initial: Mapping[str, Tensor] | None = None,
    layers: str | Sequence[str] | None = None, outputs: int | Probes | None = None,
) -> NeuralFeatures:  # fmt: skip
    """The neural features of a prepared model: see `fl.neural_features`."""
    if outputs is not None and (isinstance(outputs, bool) or not isinstance(outputs, int | Probes)):
        raise InputTypeError(f"outputs={outputs!r}, expected None for all, the number of an output, or fl.Probes(k)")
    with ExitStack() as stack:
        now = stack.enter_context(prepared.measuring([x], keep_weights=True))
        refuse_no_layers(now)
        start = None
        if initial is not None:
            start = stack.enter_context(prepared.at(initial).measuring([x], keep_weights=True))
            refuse_shared(start, prepared.model)
        return measured_features(now, start, layers, outputs, prepared.memory)


def measured_features(
    now: Measurement, start: Measurement | None, layers: str | Sequence[str] | None = None,
    outputs: int | Probes | None = None, memory: str | int | None = None,
) -> NeuralFeatures:  # fmt: skip
    """The features of a measurement that is under way, compared with one of the network at initialisation."""
    found = projections(now.example())
    budget = byte_budget(memory, now.device)
    chosen = {name: found.found[name] for name in chosen_layers(found, layers)}
    _refuse_large(chosen, budget, start is not None)
    directions = _Directions(outputs, now.classes, any(len(one.weight) == now.classes for one in chosen.values()))
    totals = {name: _Totals(one, now.device, start is not None) for name, one in chosen.items()}
    _stream(now, start, directions, totals, found, 0.2 * budget)
    features = {name: total.features(directions, now.dtype) for name, total in totals.items()}
    return NeuralFeatures(features, found.left_out)


def refuse_no_layers(measurement: Measurement) -> None:
    """Raise if no output depends on the parameters."""
    if measurement.example().graph is None:
        raise InputValueError("the outputs carry no gradient, expected some that depend on trainable parameters")


def refuse_shared(start: Measurement, model: nn.Module) -> None:
    """A copy that still reaches the trained weights (through a closure or a hook) is not what it was at the start."""
    graph = start.example().graph
    if graph is not None and graph.variables & {id(parameter) for parameter in model.parameters()}:
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be put back to where it began; keep the weights in modules, or leave initial= out"
        )


def _refuse_large(chosen: Mapping[str, Projection], budget: int, compared: bool) -> None:
    """The matrices of all layers are held in double, twice where there is an initial state."""
    copies = 2 if compared else 1
    sizes = {name: 8 * copies * (len(one.weight) ** 2 + one.weight.numel()) for name, one in chosen.items()}
    needed = sum(sizes.values())
    if needed > 0.8 * budget:
        largest = max(sizes, key=lambda name: sizes[name])
        raise MemoryBudgetError(
            f"the matrices of {len(sizes)} layers take {readable_bytes(needed)}, {readable_bytes(sizes[largest])} of "
            f"them for {largest} with {len(chosen[largest].weight)} units, expected at most "
            f"{readable_bytes(0.8 * budget)}; choose layers=, or raise memory="
        )


class _Directions:
    """The output directions of every chunk of samples, and what a readout would see of them."""

    def __init__(self, outputs: int | Probes | None, classes: int, compared: bool) -> None:
        self.single: Directions = output_directions("sum" if outputs is None else outputs, classes)
        self.probes = outputs if isinstance(outputs, Probes) else None
        self.divisor = 1 if self.probes is None else self.probes.k
        given = None if self.probes is None else self.probes.generator
        self._generator = torch.Generator("cpu").manual_seed(0) if given is None else given
        self.covariance = torch.zeros(classes, classes, dtype=torch.float64) if compared else None
        """Sum of v v^T over all directions of all samples, where a layer has as many units as there are outputs."""

    def of(self, samples: int) -> Iterator[Tensor]:
        """(C,), or (samples, C) where every sample has its own; samples first, so that chunks do not matter."""
        for direction in self._drawn(samples):
            if self.covariance is not None:
                each = direction.expand(samples, -1)
                self.covariance += each.mT @ each
            yield direction

    def _drawn(self, samples: int) -> Iterator[Tensor]:
        if self.probes is not None:
            shape = (samples, self.probes.k, self.single.classes)
            signs = torch.randint(2, shape, generator=self._generator, device=self._generator.device)
            yield from (2.0 * signs.double().cpu() - 1.0).unbind(1)
        else:
            for number in range(self.single.count):
                yield self.single.rows(slice(number, number + 1))[0]


class _Totals:
    """Sums over all rows that arrive at one layer."""

    def __init__(self, one: Projection, device: torch.device, compared: bool) -> None:
        self.one, self.rows = one, 0
        self.covariance = torch.zeros(len(one.weight), len(one.weight), dtype=torch.float64, device=device)
        self.change = torch.zeros_like(self.covariance) if compared else None
        self.initial_weight: Tensor | None = None
        self.smallest, self.largest = math.inf, 0.0
        """Of the gradients that arrive and are not zero."""

    def add(self, now: Tensor, start: Tensor | None) -> None:
        """What arrives for one direction: (samples, positions, units), and the same at initialisation."""
        rows = now.flatten(0, 1)
        self.covariance += _gram(rows)
        if rows.shape[1] == 1 and bool(rows.any()):
            sizes = rows[rows != 0].abs()
            self.smallest, self.largest = min(self.smallest, float(sizes.min())), max(self.largest, float(sizes.max()))
        if start is not None and self.change is not None:
            self.change += _gram(rows.double() - start.flatten(0, 1).double())

    def features(self, directions: _Directions, precision: torch.dtype) -> LayerFeatures:
        """Averages, with the matrices they belong to."""
        count = self.rows * directions.divisor
        covariance = self.covariance / count
        change = None if self.change is None else self.change / count
        readout = _proportional(covariance, directions.covariance, torch.finfo(precision).eps ** 0.5)
        # One unit always has a multiple of the identity; at the end of the network all samples have the same one.
        readout = readout and (len(covariance) > 1 or self.largest <= self.smallest * (1 + 1e-3))
        return LayerFeatures(
            self.one.weight,
            covariance,
            self.initial_weight,
            change,
            readout,
            self.one.role,
            self.rows,
            self.one.parameters,
        )


def _gram(rows: Tensor) -> Tensor:
    """rows^T rows in double; scaled first, since squares of small gradients underflow in single precision."""
    size = float(rows.abs().max()) if rows.numel() else 0.0
    if size == 0.0:
        return rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    scaled = rows / size
    return (scaled.mT @ scaled).double() * size**2


def _proportional(a: Tensor, b: Tensor | None, slack: float) -> bool:
    """Whether a is a positive multiple of b."""
    if b is None or a.shape != b.shape:
        return False
    b = b.to(a.device)
    factor = float((a * b).sum() / b.square().sum())
    return factor > 0 and float((a - factor * b).norm()) <= slack * float(a.norm())


def _stream(
    now: Measurement, start: Measurement | None, directions: _Directions, totals: Mapping[str, _Totals],
    like: Projections, room: float,
) -> None:  # fmt: skip
    """Add up what arrives, chunk by chunk."""
    (probe,) = now.probes
    chunk = samples_within(now, room if start is None else room / 2)
    progress = ProgressLine("neural features", -(-probe.samples // chunk))
    names = list(totals)
    try:
        for begin in range(0, probe.samples, chunk):
            end = min(begin + chunk, probe.samples)
            here = PreactivationGradients(now, probe, begin, end, like)
            there = None if start is None else PreactivationGradients(start, start.probes[0], begin, end, like)
            for direction in directions.of(end - begin):
                found = here.at(names, direction)
                before = None if there is None else there.at(names, direction)
                for name, total in totals.items():
                    total.add(found[name], None if before is None else before[name])
            for name, total in totals.items():
                total.rows += (end - begin) * here.projection(name).positions
                total.initial_weight = None if there is None else there.projection(name).weight
            progress.advance()
    finally:
        progress.close()
