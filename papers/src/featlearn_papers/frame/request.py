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
from featlearn.sweeps.executors import Executor
from featlearn.sweeps.process_pool import available_cores
from featlearn_papers.frame.claims import Claim, counted
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import STYLE, save
from featlearn_papers.frame.execution import (
    Task,
    cache_folder,
    execute,
    finished,
    missing_seeds,
    refuse_failures,
    run_apart,
    stood_in,
)
from featlearn_papers.frame.experiment import AnyExperiment, Size
from featlearn_papers.frame.page import figure_page
from featlearn_papers.frame.registry import declaration, load
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.results import Result, kept, versions, write
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    id: str
    scale: Scale
    out: Path
    cache: Path | None = None
    """Where experiments keep their seeds; figures that share one must have the same. None for a folder inside `out`."""
    seeds: Sequence[int] | None = None
    """None for as many as the scale has, from 0 on"""
    jobs: int | None = None
    """None for one a core, on a GPU for one"""
    device: str | None = None
    data_root: Path | None = None
    fallback_digits: bool = False
    fresh: bool = False
    """run seeds again that are there"""
    quiet: bool = True


@dataclass(frozen=True, kw_only=True)
class Part:
    """One experiment of a request, with all that its run needs."""

    name: str
    experiment: AnyExperiment
    size: Size[Any]
    context: Context
    seeds: Sequence[int]
    jobs: int
    cache: Path

    @property
    def folder(self) -> Path:
        """Where its seeds are."""
        return cache_folder(self.experiment, self.size.setup, self.context, self.cache)

    @property
    def missing(self) -> list[Task]:
        """Seeds that are not there yet."""
        return missing_seeds(self.experiment, self.size.setup, self.context, seeds=self.seeds, cache=self.cache)

    def run(self) -> Runs:
        """The numbers of all seeds."""
        return execute(
            self.experiment, self.size.setup, self.context, seeds=self.seeds, jobs=self.jobs, cache=self.cache
        )


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What a request will cost; sums over the experiments of the figure."""

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
    """whether the times are those of the result kept at this scale; else what their author expects"""
    seed_seconds: float
    timed_on: str
    """the kind of device that `seed_seconds` are of"""


TORCH = 400
"""MiB of a process that has done nothing but load torch"""


def estimate(request: Request) -> CostEstimate:
    """Time and memory, before anything is run."""
    each = [_estimate(request, part) for part in _resolved(request)]
    seconds = [one.seconds for one in each]
    return replace(
        each[0],
        seeds=sum(one.seeds for one in each),
        finished=sum(one.finished for one in each),
        jobs=max(one.jobs for one in each),
        seconds=None if None in seconds else sum(one for one in seconds if one is not None),
        mebibytes=max(one.mebibytes for one in each),
        measured=all(one.measured for one in each),
        seed_seconds=sum(one.seed_seconds for one in each),
    )


def _estimate(request: Request, part: Part) -> CostEstimate:
    there = [] if request.fresh else finished(part.folder, part.seeds)
    kind = part.context.device.split(":")[0]
    measured = _measured_seconds(request, part, kind)
    seconds = part.size.seconds if measured is None else measured
    timed_on = part.size.device if measured is None else kind
    missing = len(part.seeds) - len(there)
    return CostEstimate(
        id=request.id,
        scale=request.scale,
        device=part.context.device,
        seeds=len(part.seeds),
        finished=len(there),
        jobs=part.jobs,
        seconds=seconds * math.ceil(missing / part.jobs) if timed_on == kind or not missing else None,
        mebibytes=(TORCH + part.size.mebibytes) * min(part.jobs, max(1, missing)),
        measured=measured is not None,
        seed_seconds=seconds,
        timed_on=timed_on,
    )


def _measured_seconds(request: Request, part: Part, kind: str) -> float | None:
    """Of the slowest seed in the result that is kept, if it is of this scale and kind of device."""
    before = kept(request.id)
    if before is None or before.scale is not request.scale or before.meta["device"].split(":")[0] != kind:
        return None
    found = [one["seconds"] for one in before.meta["experiments"] if one["id"] == part.experiment.id]
    return float(max(found[0])) if found else None


def run_seeds(requests: Sequence[Request], executor: Executor) -> dict[str, dict[Path, Exception]]:
    """Run what is missing for all requests at a time, wherever the executor puts it: any with `submit` of functions.

    Gives the failures of each request by its id; without any, `reproduce` finds all numbers there.
    """
    of_request: dict[str, list[Path]] = {}
    tasks: dict[Path, Task] = {}
    for request in requests:
        found = [task for part in _resolved(_elsewhere(request)) for task in part.missing]
        of_request[request.id] = [task[3] for task in found]
        tasks |= {task[3]: task for task in found}  # figures that share an experiment run it once
    failures = run_apart(list(tasks.values()), executor)
    return {id: {place: failures[place] for place in places if place in failures} for id, places in of_request.items()}


def _elsewhere(request: Request) -> Request:
    """The same with paths that do not depend on the folder, or the environment, that a job runs in."""
    root = request.data_root or os.environ.get("FEATLEARN_DATA")
    return replace(
        request,
        out=request.out.resolve(),
        cache=_cache(request).resolve(),
        data_root=None if root is None else Path(root).expanduser().resolve(),
    )


def reproduce(request: Request, executor: Executor | None = None) -> Result:
    """Run the figure and write its files to `request.out`; with an executor its seeds run there."""
    if request.fresh:
        refresh([request])
    if executor is not None:
        refuse_failures(run_seeds([request], executor)[request.id], sum(len(part.seeds) for part in _resolved(request)))
    reproduction, parts = load(request.id), _resolved(request)
    runs = {part.name: part.run() for part in parts}
    claims = _claims(reproduction, parts, runs)
    request.out.mkdir(parents=True, exist_ok=True)
    # files of two results must not lie side by side: they are moved to their place when all are there
    with TemporaryDirectory(prefix=".draft-", dir=request.out) as place:
        draft = Path(place)
        result = write(
            draft,
            declaration(request.id),
            request.scale,
            claims,
            seeds=_longest(parts),
            enough=not _lacking(request, parts),
            about=reproduction.about,
            setup=reproduction.given({p.name: asdict(p.size.setup) for p in parts}),
            device=parts[0].context.device,
            seconds=[s for one in parts for s in _seconds(runs[one.name])],
            versions=_versions(runs),
            notes=_notes(request, parts),
            experiments=[_experiment(part, runs[part.name]) for part in parts],
        )
        _draw(reproduction, parts, runs, draft)
        (draft / "page.html").write_text(figure_page(result), encoding="utf-8")
        for file in draft.iterdir():
            file.replace(request.out / file.name)
    return replace(result, folder=request.out)


def refresh(requests: Iterable[Request]) -> None:
    """Forget the seeds of all experiments that are asked for."""
    for folder in {part.folder for request in requests for part in _resolved(request)}:
        shutil.rmtree(folder, ignore_errors=True)


def _experiment(part: Part, runs: Runs) -> dict[str, Any]:
    """What the result says of an experiment."""
    return {
        "id": part.experiment.id,
        "name": part.name,
        "key": part.folder.name,
        "seeds": list(part.seeds),
        "seconds": _seconds(runs),
    }


def _seconds(runs: Runs) -> list[float]:
    return [round(s, 2) for s in runs.seconds]


def _longest(parts: Sequence[Part]) -> list[int]:
    return max((list(part.seeds) for part in parts), key=len)


def _lacking(request: Request, parts: Sequence[Part]) -> list[Part]:
    """Those with fewer seeds than a verdict needs."""
    return [part for part in parts if len(part.seeds) < part.experiment.least_seeds(request.scale)]


def _notes(request: Request, parts: Sequence[Part]) -> list[str]:
    names = dict.fromkeys(name for part in parts for name in stood_in(part.folder))
    notes = [f"digits stand in for {name}, whose files were missing" for name in names]
    if lacking := _lacking(request, parts):
        needed = max(part.experiment.least_seeds(request.scale) for part in lacking)
        notes.append(
            f"{counted(min(len(part.seeds) for part in lacking), 'seed')} where a verdict needs {needed}: claims about "
            "chance are undecided"
        )
    return notes


def _versions(runs: dict[str, Runs]) -> dict[str, str]:
    """Of all experiments; several, divided by commas, where they differ."""
    each = [one.versions or versions() for one in runs.values()]
    names = dict.fromkeys(name for one in each for name in one)
    return {name: ", ".join(dict.fromkeys(one[name] for one in each if name in one)) for name in names}


def _claims(reproduction: Reproduction, parts: Sequence[Part], runs: dict[str, Runs]) -> list[Claim]:
    setups = reproduction.given({part.name: part.size.setup for part in parts})
    given = reproduction.claims(setups, reproduction.given(runs))
    claims = list(given) if isinstance(given, Iterable) else [given]
    for claim in claims:
        if not isinstance(claim, Claim):
            raise InputTypeError(f"claims of {reproduction.id} gave a {type(claim).__name__}, expected only Claims")
    return claims


def _draw(reproduction: Reproduction, parts: Sequence[Part], runs: dict[str, Runs], folder: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    setups = reproduction.given({part.name: part.size.setup for part in parts})
    with matplotlib.rc_context(STYLE):
        figure = reproduction.plot(setups, reproduction.given(runs))
        if not isinstance(figure, Figure):
            raise InputTypeError(
                f"plot of {reproduction.id} returned {type(figure).__name__}, expected a matplotlib Figure: return it"
            )
        save(figure, folder)


def _resolved(request: Request) -> list[Part]:
    if request.jobs is not None and request.jobs < 1:
        raise InputValueError(f"jobs is {request.jobs}, expected at least 1")
    if request.seeds is not None and (not request.seeds or len(set(request.seeds)) != len(request.seeds)):
        raise InputValueError(f"seeds is {list(request.seeds)}, expected at least one, and each once")
    return [_part(request, name, one) for name, one in load(request.id).experiments.items()]


def _part(request: Request, name: str, experiment: AnyExperiment) -> Part:
    size = experiment.size(request.scale)
    seeds = [0] if not experiment.random else list(request.seeds or range(size.seeds))
    device = request.device or _device(size.device)
    context = Context(
        seed=0,
        folder=request.out,
        device=device,
        data_root=request.data_root,
        fallback_digits=request.fallback_digits,
        quiet=request.quiet,
    )
    return Part(
        name=name,
        experiment=experiment,
        size=size,
        context=context,
        seeds=seeds,
        cache=_cache(request),
        jobs=request.jobs or (1 if device != "cpu" else min(len(seeds), available_cores())),
    )


def _device(wanted: str) -> str:
    """The device that a size is meant for, where there is one."""
    if wanted == "cpu":
        return wanted
    import torch

    return wanted if torch.cuda.is_available() else "cpu"


def _cache(request: Request) -> Path:
    return request.cache or request.out / "experiments"
