"""What a kernel will cost, and how every parameter will be read, before anything is paid."""

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from featlearn.audit.audit import AUDITED
from featlearn.audit.independence import part_sizes, piece_count
from featlearn.contraction.hardware import LITTLE
from featlearn.gradients.directions import OutputSelection
from featlearn.planning.memory import byte_budget, readable_bytes, readable_count, readable_seconds

if TYPE_CHECKING:
    from featlearn.measurement import Measurement
    from featlearn.planning.rank_costs import RankCosts


Rate = float | Tensor
"""One learning rate for a whole parameter, or one for each of its entries."""


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """Validated arguments of a kernel."""

    directions: OutputSelection
    by: str = "network"
    rates: Mapping[str, Rate] = field(default_factory=dict)
    """Learning rates of an optimizer, for the kernel of its update."""
    memory: str | int | None = None
    verify: bool = False

    @property
    def formed(self) -> frozenset[str]:
        """Parameters with a rate for every entry: their gradients must be formed."""
        return frozenset([name for name, rate in self.rates.items() if isinstance(rate, Tensor)])


class ProgressLine:
    """Count steps of known number and show the share and the time left, on a terminal, from the third second on.

    Lines inside of another one are not shown. `logged`: also write a line a minute where stderr is no terminal.
    """

    _shown_now: "ClassVar[ProgressLine | None]" = None

    def __init__(self, what: str, steps: int, *, logged: bool = False) -> None:
        self._what, self._steps, self._done = what, max(steps, 1), 0
        self._begun = self._printed = time.monotonic()
        self._visible, self._logged = False, logged
        if ProgressLine._shown_now is None:
            ProgressLine._shown_now = self

    def advance(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self._done += steps
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        pause = 0.5 if is_terminal else 60.0 if self._logged else math.inf
        if now - self._begun < 3.0 or now - self._printed < pause or ProgressLine._shown_now is not self:
            return
        self._printed, self._visible = now, is_terminal
        share = min(self._done / self._steps, 1.0)
        left = readable_seconds((now - self._begun) * (1.0 / share - 1.0))
        begin, end = ("\r", " ") if is_terminal else ("", "\n")
        print(f"{begin}{self._what} {share:4.0%}, about {left} left", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if ProgressLine._shown_now is self:
            ProgressLine._shown_now = None
        if self._visible:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def sample_blocks(samples: int, size: int) -> list[slice]:
    """Return samples in blocks of this size."""
    return [slice(begin, min(begin + size, samples)) for begin in range(0, samples, size)]


def counted(what: str, samples: int, size: int) -> Iterator[slice]:
    """Yield samples in blocks of this size, with a progress line."""
    blocks = sample_blocks(samples, size)
    with ProgressLine(what, len(blocks)) as progress:
        for block in blocks:
            yield block
            progress.advance()


VERIFIED = 64
"""Samples whose rows are verified together, at most."""


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """How one parameter will be read and contracted."""

    name: str
    shape: tuple[int, ...]
    uses: tuple[str, ...]
    """Autograd nodes that use it, one entry per use."""
    route: str
    """`pairs`, `gradients` (formed slice by slice), `direct`, `pulled back`, `fallback` or `unused`."""
    reason: str
    """Why this route; for a fallback, what could not be read."""
    operations: float
    """Multiply-adds of the contraction."""
    kept: int
    """Bytes kept per sample."""
    passing: int
    """Bytes per sample while a chunk is captured."""
    form_early: bool
    """Whether per-sample gradients are formed as soon as they are captured, because they are smaller that way."""
    factors: int = 0
    """Numbers per sample of the factors that its gradients are made of, all directions together; 0 where gradients come
    formed."""
    positions: int = 0
    """Positions that share the parameter."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters captured together: `block` samples are held at a time, `directions` output directions."""

    names: tuple[str, ...]
    block: int
    directions: int
    chunk: int
    """Samples in one forward pass."""


class _Run(NamedTuple):
    """A chunk of samples that is captured."""

    samples: int
    times: int
    """How often it is run."""
    blocks: int
    """Blocks of output directions."""
    has_fallback: bool
    """Whether a parameter takes the fallback, which runs every sample by itself."""


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan:
    """What `fl.ntk` would do with the same arguments; `str()` is a table."""

    parameters: tuple[ParameterPlan, ...]
    groups: tuple[ParameterGroup, ...]
    samples: tuple[int, int]
    symmetric: bool
    """Whether it is the kernel of one batch with itself."""
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
    """About how many bytes will be held at most: the kernel, copies of weights, and what it is made from."""
    launch_bytes: int = 0
    """Bytes of one sample's activations on a GPU, 0 on a CPU: small batches are run in fewer parts there."""
    proved_by: frozenset[int] = frozenset()
    """How many samples were run whose ops prove that they do not influence each other. Other numbers of samples are
    compared with them call by call; as many are run again in parts, as all are where nothing is proved."""
    confirmed: bool = False
    """Whether a backward pass more per chunk and block of directions confirms which sample each gradient belongs to;
    most ops say it by themselves."""
    verified: bool = False
    """Whether backward passes of their own verify the kernel."""
    gathered_bytes: int | None = None
    """Bytes of weights that are gathered at most at a time, where they stay sharded; None where all are held."""
    rank_costs: "RankCosts | None" = None
    """What it would cost on several devices, where that was asked for."""

    @property
    def fallbacks(self) -> dict[str, str]:
        """Parameters that go through the exact fallback, with the reason."""
        return {p.name: p.reason for p in self.parameters if p.route == "fallback"}

    @property
    def operations(self) -> float:
        """Multiply-adds of all contractions."""
        return sum(p.operations for p in self.parameters)

    def blocks(self, group: ParameterGroup) -> Iterator[tuple[slice, list[slice]]]:
        """Yield blocks of rows, and the blocks of columns that are captured anew for each.

        Of a symmetric kernel these are the blocks before it; the gradients of its own rows serve the diagonal.
        """
        rows, columns = (sample_blocks(count, group.block) for count in self.samples)
        for block in rows:
            yield block, [other for other in columns if not self.symmetric or other.start < block.start]

    @cached_property
    def _runs(self) -> "list[_Run]":
        """All chunks of samples that are captured, for all blocks of output directions together."""
        runs, lost = [], set(self.fallbacks)
        for group in self.groups:
            blocks = -(-self.directions // group.directions)
            # A chunk that holds all samples serves all blocks of directions.
            times = 1 if self.symmetric and group.chunk >= self.samples[0] else blocks
            for rows, columns in self.blocks(group):
                for block in (rows, *columns):
                    for chunk in sample_blocks(block.stop - block.start, group.chunk):
                        runs.append(_Run(chunk.stop - chunk.start, times, blocks, bool(lost & set(group.names))))
        return runs

    @property
    def passes(self) -> int:
        """Forward passes over whole chunks of samples; a block of samples is captured anew for every pair of blocks."""
        return sum(run.times for run in self._runs)

    @property
    def check_passes(self) -> int:
        """Forward passes over parts of chunks: every chunk once more in all its parts together, unless its ops are
        proof."""
        return sum(run.times * len(self._parts(run.samples)) for run in self._runs)

    @property
    def backward_passes(self) -> int:
        """Backward passes over chunks of samples: one for each output direction, and those that confirm them.

        A GPU makes those of all directions in one.
        """
        return sum(self.directions + run.blocks * self.confirmed for run in self._runs)

    @property
    def sample_passes(self) -> int:
        """Forward passes of single samples for the fallback, each followed by a backward pass per direction.

        One backward pass more per chunk checks their sum.
        """
        return sum(run.samples * run.blocks * run.has_fallback for run in self._runs)

    @property
    def forward_runs(self) -> float:
        """How often a sample runs through a forward pass, with checks, copies of single samples and the fallback."""
        total = self.sample_passes
        for count in self.samples if self.verified else ():
            sizes = (block.stop - block.start for block in sample_blocks(count, self.verified_together))
            total += self._verifications * sum(max(size, 2) for size in sizes)
        for count in self.samples[: 1 if self.symmetric else 2] if self.verified else ():
            total += max(2, min(AUDITED, count))  # which tell the precision
        total += sum(run.times * (max(run.samples, 2) + sum(self._parts(run.samples))) for run in self._runs)
        return total / self._distinct_samples

    @property
    def backward_runs(self) -> float:
        """The same for backward passes, of which there is one for each output direction."""
        total = self._verifications * (self.samples[0] + 2 * self.samples[1])
        for run in self._runs:
            times = self.directions + run.blocks * (self.confirmed + run.has_fallback)
            total += max(run.samples, 2) * times + run.samples * self.directions * run.has_fallback
        return total / self._distinct_samples

    @property
    def verified_together(self) -> int:
        """Samples whose rows are verified together: rounding grows with them, the effect of one wrong row does not."""
        least = min((group.chunk for group in self.groups), default=1)
        return min(VERIFIED, 1 << (least.bit_length() - 1))

    @property
    def _distinct_samples(self) -> int:
        return self.samples[0] if self.symmetric else sum(self.samples)

    @property
    def _verifications(self) -> int:
        """Output directions that are verified one by one; all at once where pairs of them count."""
        return 0 if not self.verified else 1 if len(self.kernel_shape) == 4 else self.directions

    def _parts(self, samples: int) -> Sequence[int]:
        """Return the sizes of the parts in which a chunk is run again; none if its ops are proof."""
        if self.proved_by and max(samples, 2) not in self.proved_by:
            return ()
        return part_sizes(samples, piece_count(samples, self.launch_bytes))

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "route", "multiply-adds", "bytes/sample", "why")
        lines = [
            (
                common_name([p.name for p in same]),
                " x ".join(map(str, same[0].shape)) or "scalar",
                _counted(same[0].uses),
                same[0].route,
                readable_count(sum(p.operations for p in same)),
                readable_bytes(sum(p.kept for p in same)),
                same[0].reason,
            )
            for same in alike(self.parameters)
        ]
        chunks = sorted({group.chunk for group in self.groups})
        shape = " x ".join(map(str, self.kernel_shape))
        held = f"{chunks[0]}" if len(chunks) == 1 else f"{chunks[0]} to {chunks[-1]}" if chunks else "no"
        summary = [
            f"{self.samples[0]} x {self.samples[1]} samples -> kernel {shape} ({readable_bytes(self.kernel_bytes)}), "
            f"about {readable_bytes(self.peak)} at most, budget {readable_bytes(self.memory)}",
            f"{plural(self.passes, 'forward pass', 'es')} of {held} sample{'' if held == '1' else 's'} and "
            f"{plural(self.backward_passes, 'backward pass', 'es')}, {self._checks()}, then "
            f"{readable_count(self.operations)} multiply-adds of contractions",
            f"each sample runs {times(self.forward_runs)} forward and {times(self.backward_runs)} backward",
            f"{plural(len(self.fallbacks), 'parameter', 's')} through the fallback"
            + (f", {plural(self.sample_passes, 'forward pass', 'es')} of single samples" if self.fallbacks else ""),
        ]
        if self.gathered_bytes is not None:
            summary.append(
                f"weights stay sharded, at most {readable_bytes(self.gathered_bytes)} of them are gathered at a time"
            )
        if self.directions >= 100:
            summary.append(
                f"{self.directions} outputs: outputs=fl.Directions(16) estimates their sum at a fraction of this"
            )
        if self.rank_costs is not None:
            summary.append(str(self.rank_costs))
        return "\n".join([*text_table(head, lines), "", *summary])

    __repr__ = __str__

    def _checks(self) -> str:
        passes = self.check_passes
        return f"checked by {plural(passes, 'forward pass', 'es')} over parts" if passes else "checked by its ops"


class Planned(Protocol):
    """A parameter in a plan."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def uses(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def route(self) -> str: ...  # noqa: D102
    @property
    def reason(self) -> str: ...  # noqa: D102


AnyPlanned = TypeVar("AnyPlanned", bound=Planned)


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a rule below its head."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]
    rows.insert(1, "  ".join("-" * width for width in widths))
    return rows


def alike(parameters: Sequence[AnyPlanned]) -> list[list[AnyPlanned]]:
    """Parameters that differ in the numbers of their names alone: the layers of a stack."""
    groups: dict[tuple[object, ...], list[AnyPlanned]] = {}
    for p in parameters:
        key = (re.sub(r"\d+", "#", p.name), p.shape, p.uses, p.route, p.reason)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """h.{0..11}.weight for h.0.weight to h.11.weight."""
    if len(names) == 1:
        return names[0]
    numbers = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    spans = iter(same[0] if len(set(same)) == 1 else f"{{{same[0]}..{same[-1]}}}" for same in numbers)
    return re.sub(r"\d+", lambda _: next(spans), names[0]) + f" ({len(names)})"


def plural(count: int, thing: str, ending: str) -> str:
    """A number with its noun."""
    return f"{count or 'no'} {thing}{'' if count == 1 else ending}"


def times(count: float) -> str:
    """How often, in words: once, twice, 3.5 times."""
    return {1.0: "once", 2.0: "twice"}.get(count, f"{count:.3g} times")


def _counted(uses: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for use in uses:
        short = use.removesuffix("0").removesuffix("Backward")
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items()) or "-"


def plan_key(measurement: "Measurement", call: KernelCall) -> object:
    """Return the cache key of a plan: kernels with equal keys are measured in the same way."""
    kinds = tuple([(batch.kind, batch.samples) for batch in measurement.batches])
    directions = call.directions
    asked = (directions.mode, directions.count, directions.classes, call.by, str(call.memory), call.verify)
    return (kinds, measurement.weight_kind, measurement.gathered_bytes, call.formed if call.rates else None, asked)


def still_fits(plan: Plan, memory: str | int | None, device: torch.device) -> bool:
    """Return whether there is about as much memory as when the plan was made; not asked where it needs little."""
    if memory is not None or plan.peak < LITTLE:
        return True
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] // 2 >= 0.9 * plan.memory:
        return True
    return byte_budget(memory, device) >= 0.9 * plan.memory


@dataclass(frozen=True)
class PlannedKernel:
    """A plan with what its first execution has found out."""

    plan: Plan
    proportional: frozenset[str] | None
    """Parameters for which one output direction stands for all, None where that was not looked for."""
