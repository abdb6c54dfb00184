"""What a kernel will cost, and how every parameter will be read, before anything is paid."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from featlearn.audit.independence import part_sizes
from featlearn.planning.chunks import ParameterGroup
from featlearn.planning.cost import ParameterPlan
from featlearn.planning.memory import readable_bytes, readable_count


@dataclass(frozen=True, repr=False)
class Plan:
    """What `fl.ntk` would do with the same arguments; `str()` is a table."""

    parameters: tuple[ParameterPlan, ...]
    groups: tuple[ParameterGroup, ...]
    samples: tuple[int, int]
    symmetric: bool
    """Whether it is the kernel of one probe with itself."""
    directions: int
    """Output directions, each a backward pass per chunk."""
    kernel_shape: tuple[int, ...]
    kernel_bytes: int
    """Bytes of the result, all of its parts together."""
    memory: int
    """The byte budget."""
    scratch: int
    """Bytes for temporaries of a contraction."""
    peak: int
    """About how many bytes will be held at most: the kernel, the weights once more, and what it is made from."""
    pieces: int = 0
    """In about how many parts every chunk is run again, to see that samples do not influence each other; 0 for
    sequences of torch's own layers, which are not."""
    confirmed: bool = False
    """Whether a backward pass more per chunk and block of directions confirms which sample each gradient belongs to;
    most ops say it by themselves."""

    @property
    def fallbacks(self) -> dict[str, str]:
        """Parameters that go through the exact fallback, with the reason."""
        return {p.name: p.reason for p in self.parameters if p.route == "fallback"}

    @property
    def operations(self) -> float:
        """Multiply-adds of all contractions."""
        return sum(p.operations for p in self.parameters)

    @property
    def passes(self) -> int:
        """Forward passes over whole chunks of samples; a block of samples is captured anew for every pair of blocks."""
        return sum(count * self._blocks(group) for count, group in self._swept())

    @property
    def check_passes(self) -> int:
        """Forward passes over parts of chunks, each chunk once in all its parts together."""
        if not self.pieces:
            return 0
        return sum(
            count * self._blocks(group) * len(part_sizes(group.chunk, self.pieces)) for count, group in self._swept()
        )

    @property
    def backward_passes(self) -> int:
        """Backward passes over chunks of samples: one for each output direction, and those that confirm them.

        A GPU makes those of all directions in one.
        """
        extra = [-(-self.directions // group.directions) if self.confirmed else 0 for _, group in self._swept()]
        return sum(count * (self.directions + more) for (count, _), more in zip(self._swept(), extra, strict=True))

    def _blocks(self, group: ParameterGroup) -> int:
        """Forward passes over one chunk: a chunk of all samples serves all blocks of directions."""
        whole = self.symmetric and group.chunk >= self.samples[0]
        return 1 if whole else -(-self.directions // group.directions)

    def _swept(self) -> list[tuple[int, ParameterGroup]]:
        """How many chunks each group captures for one block of directions."""
        found = []
        for group in self.groups:
            chunks = [_chunks(samples, group) for samples in self.samples]
            if self.symmetric:  # block i, then every block before it
                count = sum(size * (len(chunks[0]) - i) for i, size in enumerate(chunks[0]))
            else:
                count = sum(chunks[0]) + len(chunks[0]) * sum(chunks[1])
            found.append((count, group))
        return found

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "route", "multiply-adds", "bytes/sample", "why")
        lines = [
            (
                _common_name([p.name for p in same]),
                " x ".join(map(str, same[0].shape)) or "scalar",
                _counted(same[0].uses),
                same[0].route,
                readable_count(sum(p.operations for p in same)),
                readable_bytes(sum(p.kept for p in same)),
                same[0].reason,
            )
            for same in _alike(self.parameters)
        ]
        widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in (head, *lines)]  # fmt: skip
        rows.insert(1, "  ".join("-" * width for width in widths))
        chunks = sorted({group.chunk for group in self.groups})
        shape = " x ".join(map(str, self.kernel_shape))
        held = f"{chunks[0]}" if len(chunks) == 1 else f"{chunks[0]} to {chunks[-1]}" if chunks else "no"
        summary = [
            f"{self.samples[0]} x {self.samples[1]} samples -> kernel {shape} ({readable_bytes(self.kernel_bytes)}), "
            f"about {readable_bytes(self.peak)} at most, budget {readable_bytes(self.memory)}",
            f"{_plural(self.passes, 'forward pass', 'es')} of {held} sample{'' if held == '1' else 's'} and "
            f"{_plural(self.backward_passes, 'backward pass', 'es')}, {self._checks()}, then "
            f"{readable_count(self.operations)} multiply-adds of contractions",
            f"{_plural(len(self.fallbacks), 'parameter', 's')} through the fallback",
        ]
        if self.directions >= 100:
            summary.append(
                f"{self.directions} outputs: outputs=fl.Probes(16) estimates their sum at a fraction of this"
            )
        return "\n".join([*rows, "", *summary])

    __repr__ = __str__

    def _checks(self) -> str:
        if not self.pieces:
            return "no checks (a sequence of torch's own layers)"
        return f"checked by {_plural(self.check_passes, 'forward pass', 'es')} over parts"


def _alike(parameters: Sequence[ParameterPlan]) -> list[list[ParameterPlan]]:
    """Parameters that differ in the numbers of their names alone: the layers of a stack."""
    groups: dict[tuple[object, ...], list[ParameterPlan]] = {}
    for p in parameters:
        key = (re.sub(r"\d+", "#", p.name), p.shape, p.uses, p.route, p.reason)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    """h.{0..11}.weight for h.0.weight to h.11.weight."""
    if len(names) == 1:
        return names[0]
    numbers = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    spans = iter(same[0] if len(set(same)) == 1 else f"{{{same[0]}..{same[-1]}}}" for same in numbers)
    return re.sub(r"\d+", lambda _: next(spans), names[0]) + f" ({len(names)})"


def _plural(count: int, thing: str, ending: str) -> str:
    return f"{count or 'no'} {thing}{'' if count == 1 else ending}"


def _chunks(samples: int, group: ParameterGroup) -> list[int]:
    """How many chunks each block of samples has."""
    starts = range(0, samples, group.block)
    return [-(-(min(start + group.block, samples) - start) // group.chunk) for start in starts]


def _counted(uses: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for use in uses:
        short = use.removesuffix("0").removesuffix("Backward")
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items()) or "-"


@dataclass(frozen=True)
class PlannedKernel:
    """A plan with what its first execution has found out."""

    plan: Plan
    proportional: frozenset[str] | None
    """Parameters for which one output direction stands for all, None where that was not looked for."""
