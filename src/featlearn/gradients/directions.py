"""Which outputs a kernel is of: every output, one of them, or random directions among many."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from featlearn.contraction.gram import Mode
from featlearn.errors import InputTypeError, InputValueError


@dataclass(frozen=True)
class Directions:
    """Random output directions: an unbiased estimate of the sum over outputs at a cost that does not grow with C.

    Of the sum, not of the mean that is the default. Its error falls as 1 / sqrt(k): some 10 % for 16 of them. With as
    many directions as outputs `"sum"` costs the same and is exact.

    `k` directions with independent signs +1 and -1, the same for every sample. `generator` makes them another draw;
    without one they are the same at every call, and no random generator of yours is touched.
    """

    k: int
    generator: torch.Generator | None = field(default=None, repr=False)  # an address, which is no use to anybody

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise InputValueError(f"Directions got k={self.k!r}, expected a number of directions >= 1")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise InputTypeError(
                f"Directions got generator={self.generator!r}, expected a torch.Generator; "
                "write torch.Generator().manual_seed(0)"
            )

    def signs(self, classes: int) -> Tensor:
        """(k, C) signs."""
        generator = torch.Generator("cpu").manual_seed(0) if self.generator is None else self.generator
        signs = torch.randint(2, (self.k, classes), generator=generator, device=generator.device)
        return 2.0 * signs.double().cpu() - 1.0


Outputs = Literal["mean", "sum", "each", "full"] | int | Directions


@dataclass(frozen=True)
class OutputSelection:
    """Output directions, how their kernels are combined, and what the result is divided by."""

    count: int
    classes: int
    mode: Mode
    divisor: int
    drawn: Tensor | None = None
    """(K, C) directions that were drawn at random; None for single outputs, which are never written out all at once."""
    first: int = 0
    """The first single output."""

    def rows(self, chosen: slice) -> Tensor:
        """Some of the directions, (k, C), float64, on the CPU."""
        if self.drawn is not None:
            return self.drawn[chosen]
        begin, end, _ = chosen.indices(self.count)
        if not self.first + begin:
            return torch.eye(end, self.classes, dtype=torch.float64, device="cpu")
        found = torch.zeros(end - begin, self.classes, dtype=torch.float64, device="cpu")
        found.diagonal(self.first + begin).fill_(1.0)
        return found

    def kernel_shape(self, samples: int, samples2: int) -> tuple[int, ...]:
        """The shape of the kernel."""
        directions = self.count
        shapes = {
            "sum": (samples, samples2),
            "each": (directions, samples, samples2),
            "full": (samples, samples2, directions, directions),
        }
        return shapes[self.mode]


def output_directions(outputs: Outputs, classes: int) -> OutputSelection:
    """Turn the `outputs` argument into directions for a network with this many outputs."""
    if isinstance(outputs, Directions):
        return OutputSelection(outputs.k, classes, "sum", outputs.k, outputs.signs(classes))
    if isinstance(outputs, int) and not isinstance(outputs, bool):
        if not 0 <= outputs < classes:
            raise InputValueError(f"outputs={outputs}, expected an output between 0 and {classes - 1}")
        return OutputSelection(1, classes, "sum", 1, first=outputs)
    if outputs == "mean":
        return OutputSelection(classes, classes, "sum", classes)
    if outputs in ("sum", "each", "full"):
        return OutputSelection(classes, classes, outputs, 1)
    expected = "'mean', 'sum', 'each', 'full', the number of an output, or fl.Directions(k)"
    kind = InputValueError if isinstance(outputs, str) else InputTypeError
    raise kind(f"outputs={outputs!r}, expected {expected}")
