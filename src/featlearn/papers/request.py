"""From an id to its result: run what is missing, draw, judge, write."""

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featlearn.errors import InputTypeError, InputValueError
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.drawing import STYLE, save
from featlearn.papers.execution import cache_folder, execute, finished, stood_in
from featlearn.papers.page import figure_page
from featlearn.papers.registry import declaration, load
from featlearn.papers.reproduction import Reproduction, Size
from featlearn.papers.results import Result, kept, versions, write
from featlearn.papers.runs import Runs
from featlearn.papers.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    id: str
    scale: Scale
    out: Path
    seeds: int | None = None
    """None for as many as the scale has"""
    jobs: int | None = None
    """None for one a core, on a GPU for one"""
    device: str | None = None
    data_root: Path | None = None
    fallback_digits: bool = False
    fresh: bool = False
    """run seeds again that are there"""
    quiet: bool = True


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What an request will cost."""

    id: str
    scale: Scale
    device: str
    seeds: int
    finished: int
    """seeds that are already there"""
    jobs: int
    seconds: float | None
    """None where the time of a seed is known for another kind of device only"""
    mebibytes: float
    measured: bool
    """whether the time is that of the result kept at this scale; else what its author expects"""
    seed_seconds: float
    timed_on: str
    """the kind of device that `seed_seconds` are of"""


TORCH = 400
"""MiB of a process that has done nothing but load torch"""


def estimate(request: Request) -> CostEstimate:
    """Time and memory, before anything is run."""
    reproduction, size, context, seeds, jobs = _resolved(request)
    there = [] if request.fresh else finished(cache_folder(reproduction, size.setup, context, _cache(request)), seeds)
    before, kind = kept(reproduction.id), context.device.split(":")[0]
    measured = before is not None and before.scale is request.scale and before.meta["device"].split(":")[0] == kind
    seconds = max(before.meta["seconds"]) if before is not None and measured else size.seconds
    timed_on = kind if measured else size.device
    missing = len(seeds) - len(there)
    return CostEstimate(
        id=reproduction.id, scale=request.scale, device=context.device, seeds=len(seeds), finished=len(there),
        jobs=jobs, seconds=seconds * math.ceil(missing / jobs) if timed_on == kind or not missing else None,
        mebibytes=(TORCH + size.mebibytes) * min(jobs, max(1, missing)), measured=measured, seed_seconds=seconds,
        timed_on=timed_on,
    )  # fmt: skip


def reproduce(request: Request) -> Result:
    """Run the figure and write its files to `request.out`."""
    reproduction, size, context, seeds, jobs = _resolved(request)
    folder = cache_folder(reproduction, size.setup, context, _cache(request))
    if request.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    runs = execute(reproduction, size.setup, context, seeds=seeds, jobs=jobs, cache=_cache(request))
    claims = _claims(reproduction, size.setup, runs)
    request.out.mkdir(parents=True, exist_ok=True)
    # files of two results must not lie side by side: they are moved to their place when all are there
    with TemporaryDirectory(prefix=".draft-", dir=request.out) as place:
        draft = Path(place)
        result = write(
            draft, declaration(request.id), request.scale, claims, seeds=seeds, about=reproduction.about,
            setup=asdict(size.setup), device=context.device, seconds=[round(s, 2) for s in runs.seconds],
            versions=runs.versions or versions(),
            notes=[f"digits stand in for {name}, whose files were missing" for name in stood_in(folder)],
        )  # fmt: skip
        _draw(reproduction, size.setup, runs, draft)
        (draft / "page.html").write_text(figure_page(result), encoding="utf-8")
        for file in draft.iterdir():
            file.replace(request.out / file.name)
    return replace(result, folder=request.out)


def _claims(reproduction: Reproduction[Any], setup: Any, runs: Runs) -> list[Claim]:
    given = reproduction.claims(setup, runs)
    claims = list(given) if isinstance(given, Iterable) else [given]
    for claim in claims:
        if not isinstance(claim, Claim):
            raise InputTypeError(f"claims of {reproduction.id} gave a {type(claim).__name__}, expected only Claims")
    return claims


def _draw(reproduction: Reproduction[Any], setup: Any, runs: Runs, folder: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = reproduction.plot(setup, runs)
        if not isinstance(figure, Figure):
            raise InputTypeError(
                f"plot of {reproduction.id} returned {type(figure).__name__}, expected a matplotlib Figure: return it"
            )
        save(figure, folder)


def _resolved(request: Request) -> tuple[Reproduction[Any], Size[Any], Context, Sequence[int], int]:
    reproduction = load(request.id)
    size = reproduction.size(request.scale)
    for name, value in (("seeds", request.seeds), ("jobs", request.jobs)):
        if value is not None and value < 1:
            raise InputValueError(f"{name} is {value}, expected at least 1")
    seeds = range(request.seeds or size.seeds)
    device = request.device or _device(size.device)
    jobs = request.jobs or (1 if device != "cpu" else min(len(seeds), _cores()))
    context = Context(
        seed=0, folder=request.out, device=device, data_root=request.data_root, fallback_digits=request.fallback_digits,
        quiet=request.quiet,
    )  # fmt: skip
    return reproduction, size, context, seeds, jobs


def _device(wanted: str) -> str:
    """The device that a size is meant for, where there is one."""
    if wanted == "cpu":
        return wanted
    import torch

    return wanted if torch.cuda.is_available() else "cpu"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache(request: Request) -> Path:
    return request.out / "seeds"
