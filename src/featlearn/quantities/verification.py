"""v^T K v against |J^T v|^2, parameter by parameter, from backward passes that share nothing with the kernel."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from featlearn.distributed.group import RankGroup
from featlearn.errors import VerificationError
from featlearn.gradients.directions import Directions
from featlearn.measurement import Measurement
from featlearn.planning.plan import Plan
from featlearn.quantities.optimizer_kernel import Rate


class KernelVerification:
    """Quadratic forms of every parameter's kernel, collected while it is built, and what they must be.

    `ranks` divide the samples of both sides, `samples` of them altogether; by default all are those of the measurement.
    """

    def __init__(
        self, measurement: Measurement, directions: Directions, rates: Mapping[str, Rate], plan: Plan,
        ranks: RankGroup | None = None, samples: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._ranks = RankGroup() if ranks is None else ranks
        samples = [batch.samples for batch in measurement.batches] if samples is None else samples
        generator = torch.Generator("cpu").manual_seed(1)
        self._measurement, self._directions, self._rates = measurement, directions, rates
        self._chunk = min((group.chunk for group in plan.groups), default=1)
        # A vector over samples for every direction; the same for all of them where only their sum is kept.
        count, shared = directions.count, directions.mode == "sum"
        self._vectors = [
            torch.randn(1 if shared else count, size, generator=generator, dtype=torch.float64, device="cpu").expand(
                count, -1
            )
            for size in samples
        ]
        self._given: dict[str, Tensor] = defaultdict(lambda: torch.zeros(count, dtype=torch.float64, device="cpu"))
        self._sizes: dict[str, float] = defaultdict(float)

    def add(self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool) -> None:
        """Take note of one block of one parameter's kernel."""
        block = part.double().cpu()
        v, w = self._vectors[0][chosen, rows], self._vectors[-1][chosen, columns]
        twice = 2.0 if mirrored else 1.0
        if self._directions.mode == "full":
            self._given[name][0] += twice * torch.einsum("cp,pqcd,dq->", v, block, w)
        elif self._directions.mode == "each":
            self._given[name][chosen] += twice * torch.einsum("cp,cpq,cq->c", v, block, w)
        else:
            self._given[name][0] += twice * torch.einsum("p,pq,q->", v[0], block, w[0])
        self._sizes[name] = math.hypot(self._sizes[name], twice**0.5 * _norm(block))

    def conclude(self) -> None:
        """Raise where a kernel disagrees with the backward passes."""
        expected = self._expected()
        self._add_up(expected)
        size = float(self._vectors[0].norm() * self._vectors[-1].norm())
        whole = sum(self._sizes.values())
        for name, wanted in expected.items():
            precision = max(example.precision_of(name) for example in self._measurement.examples)
            difference = float((self._given[name] - wanted).abs().max())
            slack = size * (min(0.05, 1e4 * precision) * self._sizes[name] + precision * whole)
            if not (difference <= slack + 1e-300 and math.isfinite(slack)):
                raise VerificationError(
                    f"the kernel of {name} fails its check: v^T K v = {self._given[name].tolist()}, "
                    f"|J^T v|^2 = {wanted.tolist()}; this is a bug of featlearn or of a rule registered by you: "
                    "fl.plan(model, x) shows which rule read the parameter"
                )

    def _expected(self) -> dict[str, Tensor]:
        count, mode = self._directions.count, self._directions.mode
        found = {name: torch.zeros(count, dtype=torch.float64, device="cpu") for name in self._measurement.parameters}
        every = [slice(0, count)] if mode == "full" else [slice(k, k + 1) for k in range(count)]
        for chosen in every:
            sides = [self._pulled_back(number, chosen) for number in range(len(self._vectors))]
            for name, a in sides[0].items():
                rate = self._rates.get(name, 1.0)
                weighted = a * rate.to(a) if isinstance(rate, Tensor) else a * rate
                product = (weighted.conj() * sides[-1][name]).sum().real.double().cpu()
                found[name][chosen.start if mode == "each" else 0] += product
        return found

    def _pulled_back(self, side: int, chosen: slice) -> dict[str, Tensor]:
        """J^T v, over the samples of all ranks."""
        batch, vectors = self._measurement.batches[side], self._vectors[side]
        with self._ranks.together():
            cotangent = torch.zeros(batch.samples, self._directions.classes, dtype=torch.float64, device="cpu")
            own = vectors[chosen, self._ranks.share(vectors.shape[1])]  # a rank without samples has one of another
            cotangent[: own.shape[1]] = own.T @ self._directions.rows(chosen)
            found = self._measurement.pulled_back(batch, cotangent, self._chunk)
        self._ranks.add_up(found.values())
        return found

    def _add_up(self, names: Iterable[str]) -> None:
        """What all ranks have noted."""
        for name in names if self._ranks.size > 1 else ():
            square = torch.tensor([self._sizes[name] ** 2], dtype=torch.float64, device="cpu")
            self._ranks.add_up([self._given[name], square])
            self._sizes[name] = float(square) ** 0.5


def _norm(block: Tensor) -> float:
    """Frobenius norm; squares of huge numbers would be infinite, and allow any difference."""
    largest = float(block.abs().max()) if block.numel() else 0.0
    return largest * float((block / largest).norm()) if largest > 0 else largest
