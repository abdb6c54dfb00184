"""The rows of a tangent kernel that one rank computes; all ranks follow one plan, and gradients travel between them.

Two exchanges, chosen for every parameter from the plan, in `planning.exchange`. *Ring*: at distance s = 1 .. R/2 every
rank sends the gradients of its samples, as factors where they are factors, to the rank s places on, and multiplies what
it receives; K is symmetric, so the rest is sent back as entries of the kernel. *Slices*: every rank takes one R-th of
the parameter for all samples, and the rows of all kernels are added up. With f numbers kept of a sample and N entries
of the parameter a rank of a ring sends P f / 2 numbers; with slices it sends P N / R + P^2, and holds a P x P kernel.
"""

from collections.abc import Mapping, Sequence

from featlearn.contraction.factors import Factors, Gradients, as_dense
from featlearn.contraction.gram import Route, mirror
from featlearn.contraction.kernel_sum import Kernels, KernelSum
from featlearn.distributed.exchange import TensorKind, kinds, swap_tensors
from featlearn.distributed.same_directions import same_directions
from featlearn.gradients.directions import OutputSelection
from featlearn.kernel.divided_samples import DividedGradients, SampleShares, alike
from featlearn.kernel.execution import KernelExecution
from featlearn.kernel.verification import KernelVerification
from featlearn.measurement import Measurement
from featlearn.planning.exchange import SharedKernel, shared_parameters
from featlearn.planning.plan import ParameterGroup, Plan, ProgressLine

Places = Sequence[slice]
"""The samples of every rank."""


class DividedExecution:
    """The rows of one rank, measured by a plan that all ranks follow."""

    def __init__(
        self,
        execution: KernelExecution,
        measurement: Measurement,
        plan: Plan,
        directions: OutputSelection,
        division: SampleShares,
        kernel: SharedKernel,
        keys: Mapping[str, str],
        checks: KernelVerification | None,
    ) -> None:
        self._execution, self._measurement, self._plan, self._directions = execution, measurement, plan, directions
        self._division, self._ranks, self._keys, self._checks = division, division.ranks, keys, checks
        self._formed = {one.name for one in plan.parameters if one.route != Route.PAIRS.value}
        self._taken_by_slices = kernel.sliced(shared_parameters(plan, measurement.dtype.itemsize), plan.groups)
        with division.ranks.together():
            self._total = self._sum(division.places(0), keys)
        self._sliced: KernelSum | None = None
        """Kernels of all pairs of samples, from the slices of parameters that this rank has."""

    def _sum(self, rows: slice, keys: Mapping[str, str]) -> KernelSum:
        shape = self._directions.kernel_shape(rows.stop - rows.start, self._division.samples[1])
        found = KernelSum(
            keys,
            shape,
            self._directions.mode,
            self._measurement.dtype,
            self._measurement.device,
            symmetric=self._division.symmetric,
            scratch=self._plan.scratch,
            first_row=rows.start,
        )
        found.callback = self._checks.add if self._checks else None
        return found

    def run(self) -> Kernels:
        """This rank's rows of all kernels."""
        # Planned as a cross kernel of this rank's samples, of which one side is the other.
        with ProgressLine("tangent kernel", self._plan.passes // (2 if self._division.symmetric else 1)) as progress:
            for group in self._plan.groups:
                for chosen in self._execution.direction_blocks(group):
                    self._add(group, chosen, progress)
        if self._division.symmetric:
            self._send_back()
        if self._sliced is not None:
            self._add_rows(self._sliced)
        self._total.divide(self._directions.divisor)
        return self._total.kernels

    def _add(self, group: ParameterGroup, chosen: slice, progress: ProgressLine) -> None:
        """Pairs of blocks of samples; more than one where memory does not hold the gradients of a rank's samples."""
        symmetric = self._division.symmetric
        rows = self._division.blocks(0, group.block)
        columns = rows if symmetric else self._division.blocks(1, group.block)
        single = symmetric and len(rows) == 1 and self._directions.mode == "sum"
        for i, left_places in enumerate(rows):
            left = self._captured(0, left_places, chosen, group, progress, single)
            for j, right_places in enumerate(columns):
                same = symmetric and i == j
                right = left if same else self._captured(1, right_places, chosen, group, progress, False)
                self._multiply((left, right), (left_places, right_places), group, chosen)

    def _captured(
        self, side: int, places: Places, chosen: slice, group: ParameterGroup, progress: ProgressLine, single: bool
    ) -> dict[str, Gradients]:
        """The gradients of this rank's samples in a block.

        `single`: one output direction may stand for all, where all ranks find the same.
        """
        batch, first = self._measurement.batches[side], self._division.places(side).start
        own = places[self._ranks.rank]
        block = slice(own.start - first, own.stop - first)

        with self._ranks.together():
            found: dict[str, Gradients] = {}
            if block.start < block.stop:
                found = dict(self._execution.gathered(batch, block, chosen, group, progress))
        return same_directions(self._ranks, found) if single else found

    def _multiply(
        self,
        own: tuple[Mapping[str, Gradients], Mapping[str, Gradients]],
        places: tuple[Places, Places],
        group: ParameterGroup,
        chosen: slice,
    ) -> None:
        """Add the products of all pairs of samples in two blocks, parameter by parameter."""
        said = self._ranks.gathered([{name: kinds(one) for name, one in side.items()} for side in own])
        failure: Exception | None = None
        for name in group.names:
            left = DividedGradients(self._ranks, own[0].get(name), [one[0].get(name) for one in said], places[0])
            right = left
            if own[1] is not own[0]:
                right = DividedGradients(self._ranks, own[1].get(name), [one[1].get(name) for one in said], places[1])
            if not left.known or not right.known:
                continue
            if not alike([*left.known, *right.known]):
                parameter = self._measurement.parameters[name]
                size = parameter.numel() * (2 if parameter.is_complex() else 1)
                with self._ranks.together():
                    same, left = left is right, left.dense(size)
                    right = left if same else right.dense(size)
            if name in self._taken_by_slices:
                self._add_slices(name, left, right, chosen)
            else:
                failure = self._add_ring(name, left, right, chosen) or failure
        with self._ranks.together():
            if failure is not None:
                raise failure

    def _add_ring(self, name: str, left: DividedGradients, right: DividedGradients, chosen: slice) -> Exception | None:
        """Send gradients round; an error while they are multiplied waits until all ranks have what they expect."""
        ranks, failure, device = self._ranks, None, self._measurement.device
        mine: Gradients | None = None
        count = ranks.size // 2 + 1 if self._division.symmetric else ranks.size
        order = left.own.order if isinstance(left.own, Factors) else None
        # On their way while the own samples are multiplied.
        first = right.begin_exchange(1, device, order) if count > 1 else None
        for distance in range(count):
            found = first() if first and distance == 1 else right.begin_exchange(distance, device, order)()
            try:
                mine = self._formed_once(name, left) if mine is None else mine
                if mine is not None and found is not None:
                    found = mine if found is left.own else found
                    columns = right.places[(ranks.rank - distance) % ranks.size]
                    self._add_block(name, mine, found, left.places[ranks.rank], columns, distance, chosen)
            except Exception as error:  # told to all later
                failure = error
        return failure

    def _formed_once(self, name: str, gradients: DividedGradients) -> Gradients | None:
        """The gradients of this rank, formed if that is how they are multiplied: every distance needs them again."""
        own = gradients.own
        if not isinstance(own, Factors) or name not in self._formed:
            return own
        held = own.samples * own.directions * gradients.size * self._measurement.dtype.itemsize
        return as_dense(own) if 2 * held <= self._plan.scratch else own

    def _add_block(
        self, name: str, own: Gradients, found: Gradients, rows: slice, columns: slice, distance: int, chosen: slice
    ) -> None:
        """Multiply the samples of this rank with those of the rank `distance` places before it."""
        if self._division.symmetric and distance == 0 and columns.start > rows.start:
            return  # the other triangle
        asked = self._division.computed(self._ranks.rank, distance)
        own_rows, their_columns = _common(rows, asked[0]), _common(columns, asked[1])
        if own_rows.start < own_rows.stop and their_columns.start < their_columns.stop:
            own, found = _part(own, rows, own_rows), _part(found, columns, their_columns)
            self._total.add(name, own, found, own_rows, their_columns, chosen)

    def _add_slices(self, name: str, left: DividedGradients, right: DividedGradients, chosen: slice) -> None:
        """Take one slice of a parameter for all samples, in as many passes as memory asks for."""
        ranks, division = self._ranks, self._division
        if self._sliced is None:
            with ranks.together():
                self._sliced = self._sum(slice(0, division.samples[0]), self._keys)
        held = sum(division.samples) * left.directions * left.size * self._measurement.dtype.itemsize // ranks.size
        passes = max(1, min(-(-held // max(self._plan.scratch, 1)), left.length // ranks.size))
        rows, columns = (slice(0, count) for count in division.samples)
        for number in range(passes):
            mine = left.slice_of_all(number, passes, self._measurement.device)
            theirs = mine
            if not division.symmetric:
                theirs = right.slice_of_all(number, passes, self._measurement.device)
            with ranks.together():
                if mine.gradient.numel():
                    self._sliced.add(name, mine, theirs, rows, columns, chosen)

    def _send_back(self) -> None:
        """Complete symmetric kernels: the own block here, others from the ranks that have computed them."""
        ranks, division, total = self._ranks, self._division, self._total
        every, own = slice(None), division.places(0)
        for key in total.kernels if own.start < own.stop else ():
            mirror(total.block(key, every, own, own), self._directions.mode)
        for distance in range(1, ranks.size // 2 + 1):
            to, source = (ranks.rank - distance) % ranks.size, (ranks.rank + distance) % ranks.size
            outgoing = [total.block(key, every, *division.computed(ranks.rank, distance)) for key in total.kernels]
            there, here = division.computed(source, distance)
            shape = tuple(self._directions.kernel_shape(there.stop - there.start, here.stop - here.start))
            expected = [TensorKind(shape, self._measurement.dtype, tuple(range(len(shape))))] * len(outgoing)
            with ranks.together():
                sent = [block.contiguous() for block in outgoing]
            found = swap_tensors(ranks, {to: sent}, {source: expected}, self._measurement.device)[source]
            for key, block in zip(total.kernels, found, strict=True):
                turned = block.permute(1, 0, 3, 2) if self._directions.mode == "full" else block.mT
                total.block(key, every, here, there).add_(turned.contiguous())

    def _add_rows(self, sliced: KernelSum) -> None:
        """Add up the rows that this rank has from the slices of all ranks."""
        ranks, division, every = self._ranks, self._division, slice(None)
        sliced.mirror(slice(0, self._directions.count))
        own = division.places(0)
        shape = tuple(self._directions.kernel_shape(own.stop - own.start, division.samples[1]))
        kind = TensorKind(shape, self._measurement.dtype, tuple(range(len(shape))))
        for distance in range(ranks.size):
            to, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
            outgoing = [sliced.block(key, every, division.places(0, to)).contiguous() for key in sliced.kernels]
            found = outgoing
            if distance:
                found = swap_tensors(ranks, {to: outgoing}, {source: [kind] * len(outgoing)}, self._measurement.device)[
                    source
                ]
            for key, block in zip(sliced.kernels, found, strict=True):
                self._total.block(key, every, own).add_(block)


def _common(one: slice, other: slice) -> slice:
    """The samples in both."""
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _part(gradients: Gradients, samples: slice, wanted: slice) -> Gradients:
    """The gradients of some samples of those that are there."""
    if wanted == samples:
        return gradients
    return gradients.take(slice(wanted.start - samples.start, wanted.stop - samples.start))
