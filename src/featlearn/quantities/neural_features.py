"""Neural features of any network by capture: what arrives at every layer, streamed over the samples."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.distributed.agreement import same_call, smallest_budget
from featlearn.distributed.group import RankGroup
from featlearn.errors import InputTypeError, MemoryBudgetError, UnsupportedModelError
from featlearn.gradients.directions import Directions, OutputSelection, output_directions
from featlearn.linear_maps.preactivation_gradients import PreactivationGradients, select_layers
from featlearn.linear_maps.weight_matrices import WeightMatrices, WeightMatrix, weight_matrices
from featlearn.measurement import Measurement
from featlearn.network.checks import unwrapped
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs
from featlearn.planning.kernel_plan import samples_within
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.plan import counted
from featlearn.quantities.layer_features import Deviations, LayerFeatures, NeuralFeatures
from featlearn.signatures import name_keywords

# Independent parts of sums over random directions, which show their error.
PARTS = 8
# At the end of a network gradients of equal size arrive everywhere, up to this.
UNEVEN = 1e-3


@name_keywords()
def neural_features(
    model: nn.Module,
    x: Inputs,
    *,
    initial: Mapping[str, Tensor] | None = None,
    layers: str | Sequence[str] | None = None,
    outputs: int | Directions | None = None,
    **settings: Unpack[Settings],
) -> NeuralFeatures:
    """NFM, AGOP and PTK covariance of every linear map in a network, and how far they agree (Beaglehole et al. 2024).

    Every trainable weight that multiplies rows counts: linear layers with or without tokens, convolutions (over
    patches), attention projections. A fused query-key-value projection is taken apart into `layer.q`, `layer.k` and
    `layer.v`, found from the computation and not from names. Embedding tables are no linear maps of their input and
    are left out, tied output layers with them; `.left_out` names them and everything else that is not in the result.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: probe inputs, as for `fl.ntk`. They are streamed: memory does not grow with their number.
        initial: the `state_dict()` at initialization, cloned then, for everything that compares with it. Both networks
            see the same samples and the same random directions.
        layers: globs of layer names; by default all.
        outputs: by default all C outputs, summed, one backward pass each; an int for one of them; `fl.Directions(k)`
            for an unbiased estimate of the sum from k random directions, drawn anew for every sample. Every number
            then has a standard error, `.errors` of its layer, for k >= 2; the matrices take up to eight times
            the memory.
        **settings: As for `fl.ntk`. With a `group` every rank passes all samples and gets all features.

    Returns:
        Layer name -> `LayerFeatures`, in the order of the model's parameters.
    """
    return neural_features_of(AuditedModel(model, **settings), x=x, initial=initial, layers=layers, outputs=outputs)


def neural_features_of(
    audited: AuditedModel,
    *,
    x: Inputs | None = None,
    initial: Mapping[str, Tensor] | None = None,
    layers: str | Sequence[str] | None = None,
    outputs: int | Directions | None = None,
) -> NeuralFeatures:
    """Compute NFM, AGOP and PTK covariance of every linear map: see `fl.neural_features`."""
    ranks, request, x = audited.request.group, audited.request, audited.inputs(x)
    with ranks.together() as block:
        if outputs is not None and (isinstance(outputs, bool) or not isinstance(outputs, int | Directions)):
            raise InputTypeError(
                f"outputs={outputs!r}, expected None for all, the number of an output, or fl.Directions(k)"
            )
        unwrapped(audited.model)
        arguments = {"layers": layers, "outputs": outputs, "dtype": request.dtype, "initial": initial is not None}
        block.expect(*same_call(arguments, {"x": x, "initial": initial, "outputs": outputs}))
    with audited.measuring([x], common=x, keep_weights=True) as now, ExitStack() as stack:
        start = None
        with ranks.together():
            now.refuse_no_gradient(of_example=True)
            if initial is not None:
                before = audited.of_copy(network_at(audited.model, initial))
                start = stack.enter_context(before.measuring([x], keep_weights=True))
                refuse_shared(start, audited.model)
            budget = byte_budget(request.memory, now.device)
        budget = smallest_budget(ranks, budget, now.device, measured=request.memory is None)
        return measured_features(now, start, layers, outputs, budget, ranks)


@dataclass
class InitialGradients:
    """Weights of a network at initialization, and gradients at its layers. Later states are compared with them."""

    most: int
    """Largest number of entries of all gradients and weights; of a larger network nothing is stored."""
    gradients: list[Mapping[str, Tensor]] = field(default_factory=list)
    """For each direction: layer -> (samples, positions, units)."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Layer -> weight."""

    def __bool__(self) -> bool:
        return bool(self.weights)

    def store(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one direction, as long as there is room."""
        self.most -= sum(gradient.numel() for gradient in gradients.values())
        self.gradients = [*self.gradients, gradients] if self.most >= 0 else []

    def finish(self, weights: Mapping[str, Tensor]) -> None:
        """Add the weights, if there was room for all gradients and there is for them."""
        if self.most >= sum(weight.numel() for weight in weights.values()):
            self.weights = dict(weights)


def measured_features(
    now: Measurement,
    start: Measurement | InitialGradients | None,
    layers: str | Sequence[str] | None = None,
    outputs: int | Directions | None = None,
    memory: str | int | None = None,
    ranks: RankGroup | None = None,
    *,
    store: InitialGradients | None = None,
) -> NeuralFeatures:
    """Return the features of a measurement that is under way, compared with the network at initialization.

    `store` receives the gradients of now, if all samples are captured at once.
    """
    ranks = RankGroup() if ranks is None else ranks
    with ranks.together():
        found = weight_matrices(now.example())
        budget = byte_budget(memory, now.device)
        chosen = {name: found.by_name[name] for name in select_layers(found, layers)}
        directions = _Directions(outputs, now.classes, any(len(one.weight) == now.classes for one in chosen.values()))
        parts = _parts(chosen, budget, start is not None, directions, now.batches[0].samples)
        totals = {name: _Totals(one, now.device, start is not None, parts) for name, one in chosen.items()}
        _stream(now, start, directions, totals, found, 0.2 * budget, ranks, store)
        for name, total in totals.items():
            # A rank without samples of its own.
            if isinstance(start, Measurement) and total.initial_weight is None:
                total.initial_weight = weight_matrices(start.example(), found).by_name[name].weight
    for total in totals.values():
        total.add_up(ranks)
    features = {name: total.features(directions, now.dtype) for name, total in totals.items()}
    return NeuralFeatures(features, found.left_out)


def refuse_shared(start: Measurement, model: nn.Module) -> None:
    """A copy that still reaches the trained weights (through a closure or a hook) is not what it was at the start."""
    graph = start.example().graph
    if graph is not None and graph.variables & {id(parameter) for parameter in model.parameters()}:
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be put back to where it began; keep the weights in modules, or leave initial= out"
        )


def _parts(
    chosen: Mapping[str, WeightMatrix], budget: int, compared: bool, directions: "_Directions", samples: int
) -> tuple[int, int]:
    """Into how many groups of samples, and of directions, the sums are divided for their error to be seen.

    The matrices of all layers are held in double, one for each part, twice where there is an initial state.
    """
    copies = 2 if compared else 1
    sizes = {name: 8 * copies * (len(one.weight) ** 2 + one.weight.numel()) for name, one in chosen.items()}
    for wanted in (PARTS, 4, 2):
        if directions.random is None or directions.random.k == 1:
            groups = (1, 1)
        else:
            along = min(directions.random.k, wanted)
            groups = (max(1, min(wanted // along, samples)), along)
        needed = sum(sizes.values()) * groups[0] * groups[1]
        if needed <= 0.8 * budget:
            return groups
    largest = max(sizes, key=lambda name: sizes[name])
    raise MemoryBudgetError(
        f"the matrices of {len(sizes)} layers take {readable_bytes(needed)}, "
        f"{readable_bytes(sizes[largest] * groups[0] * groups[1])} of them for {largest} with "
        f"{len(chosen[largest].weight)} units, expected at most {readable_bytes(0.8 * budget)}; choose layers=, or "
        "raise memory="
    )


class _Directions:
    """The output directions of every chunk of samples, and what a readout would see of them."""

    def __init__(self, outputs: int | Directions | None, classes: int, compared: bool) -> None:
        self.single: OutputSelection = output_directions("sum" if outputs is None else outputs, classes)
        self.random = outputs if isinstance(outputs, Directions) else None
        self.divisor = 1 if self.random is None else self.random.k
        self.all = self.random is not None or outputs is None
        """Whether they stand for all outputs."""
        given = None if self.random is None else self.random.generator
        self._generator = torch.Generator("cpu").manual_seed(0) if given is None else given
        self.covariance = torch.zeros(classes, classes, dtype=torch.float64) if compared else None
        """Sum of v v^T over all directions of all samples, where a layer has as many units as there are outputs."""

    def counts(self, groups: int) -> Tensor:
        """(groups,) how many directions fall into each group; for exact sums, which are not averaged, 1."""
        return torch.tensor([len(range(group, self.divisor, groups)) for group in range(groups)], device="cpu")

    def of(self, samples: int) -> Iterator[Tensor]:
        """(C,), or (samples, C) where every sample has its own; samples first, so that chunks do not matter."""
        for direction in self._drawn(samples):
            if self.covariance is not None:
                each = direction.expand(samples, -1)
                self.covariance += each.mT @ each
            yield direction

    def _drawn(self, samples: int) -> Iterator[Tensor]:
        if self.random is not None:
            shape = (samples, self.random.k, self.single.classes)
            signs = torch.randint(2, shape, generator=self._generator, device=self._generator.device)
            yield from (2.0 * signs.double().cpu() - 1.0).unbind(1)
        else:
            for number in range(self.single.count):
                yield self.single.rows(slice(number, number + 1))[0]


class _Totals:
    """Sums over all rows that arrive at one layer, for groups of samples and of directions."""

    def __init__(self, one: WeightMatrix, device: torch.device, compared: bool, parts: tuple[int, int]) -> None:
        self.one, self.rows = one, 0
        shape = (*parts, len(one.weight), len(one.weight))
        self.covariance = torch.zeros(shape, dtype=torch.float64, device=device)
        self.change = torch.zeros_like(self.covariance) if compared else None
        self.initial_weight: Tensor | None = None
        self.smallest, self.largest, self.silent = math.inf, 0.0, 0
        """Of the gradients that arrive and are not zero; how many rows are all zero."""

    def add(self, now: Tensor, start: Tensor | None, begin: int, number: int) -> None:
        """What arrives for one direction: (samples, positions, units), and the same at initialization.

        `begin` is the place of the first sample, `number` that of the direction.
        """
        groups, along = self.covariance.shape[:2]
        for group in range(groups):
            own = slice((group - begin) % groups, None, groups)
            rows = now[own].flatten(0, 1)
            self.covariance[group, number % along] += _gram(rows)
            if start is not None and self.change is not None:
                self.change[group, number % along] += _gram(rows.double() - start[own].flatten(0, 1).double())
        if self.largest <= self.smallest * (1 + UNEVEN):  # else the layer is no readout, whatever else arrives
            rows = now.flatten(0, 1)
            self.silent += int((~rows.any(1)).sum())
            sizes = rows[rows != 0].abs()
            if sizes.numel():
                self.smallest = min(self.smallest, float(sizes.min()))
                self.largest = max(self.largest, float(sizes.max()))

    def add_up(self, ranks: RankGroup) -> None:
        """The sums over the samples of all ranks."""
        ranks.add_up([self.covariance] if self.change is None else [self.covariance, self.change])
        counts = torch.tensor([self.rows, self.silent], device="cpu")
        ranks.add_up([counts])
        self.rows, self.silent = counts.tolist()
        smallest, self.largest = ranks.largest([-self.smallest, self.largest])
        self.smallest = -smallest

    def features(self, directions: _Directions, precision: torch.dtype) -> LayerFeatures:
        """Averages, with the matrices they belong to."""
        parts = self.covariance.shape[:2]
        counts = directions.counts(parts[1]).to(self.covariance)
        covariance, spread = _mean(self.covariance.div_(self.rows), counts)
        change, changed = (None, None) if self.change is None else _mean(self.change.div_(self.rows), counts)
        known = None
        if directions.random is not None:
            known = Deviations(spread, changed, parts[0] * (parts[1] - 1))
        return LayerFeatures(
            self.one.weight,
            covariance,
            self.initial_weight,
            change,
            self._ends(covariance, directions, precision),
            self.one.role,
            self.rows,
            self.one.parameters,
            known,
        )

    def _ends(self, covariance: Tensor, directions: _Directions, precision: torch.dtype) -> bool:
        """Whether the layer gives the outputs themselves, up to a constant."""
        alike, slack = self.largest <= self.smallest * (1 + UNEVEN), torch.finfo(precision).eps ** 0.5
        if _proportional(covariance, directions.covariance, slack):
            # One unit always has a multiple of the identity; at the end of the network all samples have the same one.
            return len(covariance) > 1 or alike
        if not alike or len(covariance) == 1 or not directions.all:
            return False
        # Outputs at many positions: the directions themselves arrive. K is a multiple of the identity, up to the
        # products of independent signs where the directions are random.
        scaled = covariance / covariance.diagonal().mean()
        uneven, apart = (float(part.abs().max()) for part in (scaled.diagonal() - 1, scaled - scaled.diagonal().diag()))
        seen = self.rows * directions.divisor - self.silent
        if directions.random is not None:
            return bool(seen >= 100 and uneven <= UNEVEN and apart <= min(0.5, 6 / seen**0.5))
        return bool(max(uneven, apart) <= slack)


def _mean(parts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over directions and sum over samples of sums (groups, along, k, k), and how far its parts deviate.

    `counts` (along,): how many directions each part has. Deviations (groups * along, k, k) are scaled for their
    squares to add up to the variance. They take the place of the sums.
    """
    whole, along = counts.sum(), len(counts)
    mean = parts.sum(1) / whole
    if along == 1:
        return mean.sum(0), torch.zeros_like(parts[0])
    scale = (counts / ((along - 1) * whole)).sqrt()
    # In place: there may be many parts, and they are large.
    deviations = parts.div_(counts[:, None, None]).sub_(mean[:, None]).mul_(scale[:, None, None]).flatten(0, 1)
    return mean.sum(0), deviations


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
    now: Measurement,
    start: Measurement | InitialGradients | None,
    directions: _Directions,
    totals: Mapping[str, _Totals],
    like: WeightMatrices,
    room: float,
    ranks: RankGroup,
    store: InitialGradients | None,
) -> None:
    """Add up what arrives, chunk by chunk, for this rank's share of each."""
    (batch,) = now.batches
    chunk = ranks.size * samples_within(now, room / 2 if isinstance(start, Measurement) else room)
    stored = start if isinstance(start, InitialGradients) else None
    store = store if chunk >= batch.samples and ranks.size == 1 else None
    names = list(totals)
    for block in counted("neural features", batch.samples, chunk):
        samples = block.stop - block.start
        own = ranks.share(samples)
        every = directions.of(samples)  # directions are drawn for all samples, whoever has them
        if own.start == own.stop:
            for _ in every:
                pass
            continue
        begin, end = block.start + own.start, block.start + own.stop
        here = PreactivationGradients(now, batch, begin, end, like)
        there = None
        if isinstance(start, Measurement):
            there = PreactivationGradients(start, start.batches[0], begin, end, like)
        for number, direction in enumerate(every):
            direction = direction[own] if direction.dim() == 2 else direction
            found = here.at(names, direction)
            before = None if there is None else there.at(names, direction)
            if stored is not None:
                before = {name: gradient[begin:end] for name, gradient in stored.gradients[number].items()}
            if store is not None:
                store.store(found)
            for name, total in totals.items():
                total.add(found[name], None if before is None else before[name], begin, number)
        for name, total in totals.items():
            total.rows += (end - begin) * here.weight_matrix(name).positions
            total.initial_weight = None if there is None else there.weight_matrix(name).weight
            if stored is not None:
                total.initial_weight = stored.weights[name]
        if store is not None:
            store.finish({name: here.weight_matrix(name).weight for name in names})
