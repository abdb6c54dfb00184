"""`fl.watch_checkpoints`: the run that a watch would have recorded, from the checkpoints of a finished training."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from featlearn.errors import InputTypeError, RunError
from featlearn.losses import Loss
from featlearn.monitoring.checkpoint_files import Checkpoint, listed_checkpoints
from featlearn.monitoring.checkpoint_states import CheckpointReader, Load
from featlearn.monitoring.description import model_entry
from featlearn.monitoring.entry import watch
from featlearn.monitoring.probe_data import Probe, kept_state, probe_data
from featlearn.monitoring.resumption import measured_steps
from featlearn.monitoring.schedule import Quantities, scheduled_quantities
from featlearn.monitoring.watch import Watch
from featlearn.network.checks import refuse_unmeasurable, unwrapped
from featlearn.network.copies import copied
from featlearn.network.inputs import Readout
from featlearn.network.isolation import random_state_kept
from featlearn.network.state import Inventory
from featlearn.planning.plan import ProgressLine
from featlearn.record import Run, RunWriter, open_run
from featlearn.record.layout import RUN
from featlearn.signatures import name_keywords

ENTRY = "checkpoints"
"""The entry of run.json: step, name and mark of every checkpoint."""


@name_keywords()
def watch_checkpoints(
    model: nn.Module,
    checkpoints: str | os.PathLike[str] | Sequence[tuple[int, Any]],
    *,
    probe: Probe,
    out: str | os.PathLike[str],
    load: Load | None = None,
    test: Probe | None = None,
    readout: Readout | None = None,
    loss: Loss | None = None,
    quantities: Quantities = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Run:
    """Measure the checkpoints of a training run: the run that `fl.watch` would have recorded at these steps.

        run = fl.watch_checkpoints(model, "checkpoints", probe=(x, y), out="runs/a")
        print(fl.diagnose(run))

    Every checkpoint is measured; there is no budget. The model gives the architecture: a copy of it is loaded and
    measured, and the model itself, its mode and random numbers stay as they are, bit for bit. Files are read without
    running code in them; one that is damaged, does not fit the model or has weights that are not finite is a
    `featlearn.errors.CheckpointError` that names it.

    Called again with the same `out`, also after a kill, it goes on with the checkpoints that are not yet measured. A
    file that was written anew since is an error: `overwrite=True` starts over. What only training knows is not in such
    a run: the loss of the steps, the optimizer, and the duration of a step (`seconds` is what loading took).

    Args:
        model: the network that was trained, with any weights.
        checkpoints: a folder, or a list of (step, path). In a folder: files `.pt`, `.pth`, `.bin`, `.ckpt` (a state
            dict, or a mapping with one as `state_dict`, `model` or `model_state_dict`), `.safetensors`, and folders
            with `model.safetensors` or `pytorch_model.bin`, whole or divided, as Hugging Face writes them; steps are
            read from names (`step100.pt`, `checkpoint-100`). In a list a state dict may stand for a path. One must be
            of step 0, the state before training: every other is compared with it.
        probe, test, readout, loss, quantities, name, settings, overwrite: as for `fl.watch`.
        out: a directory for the run: new, empty, or that of an earlier call.
        load: a function of (model, path) for other formats; it loads into the model it is given, or returns a state
            dict. `path` is what the list or folder has.
    """
    if load is not None and not callable(load):
        raise InputTypeError(f"load is {type(load).__name__}, expected a function of (model, path), or None")
    network, path = unwrapped(model), Path(out)
    refuse_unmeasurable(Inventory(network))
    listed = listed_checkpoints(checkpoints, own_format=load is not None)
    past = None if overwrite else _past(path)
    pending, last = listed[1:], listed[0]
    if past is not None:
        _refuse_other(past, listed, network, probe, test, quantities)
        # Those in between that could not be measured are left out. The last one lacks its large arrays.
        step = max(measured_steps(past))
        pending = [checkpoint for checkpoint in listed if checkpoint.step > step]
        (last,) = [checkpoint for checkpoint in listed if checkpoint.step == step]
    if past is not None and not pending and past.config.get("finished") is True:
        return past
    with random_state_kept():  # a function of the user's may draw some
        twin, reader = copied(network, None), CheckpointReader(network, load)
        reader.put(listed[0], twin)
        seen = watch(
            twin,
            probe,
            out=path,
            every=at_every_checkpoint,
            budget=None,
            test=test,
            quantities=quantities,
            readout=readout,
            loss=loss,
            name=name,
            settings=settings,
            overwrite=overwrite,
            resume=not overwrite,
        )
        if past is not None:
            seen.assume_start(kept_state(twin))
            reader.put(last, twin)
        _measure(seen, twin, reader, pending, _entries(past, listed))
    # Shares of the training time mean nothing here.
    RunWriter(path, {}, resume=True).describe(overhead=None, wall_share=None)
    return open_run(path)


def at_every_checkpoint(step: int) -> bool:
    """The schedule: all steps there are."""
    return True


def _measure(
    seen: Watch, network: nn.Module, reader: CheckpointReader, pending: Sequence[Checkpoint], entries: Any
) -> None:
    # The last one is measured once more at the end.
    with seen, ProgressLine("measuring checkpoints", len(pending) + 1) as progress:
        seen.describe(**{ENTRY: entries})
        for checkpoint in pending:
            reader.put(checkpoint, network)
            seen.step(step=checkpoint.step)
            progress.advance()


def _past(path: Path) -> Run | None:
    """The run of an earlier call; None if it has not measured anything."""
    if not (path / RUN).exists():
        return None
    run = open_run(path)
    if not run.lines:
        return None
    if run.config.get("every") != at_every_checkpoint.__name__:
        raise RunError(
            f"{path} holds a run that was not made from checkpoints; pass overwrite=True to replace it, or another out="
        )
    return run


def _refuse_other(
    run: Run, listed: Sequence[Checkpoint], network: nn.Module, probe: Any, test: Any, quantities: Quantities
) -> None:
    """Refuse to go on with a run of other samples, of another model, or with other quantities or checkpoints."""
    chosen = scheduled_quantities(quantities, test=test is not None, optimizer=False)
    pairs = {"probe": probe, "test": test}
    recorded = {name: (run.config.get(name) or {}).get("sha256") for name in pairs}
    recorded |= {"model": run.config.get("model"), "choice of quantities": run.config.get("quantities")}
    expected: dict[str, Any] = {
        name: None if pair is None else probe_data(pair, name, network).digest for name, pair in pairs.items()
    }
    expected |= {"model": model_entry(network), "choice of quantities": [quantity.name for quantity in chosen]}
    problems = [f"it was recorded with another {name}" for name, entry in expected.items() if entry != recorded[name]]
    measured, marks = measured_steps(run), {entry["step"]: entry["mark"] for entry in run.config.get(ENTRY) or []}
    last = max(measured)
    for checkpoint in listed:
        step = checkpoint.step
        if step in measured and step in marks and marks[step] != checkpoint.mark:
            problems.append(f"{checkpoint} has changed since")
        if step < last and step not in measured and step not in marks:
            problems.append(f"{checkpoint} is new, and measurements follow each other: it has measured step {last}")
    if last not in [checkpoint.step for checkpoint in listed]:
        problems.append(f"it has measured step {last}, which is not among the checkpoints")
    if problems:
        raise RunError(
            f"the run in {run.path} cannot go on: {problems[0]}; pass what it was made from, overwrite=True to measure "
            "all again, or another out="
        )


def _entries(run: Run | None, listed: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """What run.json says of the checkpoints, those of earlier calls among them."""
    entries = {} if run is None else {one["step"]: one for one in run.config.get(ENTRY) or []}
    entries |= {one.step: {"step": one.step, "name": one.name, "mark": one.mark} for one in listed}
    return [entries[step] for step in sorted(entries)]
