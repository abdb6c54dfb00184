"""`featlearn reproduce`: figures of the papers and their claims."""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from featlearn.cli.answer import DONE, FAILED, Answer, UsageError, number, table
from featlearn.cli.engine import check_engine, open_executor
from featlearn.cli.seeds import seeds_in
from featlearn.errors import FeatlearnError, InputValueError
from featlearn_papers.frame import registry
from featlearn_papers.frame.claims import KINDS, counted, failed, share, verdict
from featlearn_papers.frame.results import Result, keep, kept
from featlearn_papers.frame.scale import Scale

if TYPE_CHECKING:
    from featlearn.sweeps.executors import Executor
    from featlearn_papers.frame.request import CostEstimate, Request

Flag = Annotated[bool, Parameter(negative=())]


def reproduce(
    *figures: str,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    scale: Scale = Scale.SMOKE,
    seeds: str | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    slurm: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    cache: Path | None = None,
    data_root: Path | None = None,
    fallback_digits: Flag = False,
    fresh: Flag = False,
    dry_run: Flag = False,
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
    gallery: Flag = False,
    keep_result: Annotated[bool, Parameter(name="--keep", negative=())] = False,
    quiet: Flag = False,
    json: Flag = False,
    debug: Flag = False,
) -> Answer:
    """Repeat figures of the five papers, and say which of their claims hold.

    Writes figure.png, figure.pdf, numbers.csv (what is drawn), claims.json and
    page.html. A claim holds if the 90 % interval of its mean over seeds lies in
    its band, and depends if another choice that was run fails. Exit status 1 if
    a claim does not hold that no derivation shows to be wrong in print. Figures
    that show the same runs share them, and seeds that are finished are kept:
    after an interruption run the same again.

    For example:

        featlearn reproduce --list
        featlearn reproduce 002/figC2
        featlearn reproduce 002/figC2 --scale laptop --dry-run
        featlearn reproduce 000/fig2 --scale laptop --data-root data
        featlearn reproduce 002/figC2 --scale laptop --seeds 101-103
        featlearn reproduce --all
        featlearn reproduce --all --slurm partition=gpu,gpus_per_node=1,timeout_min=60
        featlearn reproduce --gallery --out gallery.html

    Args:
        figures: PAPER/FIGURE, as --list shows them.
        all_: all figures that are written.
        scale: smoke runs seconds and needs no data files; laptop minutes, on real data; paper has the paper's size.
        seeds: how many, from 0 on, or which, as in 101-103 or 3,5,8; by default as many as the scale has.
        jobs: seeds that run at a time, each on one core; by default one a core, on a GPU one.
        dask: in place of --jobs, a dask scheduler that runs the seeds, as tcp://host:8786, or local.
        slurm: in place of --jobs, settings of Slurm jobs, as partition=gpu,timeout_min=60; all nodes must see the
            folders.
        device: cpu or cuda; by default what the scale is meant for, where there is one.
        out: folder of the result, by default reproductions/PAPER/FIGURE/SCALE; of several figures the folder in place
            of reproductions; file of the gallery.
        cache: where experiments keep their seeds, for all figures that share them; by default experiments, in
            reproductions or --out.
        data_root: folder of the data files, by default FEATLEARN_DATA.
        fallback_digits: let the embedded digits stand in for a data set whose files are missing.
        fresh: run all seeds again, also finished ones.
        dry_run: say time and memory, and run nothing.
        list_: all figures, with what is known of them.
        gallery: one web page of all results that came with the package.
        keep_result: put the result among those that come with the package (from a source checkout).
        quiet: no progress on stderr.
        json: print one JSON document.
        debug: show where an error came from.
    """
    if list_:
        return _listed()
    if gallery:
        return _gallery(out or Path("gallery.html"))
    chosen = _chosen(figures, all_)
    from featlearn.cli.device import checked_device
    from featlearn_papers.frame.request import Request, estimate

    _check_jobs(jobs)
    check_engine(jobs, dask, slurm)
    if device is not None and dask is None and slurm is None:  # other machines may have it
        checked_device(device)
    base = out or Path("reproductions")
    chosen_seeds = None if seeds is None else seeds_in(seeds)
    alone = out is not None and len(chosen) == 1 and not all_
    requests = [
        Request(
            id=one.id,
            scale=scale,
            out=base if alone else base / one.id / str(scale),
            seeds=chosen_seeds,
            jobs=jobs,
            cache=cache or base / "experiments",
            device=device,
            data_root=data_root,
            fallback_digits=fallback_digits,
            fresh=fresh,
            quiet=quiet,
        )
        for one in chosen
    ]
    if dry_run:
        return _several([_estimated(estimate(request)) for request in requests])
    with open_executor(dask, slurm, base / "jobs") as executor:
        return _several(_judged(requests, executor, keep_result=keep_result))


def _chosen(figures: tuple[str, ...], every: bool) -> list[registry.Declaration]:
    if every:
        return [one for one in registry.DECLARATIONS if one.written]
    if not figures:
        first = registry.DECLARATIONS[0].id
        raise UsageError(f"which figure? pass PAPER/FIGURE, as in {first}, or --all; --list shows all")
    return [_declared(figure) for figure in figures]


def _judged(requests: "list[Request]", executor: "Executor | None", *, keep_result: bool) -> list[Answer]:
    """One answer for each figure; where there are several, an error of one does not stop the others."""
    from featlearn_papers.frame.execution import refuse_failures
    from featlearn_papers.frame.request import estimate, refresh, run_seeds

    if requests[0].fresh:  # once: figures that share an experiment must not each run it again
        refresh(requests)
    answers = []
    failures = {} if executor is None else run_seeds(requests, executor)
    for request in requests:
        try:
            before = estimate(request)
            refuse_failures(failures.get(request.id, {}), before.seeds)
            if not request.quiet:
                print(_cost(before), file=sys.stderr, flush=True)
            answers.append(_result(replace(request, fresh=False), keep_result=keep_result))
        except FeatlearnError as error:
            if len(requests) == 1:
                raise
            print(f"featlearn: {request.id}: {error}", file=sys.stderr, flush=True)
            answers.append(
                Answer(data={"id": request.id, "error": str(error)}, text=f"{request.id}: {error}", code=FAILED)
            )
    return answers


def _result(request: "Request", *, keep_result: bool) -> Answer:
    from featlearn_papers.frame.request import reproduce as run

    try:
        result = run(request)
    except InputValueError as error:
        if (words := _of_the_command(str(error), request.data_root)) == str(error):
            raise
        raise InputValueError(words) from error
    if keep_result:
        keep(request.out)
    return _assessment(result)


def _several(answers: list[Answer]) -> Answer:
    """One as it is; of several the worst exit status."""
    if len(answers) == 1:
        return answers[0]
    text = "\n\n".join(one.text for one in answers)
    return Answer(data=[one.data for one in answers], text=text, code=max(one.code for one in answers))


def _declared(figure: str) -> registry.Declaration:
    try:
        return registry.declaration(figure)
    except InputValueError as error:
        raise UsageError(str(error)) from error


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs is {jobs}, expected at least 1")


def _of_the_command(message: str, data_root: Path | None) -> str:
    """What a reader of data files says of its argument `root`, said of the option that it came from."""
    source = "--data-root" if data_root is not None else "FEATLEARN_DATA"
    message = re.sub("^root is None and", "there is no --data-root, and", message)
    return re.sub("^root is ", f"{source} is ", message).replace("root=...", "--data-root")


def _listed() -> Answer:
    rows, data = [], []
    for one in registry.DECLARATIONS:
        result = kept(one.id)
        state = _state(one, result)
        found = {} if result is None else result.counts
        rows.append([one.id, one.title, state, *(str(found.get(name, "")) for name in KINDS)])
        claims = None if result is None else result.claims
        data.append(
            {"id": one.id, "title": one.title, "written": one.written, "state": state, "claims": claims, **found}
        )
    total = [sum(int(row[i]) for row in rows if row[i]) for i in range(3, 3 + len(KINDS))]
    rows.append(["", "all", "", *map(str, total)])
    return Answer(data=data, text=_columns(["figure", "", "scale", *KINDS], rows))


def _columns(heads: list[str], rows: list[list[str]]) -> str:
    """A text table with three columns of words, and numbers."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _state(one: registry.Declaration, result: Result | None) -> str:
    if result is not None:
        return str(result.scale)
    return "not run yet" if one.written else "not written yet"


def _gallery(path: Path) -> Answer:
    from featlearn_papers.frame.page import gallery

    results = {one.id: result for one in registry.DECLARATIONS if (result := kept(one.id)) is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(gallery(registry.DECLARATIONS, results), encoding="utf-8")
    return Answer(data={"gallery": path, "figures": list(results)}, text=f"{path}: {len(results)} figures")


def _estimated(cost: "CostEstimate") -> Answer:
    return Answer(data=asdict(cost), text=_cost(cost))


def _cost(cost: "CostEstimate") -> str:
    source = "as measured before" if cost.measured else "as expected"
    there = f", {cost.finished} of them there already" if cost.finished else ""
    if cost.seconds is None:
        time = f"made for {cost.timed_on}, where a seed takes {_minutes(cost.seed_seconds)}: how long here is not known"
    else:
        time = f"about {_minutes(cost.seconds)} ({source})"
    return (
        f"{cost.id} at scale {cost.scale}: {counted(cost.seeds, 'seed')}{there}, {cost.jobs} at a time on "
        f"{cost.device}; {time}, and {cost.mebibytes / 1024:.1f} GiB"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _assessment(result: Result) -> Answer:
    rows, wrong = [], failed(result.claims)
    for claim in result.claims:
        details = result.meta["claims"][claim["id"]]
        ours, spread = share(claim, details["values"]), ""
        if ours is None:
            ours = _short(claim["measured"])
            spread = "" if details["spread"] is None else f"± {details['spread']:.1g}"
        words = verdict(claim).upper() if claim in wrong else verdict(claim)
        words = f"check {words}" if claim["check"] else words
        rows.append([claim["id"], _short(claim["paper"]), ours, spread, claim["band_from"], words])
    rows.sort(key=lambda row: row[-1].startswith("check "))  # checks apart, at the end
    lines = [
        table(["claim", "paper", "ours", "spread", "band from", ""], rows),
        *result.meta["notes"],
        f"{result.meta['id']}: {result.summary}; {result.folder / 'page.html'}",
    ]
    data = {"folder": result.folder, "scale": str(result.scale), "claims": result.claims, "meta": result.meta}
    return Answer(data=data, text="\n".join(lines), code=FAILED if wrong else DONE)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else number(value, 4)


if __name__ == "__main__":
    from featlearn.cli.app import main

    sys.exit(main(["reproduce", *sys.argv[1:]]))
