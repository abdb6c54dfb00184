"""`featlearn diagnose`: train and watch a network, and diagnose the run."""

import json as jsons
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from featlearn.cli.answer import DONE, FAILED, INTERRUPTED, Answer, UsageError, number, table
from featlearn.cli.key_numbers import NUMBERS, loss_label
from featlearn.cli.plot import Panel, plot
from featlearn.cli.recorded_runs import FOLDER, recorded_runs
from featlearn.cli.settings import TrainingSettings, option
from featlearn.cli.user_errors import reporting_user_errors
from featlearn.errors import RunError

if TYPE_CHECKING:
    from featlearn.diagnosis import Diagnosis
    from featlearn.record import Run

DEFAULT = TrainingSettings()
PLOTTED = {
    "loss": ((), 0.0),
    "linearization gap": (("gap/link", "gap/probe"), 0.1),
    "kernel-task alignment": (("ntk/centered_alignment",), 0.1),
}
"""Title -> names of scalars, of which the first available one is shown, and the smallest range of the axis; the loss is
the one that was trained on."""
MEASURING_ONLY = ("seed", "device", "probe")
"""TrainingSettings that mean something where nothing is trained."""
DECISIVE = {"gap": "gap", "turning": "kernel rotated", "growth": "kernel grew", "loss_left": "loss left"}
"""Numbers of a diagnosis that decide the regime -> column heads."""


def diagnose(
    subject: str | None = None,
    /,
    *,
    settings: TrainingSettings = DEFAULT,
    seeds: int = 1,
    config: Path | None = None,
    checkpoints: Path | None = None,
    out: Path | None = None,
    all: bool = False,
    no_report: bool = False,
    quiet: bool = False,
    json: bool = False,
    debug: bool = False,
) -> Answer:
    """Train a network, watch it, and say whether it learned features or was lazy.

    Without options: two hidden layers on 200 handwritten digits, in about a
    minute. The run and a report go to a folder below runs. Ctrl-C ends training
    early: what was measured is kept and diagnosed, and the exit status is 130.

    For example:

        featlearn diagnose
        featlearn diagnose --output-scale 30 --seeds 3
        featlearn diagnose --data mnist --model cnn --width 16 --samples 200
        featlearn diagnose --config mine.toml --lr 0.1
        featlearn diagnose train.py:setup --steps 500
        featlearn diagnose train.py:setup --checkpoints saved
        featlearn diagnose runs/a

    The function setup takes nothing and returns (model, (x, y), loss), or a
    mapping with model, data, loss and perhaps test=(x, y) and optimizer. The loss
    is "mse", "cross-entropy", or a function of (output, y). It is called once for
    each seed. With --checkpoints nothing is trained: its network is measured with
    the weights in that folder (step0.pt, step100.pt ... or checkpoint-100/).
    A recorded run, or a folder of seeds, is diagnosed as it is:
    nothing is trained or written.

    Args:
        subject: module:function or path.py:function that returns a network of your own, or a recorded run.
        seeds: Train so many times, from the seed of --seed on, and judge all of them together.
        config: TOML file with options, named as here; the command line wins.
        checkpoints: Folder of checkpoints to measure instead of training; with --out again, go on with the new ones.
        out: Folder for the run; by default a new one below runs.
        all: Print every statement with its number and threshold, also those that are inconclusive.
        no_report: Leave the HTML report out.
        quiet: No progress on stderr.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if seeds < 1:
        raise UsageError(f"--seeds {seeds}, expected at least 1")
    if checkpoints is not None:
        _refuse_training_options(subject, settings, seeds)
    recorded = [] if subject is None else recorded_runs(Path(subject))
    if recorded:
        if settings != DEFAULT or seeds != 1 or out is not None:
            raise UsageError(f"{subject} is a recorded run, expected no options of training beside it")
        return _answer(recorded, Path(str(subject)), with_report=False, everything=all, with_advice=json)
    folder = _new_folder(subject, settings) if out is None else out
    resumed = checkpoints is not None and (folder / "run.json").exists()
    if folder.exists() and not resumed and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"--out {folder} exists already and is not empty, expected a new folder")
    chosen = range(settings.seed, settings.seed + seeds)
    paths = [folder if seeds == 1 else folder / f"seed-{seed}" for seed in chosen]
    complete, networks = False, dict[Path, Any]()
    try:
        for seed, path in zip(chosen, paths, strict=True):
            rate, networks[path] = _recorded(subject, replace(settings, seed=seed), checkpoints, path, quiet)
            settings = replace(settings, lr=rate)  # the same for all seeds, so that they can be averaged
        complete = True
    except KeyboardInterrupt:
        paths = [path for path in paths if (path / "run.json").exists()]
        if not paths:
            raise
    return _answer(
        paths,
        folder,
        with_report=not no_report,
        complete=complete,
        everything=all,
        with_advice=json,
        networks=networks,
    )


def _recorded(
    subject: str | None, settings: TrainingSettings, checkpoints: Path | None, path: Path, quiet: bool
) -> tuple[float | None, Any]:
    """Record one run, and return the learning rate and the trained network.

    stdout is for the result only: the user's function may print.
    """
    errors = nullcontext() if subject is None else reporting_user_errors(subject)
    with errors, redirect_stdout(sys.stderr):
        if checkpoints is not None and subject is not None:
            from featlearn.cli.checkpoint_run import measure_checkpoints  # torch takes a second to load

            measure_checkpoints(subject, settings, checkpoints, path, quiet=quiet)
            return None, None
        from featlearn.cli.training import train
        from featlearn.cli.training_progress import ProgressDisplay

        with ProgressDisplay(path.name, settings.steps, quiet=quiet) as progress:
            return train(subject, settings, path, progress)


def _refuse_training_options(subject: str | None, settings: TrainingSettings, seeds: int) -> None:
    """Options that would change a training that is over."""
    if subject is None:
        raise UsageError("--checkpoints without FILE.py:function, expected the function that returns your network")
    given = [one.name for one in fields(TrainingSettings) if getattr(settings, one.name) != getattr(DEFAULT, one.name)]
    training = [option(name) for name in given if name not in MEASURING_ONLY] + (["--seeds"] if seeds > 1 else [])
    if training:
        raise UsageError(f"{training[0]} is given beside --checkpoints, expected one of the two: nothing is trained")


def _answer(
    paths: Sequence[Path],
    folder: Path,
    *,
    with_report: bool,
    everything: bool,
    with_advice: bool,
    complete: bool = True,
    networks: Mapping[Path, Any] = MappingProxyType({}),
) -> Answer:
    from featlearn.diagnosis.findings import Findings
    from featlearn.diagnosis.verdict import diagnose_findings
    from featlearn.record import open_run
    from featlearn.reporting.page import report

    runs = [open_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        run.network = networks.get(path)  # advice is tried on it
    findings = [Findings(run) for run in runs]
    each = [diagnose_findings([one]) for one in findings]
    together = each[0] if len(each) == 1 else diagnose_findings(findings)
    page = report(together, folder / "report.html") if with_report else None
    diverged = [run.name for run, one in zip(runs, each, strict=True) if one.diverged]
    code = INTERRUPTED if not complete else FAILED if diverged else DONE
    data = {
        "regime": together.regime,
        "complete": complete,
        "diverged": diverged,
        "report": page,
        "diagnosis": jsons.loads(together.to_json()),
        "advice": _advice(together) if with_advice else None,
        "runs": [
            {
                "path": path,
                "regime": one.regime,
                "settings": run.config.get("settings"),
                "diagnosis": jsons.loads(one.to_json()),
            }
            for path, run, one in zip(paths, runs, each, strict=True)
        ],
    }
    return Answer(data=data, text=_text(runs, each, together, page, complete, everything), code=code)


def _advice(diagnosis: "Diagnosis") -> dict[str, Any]:
    """Return what to change, toward rich and toward lazy training, each change as a call."""
    from featlearn.diagnosis.advice import advise

    answers = {toward: advise(diagnosis, toward) for toward in ("rich", "lazy")}
    return {
        toward: {
            "note": advice.note,
            "changes": [
                {
                    "text": change.text,
                    "call": change.command,
                    "tried": None if change.tried is None else str(change.tried),
                    "expect": change.expect,
                }
                for change in advice.changes
            ],
        }
        for toward, advice in answers.items()
    }


def _text(
    runs: "Sequence[Run]",
    each: "Sequence[Diagnosis]",
    together: "Diagnosis",
    page: Path | None,
    complete: bool,
    everything: bool,
) -> str:
    """The verdict, three curves and the paths: at most 20 lines for one run, and all statements with `everything`."""
    lines = [summary(runs[0], len(runs))]
    if not complete:
        lines.append(f"interrupted at step {_steps(runs[-1])}: what follows is of the steps before")
    head, *rest = (together.full if everything else together.summary).splitlines()
    lines += [_bold(head), *rest, "", plot(curves(runs), height=1), ""]
    if len(each) > 1:
        rows = [
            [run.name, one.regime, *(number(float(one.numbers[key])) for key in DECISIVE)]
            for run, one in zip(runs, each, strict=True)
        ]
        lines += [table(["seed", "verdict", *DECISIVE.values()], rows), ""]
    where = runs[0].path if len(runs) == 1 else runs[0].path.parent
    lines.append(f"run:     {where}")
    if page is not None:
        lines.append(f"report:  {page}")
    return "\n".join(lines)


def summary(run: "Run", runs: int = 1) -> str:
    """One line about the trained network."""
    by = run.config.get("optimizer") or {}
    rate = (by.get("groups") or [{}])[0].get("lr")
    told = number(rate) if isinstance(rate, int | float) else "-"
    optimizer = f" of {by.get('class')}, learning rate {told}" if by else ""
    seeds = f", {runs} seeds" if runs > 1 else ""
    given, measured = run.probe_samples or (0, 0)
    thinned = f", measured on {measured} of {given} probe samples" if measured < given else ""
    return f"{_trained(run)}: {_steps(run)} steps{optimizer}{seeds}{thinned}"


def of_command(run: "Run") -> bool:
    """Whether `featlearn diagnose` recorded the run, so that its settings are command-line options."""
    settings = run.config.get("settings")
    return isinstance(settings, dict) and settings.keys() >= {"subject", *DEFAULT.entry}


def _trained(run: "Run") -> str:
    if not of_command(run):
        model = run.config.get("model") or {}
        count = model.get("parameters")
        kind = str(model.get("class", "a network")).rpartition(".")[2]
        return kind if count is None else f"{kind}, {count} parameters"
    settings = run.config["settings"]
    scale = settings["output_scale"]
    scaled = f", output scale {scale:g}" if scale is not None else ""
    return f"{settings['subject'] or '{model} on {data}'.format(**settings)}{scaled}"


def _steps(run: "Run") -> int:
    return int(run.lines[-1]["step"]) if run.lines else 0


def curves(runs: "Sequence[Run]") -> list[Panel]:
    """The panels of the terminal plot."""
    found = []
    for title, (names, least) in PLOTTED.items():
        known = names or (NUMBERS[loss_label(runs[0])],)
        name = next((name for name in known if all(name in run.names for run in runs)), None)
        if name is not None:
            pairs = [run.scalar(name) for run in runs]
            found.append(Panel(title, [(steps.tolist(), values.tolist()) for steps, values in pairs], least))
    return found


def _new_folder(subject: str | None, settings: TrainingSettings) -> Path:
    """runs/NAME-DIGEST of the settings, numbered if it exists."""
    what = Path(settings.data).stem if subject is None else subject.rpartition(":")[2]
    stem = f"{what}-{settings.model}-{settings.digest}" if subject is None else f"{what}-{settings.digest}"
    paths = (FOLDER / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10_000))
    return next(path for path in paths if not path.exists())


def _bold(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[1m{text}\033[0m"
