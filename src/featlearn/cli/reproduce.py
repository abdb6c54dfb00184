"""`featlearn reproduce`: figures of the papers and their claims."""

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from featlearn.cli.answer import DONE, FAILED, Answer, UsageError, number, table
from featlearn.errors import InputValueError
from featlearn.papers import registry
from featlearn.papers.claims import counted, failed, share, verdict
from featlearn.papers.results import Result, keep, kept
from featlearn.papers.scale import Scale

if TYPE_CHECKING:
    from featlearn.papers.request import CostEstimate

Flag = Annotated[bool, Parameter(negative=())]


def reproduce(
    figure: str | None = None,
    /,
    *,
    scale: Scale = Scale.SMOKE,
    seeds: int | None = None,
    jobs: int | None = None,
    device: str | None = None,
    out: Path | None = None,
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
    """Repeat a figure of the five papers, and say which of its claims hold.

    Writes figure.png, figure.pdf, numbers.csv (what is drawn), claims.json and
    page.html. Exit status 1 if a claim fails that is not known to fail in print.
    Seeds that are finished are kept: after an interruption run the same again.

    For example:

        featlearn reproduce --list
        featlearn reproduce 002/figC2
        featlearn reproduce 002/figC2 --scale laptop --dry-run
        featlearn reproduce 000/fig2 --scale laptop --data-root data
        featlearn reproduce --gallery --out gallery.html

    Args:
        figure: PAPER/FIGURE, as --list shows them.
        scale: smoke runs seconds and needs no data files; laptop minutes, on real data; paper has the paper's size.
        seeds: how many, from 0 on; by default as many as the scale has.
        jobs: seeds that run at a time, each on one core; by default one a core, on a GPU one.
        device: cpu or cuda; by default what the scale is meant for, where there is one.
        out: folder of the result, by default reproductions/PAPER/FIGURE/SCALE; file of the gallery.
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
    if figure is None:
        raise UsageError(f"which figure? pass PAPER/FIGURE, as in {registry.DECLARATIONS[0].id}; --list shows all")
    from featlearn.cli.device import checked_device
    from featlearn.papers.request import Request, estimate
    from featlearn.papers.request import reproduce as run

    declared = _declared(figure)
    _check_counts(seeds, jobs)
    if device is not None:
        checked_device(device)
    request = Request(
        id=declared.id, scale=scale, out=out or Path("reproductions") / declared.id / str(scale), seeds=seeds,
        jobs=jobs, device=device, data_root=data_root, fallback_digits=fallback_digits, fresh=fresh, quiet=quiet,
    )  # fmt: skip
    if dry_run:
        return _estimated(estimate(request))
    if not quiet:
        print(_cost(estimate(request)), file=sys.stderr, flush=True)
    try:
        result = run(request)
    except InputValueError as error:
        if (words := _of_the_command(str(error), data_root)) == str(error):
            raise
        raise InputValueError(words) from error
    if keep_result:
        keep(request.out)
    return _assessment(result)


def _declared(figure: str) -> registry.Declaration:
    try:
        return registry.declaration(figure)
    except InputValueError as error:
        raise UsageError(str(error)) from error


def _check_counts(seeds: int | None, jobs: int | None) -> None:
    for name, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}, expected at least 1")


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
        rows.append([one.id, one.title, state])
        claims = None if result is None else result.claims
        data.append({"id": one.id, "title": one.title, "written": one.written, "state": state, "claims": claims})
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    text = "\n".join(f"{id:{widths[0]}}  {title:{widths[1]}}  {state}" for id, title, state in rows)
    return Answer(data=data, text=text)


def _state(one: registry.Declaration, result: Result | None) -> str:
    if result is not None:
        return f"{result.scale}: {result.summary}"
    return "not run yet" if one.written else "not written yet"


def _gallery(path: Path) -> Answer:
    from featlearn.papers.page import gallery

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
        words = verdict(claim)
        rows.append([claim["id"], _short(claim["paper"]), ours, spread, words.upper() if claim in wrong else words])
    lines = [table(["claim", "paper", "ours", "spread", ""], rows), f"{result.summary}; {result.folder / 'page.html'}"]
    data = {"folder": result.folder, "scale": str(result.scale), "claims": result.claims, "meta": result.meta}
    return Answer(data=data, text="\n".join(lines), code=FAILED if wrong else DONE)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else number(value, 4)


if __name__ == "__main__":
    from featlearn.cli.app import main

    sys.exit(main(["reproduce", *sys.argv[1:]]))
