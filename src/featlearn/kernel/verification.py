"""v_b^T K w against (J_b^T v_b) . (J^T w), parameter by parameter, from backward passes that share nothing with K.

The vectors v_b cover 64 samples each, and are scaled so that rows of all lengths count. Rounding in such a form is a
few units of the last digit of |J_b^T v_b| |J^T w|, which grows like the square root of the number of samples; a row
that is wrong shows as it is. So an error of 1 % in one row is seen among thousands of samples in float32; the page on
capture has the trials. Entries of v_b differ in size: signs alone may add up to zero, and then say nothing of a bias.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from featlearn.audit.independence import last_digit_changed
from featlearn.distributed.group import RankGroup
from featlearn.errors import VerificationError
from featlearn.graph.graph import numbers
from featlearn.measurement import Measurement
from featlearn.planning.plan import KernelCall, Plan

VECTORS = 2
"""Vectors w: a row that is nearly orthogonal to one of them is hardly so to both."""
UNITS = 16.0
"""Units of rounding in a form that pass at once."""
NEARBY, PARTS, TIMES = 3, 4, 8.0
"""Beyond that, how often the weights are moved by their last digit and the samples added up in smaller parts, and how
many times the change may be that this makes in a form."""
SHARED = 4.0
"""Units of rounding of the largest sample that may be found in others, where that is not enough."""

Forms = Mapping[str, Tensor]
"""Parameter -> (blocks of samples, vectors w, directions, or 1 where they are summed), float64."""


class KernelVerification:
    """Products of every parameter's kernel with random vectors, collected while it is built, and what they must be.

    `ranks` divide the `samples` of both sides, by default those of the measurement; each checks the rows of its own.
    """

    def __init__(
        self,
        measurement: Measurement,
        call: KernelCall,
        plan: Plan,
        samples: tuple[int, int] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._ranks = RankGroup() if ranks is None else ranks
        directions = call.directions
        self._measurement, self._directions, self._rates = measurement, directions, call.rates
        self._block = plan.verified_together
        generator = torch.Generator("cpu").manual_seed(1)
        # A vector over samples for every direction; the same for all of them where only their sum is kept.
        rows, columns = samples or (measurement.batches[0].samples, measurement.batches[-1].samples)
        kept = 1 if directions.mode == "sum" else directions.count
        self._w = torch.randn(VECTORS, kept, columns, generator=generator, dtype=torch.float64, device="cpu")
        # Of unequal size: signs alone may add up to 0, and then hide a bias, whose kernel is constant.
        drawn = torch.rand(kept, rows, generator=generator, dtype=torch.float64, device="cpu") - 0.5
        self._v = drawn + 0.5 * drawn.sign()
        self._products: dict[str, Tensor] = defaultdict(lambda: self._w.new_zeros(VECTORS, kept, rows))
        self._lengths: dict[str, Tensor] = defaultdict(lambda: self._w.new_zeros(kept, rows))
        """Of the rows of every parameter's kernel."""

    def add(self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool) -> None:
        """Take note of one block of one parameter's kernel."""
        block, full = part.double().cpu(), self._directions.mode == "full"
        self._add(name, block, rows, columns, chosen)
        if mirrored:
            self._add(name, block.permute(1, 0, 3, 2) if full else block.mT, columns, rows, chosen)

    def _add(self, name: str, block: Tensor, rows: slice, columns: slice, chosen: slice) -> None:
        if self._directions.mode == "full":
            products = torch.einsum("pqcd,mdq->mcp", block, self._w[:, :, columns])
            block = block.permute(2, 0, 1, 3).flatten(2)
        else:
            block, chosen = (block, chosen) if self._directions.mode == "each" else (block[None], slice(0, 1))
            products = torch.einsum("cpq,mcq->mcp", block, self._w[:, chosen, columns])
        self._products[name][:, chosen, rows] += products
        lengths = self._lengths[name][chosen, rows]
        lengths.copy_(torch.hypot(lengths, _row_lengths(block)))

    def conclude(self) -> None:
        """Raise where a kernel disagrees with the backward passes."""
        self._take_own_rows()
        v = self._v * self._balance()
        expected, sizes = self._from_backward_passes(v, self._block)
        given = {name: self._in_blocks((v * self._products[name]).movedim(-1, 0), torch.sum) for name in expected}
        lengths = {name: self._in_blocks((v * self._lengths[name])[None].movedim(-1, 0), _norm) for name in expected}
        # Where all terms of J_b^T v_b or J^T w cancel, the rows still say how long they are.
        sizes = {name: torch.hypot(size, lengths[name]) for name, size in sizes.items()}
        allowed = self._rounding(sizes)
        suspects = [name for name in expected if not _within(given[name] - expected[name], UNITS * allowed[name])]
        if self._ranks.any(bool(suspects)):
            amplified = self._amplified(v, suspects, expected, allowed)
            with self._ranks.together():
                for name in suspects:
                    if not _within(given[name] - expected[name], amplified[name]):
                        _refuse(name, given[name], expected[name])

    def _take_own_rows(self) -> None:
        """What all ranks have noted of the rows of this one."""
        own = self._ranks.share(self._v.shape[1])
        for name in self._measurement.parameters if self._ranks.size > 1 else ():
            squares = self._lengths[name].square()
            self._ranks.add_up([self._products[name], squares])
            self._products[name], self._lengths[name] = self._products[name][..., own], squares.sqrt()[:, own]
        self._v = self._v[:, own]

    def _amplified(self, v: Tensor, names: Sequence[str], expected: Forms, allowed: Forms) -> dict[str, Tensor]:
        """Differences that networks may have which amplify rounding.

        By how much, a change of the weights in their last digit tells. And ops that take samples together round small
        ones as they round the largest: a Fourier transform, say.
        """
        found, nearby = {}, self._nearby(v)
        for name in names:
            changes = torch.stack([(forms[name] - expected[name]).abs() / allowed[name] for forms in nearby])
            shared = self._in_blocks((v * self._lengths[name].max())[None].movedim(-1, 0), _norm)
            own = max(UNITS, TIMES * float(changes.nan_to_num().max())) * allowed[name]
            found[name] = torch.maximum(own, SHARED * self._precision(name) * shared)
        return found

    def _balance(self) -> Tensor:
        """(directions, samples): what makes all rows about equally long, as far as a backward pass can bear it."""
        lengths = reduce(torch.hypot, self._lengths.values(), torch.zeros_like(self._v))
        limit = torch.finfo(self._measurement.example().outputs.dtype).max ** 0.25
        known = lengths[(lengths > 0) & lengths.isfinite()]
        typical = known.log().mean().exp()
        return torch.where(lengths > 0, (typical / lengths).clamp(1 / limit, limit), 1.0)

    def _in_blocks(self, values: Tensor, reduction: Callable[[Tensor, int], Tensor]) -> Tensor:
        """(samples, vectors, directions) -> (blocks, vectors, directions), or 1 direction where they are mixed."""
        found = torch.stack([reduction(part, 0) for part in values.split(self._block)])
        return reduction(found, 2)[..., None] if self._directions.mode == "full" else found

    def _rounding(self, sizes: Forms) -> dict[str, Tensor]:
        """One unit of rounding in every form; gradients that cancel are rounded as those of other parameters are."""
        whole = reduce(torch.add, sizes.values())
        return {name: self._precision(name) * (size + whole / UNITS) for name, size in sizes.items()}

    def _precision(self, name: str) -> float:
        return max(example.precision_of(name) for example in self._measurement.examples)

    def _nearby(self, v: Tensor) -> list[Forms]:
        found = []
        for seed in range(NEARBY):
            with last_digit_changed(self._measurement.model, seed=seed):
                found.append(self._from_backward_passes(v, max(1, self._block // PARTS))[0])
        return found

    def _from_backward_passes(self, v: Tensor, size: int) -> tuple[Forms, Forms]:
        """(J_b^T v_b) . (J^T w) with the optimizer's rates, and the product of the lengths of both.

        `size`: samples in a backward pass.
        """
        measurement, mode, count = self._measurement, self._directions.mode, self._directions.count
        blocks = max(1, -(-v.shape[1] // self._block))  # a rank may have no rows
        shape = (2, blocks, VECTORS, count if mode == "each" else 1)
        found = {name: v.new_zeros(shape) for name in measurement.parameters}
        for chosen in [slice(0, count)] if mode == "full" else [slice(k, k + 1) for k in range(count)]:
            kept, place = (slice(0, 1) if mode == "sum" else chosen), (chosen.start if mode == "each" else 0)
            rows = self._directions.rows(chosen)
            right = self._pulled_back(self._w[:, kept].mT @ rows, size)
            with self._ranks.together():
                left = measurement.pulled_back_pieces(measurement.batches[0], v[None, kept].mT @ rows, size)
                for piece, (gradients,) in enumerate(left if v.shape[1] else ()):
                    pairs = [(name, a.to(one), one) for name, a in gradients.items() for one in right[name]]
                    fetched = v.new_tensor(numbers([number for _, *pair in pairs for number in _form(*pair)]))
                    for name, forms in zip(gradients, fetched.view(-1, VECTORS, 2), strict=True):
                        found[name][:, piece * size // self._block, :, place] += forms.T
        return {name: forms[0] for name, forms in found.items()}, {name: forms[1] for name, forms in found.items()}

    def _pulled_back(self, w: Tensor, size: int) -> dict[str, list[Tensor]]:
        """J^T w for all vectors w, times the rates."""
        measurement = self._measurement
        totals = {
            name: [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for _ in range(VECTORS)]
            for name, p in measurement.parameters.items()
        }
        own = self._ranks.share(w.shape[1])
        with self._ranks.together():
            pieces = measurement.pulled_back_pieces(measurement.batches[-1], w[:, own], size)
            for several in pieces if own.start < own.stop else ():
                for k, gradients in enumerate(several):
                    for name, gradient in gradients.items():
                        totals[name][k] += gradient
        self._ranks.add_up(one for several in totals.values() for one in several)
        for name, rate in self._rates.items():
            totals[name] = [one * (rate.to(one) if isinstance(rate, Tensor) else rate) for one in totals[name]]
        return totals


def _form(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Their inner product, and the product of their lengths."""
    double = torch.promote_types(a.dtype, torch.float64)
    lengths = [torch.linalg.vector_norm(one, dtype=double).real for one in (a, b)]
    return (a.conj() * b).sum(dtype=double).real, lengths[0] * lengths[1]


def _within(difference: Tensor, allowed: Tensor) -> bool:
    return bool((difference.abs() <= allowed + 1e-300).all()) and bool(allowed.isfinite().all())


def _norm(values: Tensor, axis: int) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values, dim=axis)
    return lengths


def _row_lengths(block: Tensor) -> Tensor:
    """Norms along the last axis, scaled first: the square of a huge entry would be infinite, and any difference
    would pass.
    """
    largest = block.abs().amax(-1)
    return largest * _norm(block / torch.where(largest > 0, largest, 1.0)[..., None], -1)


def _refuse(name: str, given: Tensor, expected: Tensor) -> None:
    worst = int((given - expected).abs().nan_to_num(nan=torch.inf).flatten().argmax())
    raise VerificationError(
        f"the kernel of {name} fails its check: v^T K w = {float(given.flatten()[worst])}, (J^T v) . (J^T w) = "
        f"{float(expected.flatten()[worst])} for some of its rows; either its gradients have lost their digits to "
        "rounding (saturated attention, say), which dtype=torch.float64 tells, or this is a bug of featlearn or of a "
        "rule registered by you: fl.plan(model, x) shows which rule read the parameter"
    )
