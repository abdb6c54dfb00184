"""`fl.watch`: checks all arguments before anything runs."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from featlearn import losses
from featlearn.errors import InputTypeError, InputValueError
from featlearn.losses import Loss
from featlearn.monitoring.description import every_entry
from featlearn.monitoring.probe_data import Probe, WatchedNetwork, probe_data, trains
from featlearn.monitoring.recording import Alerts, WatchOptions
from featlearn.monitoring.schedule import Every, Quantities, Schedule, scheduled_quantities
from featlearn.monitoring.watch import Watch
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Readout
from featlearn.signatures import name_keywords


@name_keywords()
def watch(
    model: nn.Module,
    probe: Probe,
    *,
    out: str | os.PathLike[str],
    every: Every = "log",
    budget: float | None = 0.05,
    test: Probe | None = None,
    optimizer: Optimizer | None = None,
    quantities: Quantities = None,
    readout: Readout | None = None,
    loss: Loss | None = None,
    sinks: Any = (),
    send: str | Sequence[str] = "headlines",
    alerts: Alerts = False,
    resume: bool = False,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    live: bool = False,
    pictures: bool = True,
    replay: Probe | None = None,
) -> Watch:
    """Watch a training run: kernels, features and weights at log-spaced steps, written to a directory.

        with fl.watch(model, probe=(x, y), out="runs/a") as watch:
            for inputs, targets in loader:
                ...
                optimizer.step()
                watch.step(loss=loss)

    Measuring changes nothing: losses, weights, optimizer state and random numbers are, bit for bit, those of a run
    that is not watched. A model that cannot be measured is an error on entering; later nothing stops training: a
    measurement that fails or cannot be written is recorded as an event, and you are warned once.

    Under `torch.distributed` rank 0 decides and writes. If every rank has a watch, all of them measure kernels and
    features together that are much work, where each has at least 32 samples of the probe.

    Args:
        model: any `nn.Module`, also one wrapped by `torch.compile` or DDP, or sharded by FSDP2; measured in eval mode.
        probe: (x, y), 100 to 500 samples say, the same at every measurement. y: targets (P, C), numbers (P,), or class
            labels (P,), which become one-hot rows less 1 / C; None for kernels without a task. Classes of positions
            (P, T) or pixels (P, H, W) are read by the default readout. A batch with `labels` is a probe, too.
        out: a directory for the run, new or empty.
        every: `"log"`, a number of steps, or a function of the step. The first and the last are always measured.
        budget: share of the work of training that measuring may take, counted in multiply-adds. Gap, richness, weights
            and layers come first, kernels and neural features last. The probe is reduced to every second, fourth ...
            sample, at least 32, if its first measurement would be too much work. The first and the last measurement are
            always made. None: every scheduled measurement, with all samples.
        test: a second probe (x', y'), for kernel and fit on unseen data; y' may be None.
        optimizer: for learning rates, and for the kernel of its update (`quantities=["optimizer", ...]`).
        quantities: names out of gap, richness, weights, kernel, features, layers, convergence (where weights decay),
            test, optimizer, pictures; by default all but the optimizer. A
            mapping changes the default: `{"features": False, "layers": 100}`, with a schedule as `every`. A function of
            a `StepView` is a quantity of your own; it returns a number or a mapping of numbers.
        readout: Map from the model's output to (P,) or (P, C), as for `fl.ntk`. By default the output itself, the mean
            log-probability of a sequence's targets for logits (P, T, V), or that of an image's labels for logits
            (P, C, H, W). The default is printed, and its name is `run.config["readout"]`.
        loss: Training loss, for comparisons with theory: a name of `fl.losses`, a module, or a function of
            (outputs, y).
        sinks: Further destinations of the numbers: `"tensorboard"`, `"wandb"`, `"trackio"`, or any object with
            `log_metrics(mapping, step)`.
        send: Numbers that sinks get: `"headlines"`, about ten and your own; `"all"`; or a list of names, in which `*`
            stands for anything: `["loss", "gap/*"]`. The run on disk has all.
        alerts: True to print a line when training is lazy, a layer is dead or frozen, the learning rate is unstable,
            training has stalled, or kernels cannot be afforded. Each comes once, with a number and an action, also in
            `run.events` and in the sinks. A function gets the alert as a mapping in place of the line.
        resume: continue the run in `out`, if there is one.
        name: name of the run; by default that of its directory.
        settings: any JSON-serializable mapping, without NaN or infinity: width, output scale, seed ... It is stored as
            `run.config["settings"]` from the start. `fl.report` treats runs whose settings differ only in `"seed"` as
            seeds of one experiment.
        overwrite: replace the run in `out`, finished or not, if there is one. It is removed when the first measurement
            is made and the new run begins, not before; a directory with anything else in it is refused.
        live: serve a page that follows the run, as `featlearn live` does, and print its address; needs the extra
            `live`. It is a process of its own, for which training never waits and which ends with it.
        pictures: Whether to store what the pictures of a report need, at most 2 MB: thumbnails, tokens or rows of up
            to 64 samples, and the inputs that the network is most sensitive to, at the first and the last step.
            `settings={"classes": [...], "vocabulary": [...]}` names classes and tokens.
        replay: (x, y), the training samples, up to some thousands. Then `fl.replay(run)` tells what would have been
            without some of them, and `fl.attribute(run)` which of them made an output. Needs `optimizer=` and `loss=`
            by name, and `samples=` in every `watch.step(loss=loss, samples=indices)`. Some 6 kernels of all samples
            are recorded in every factor of ten of the steps, outside the `budget`.
    """
    if resume and overwrite:
        raise InputValueError("resume=True and overwrite=True, expected one of them: go on with the run, or replace it")
    if overwrite:
        from featlearn.record.replacement import refuse_unless_run  # late: few runs need it

        refuse_unless_run(Path(out))
    if replay is not None and resume:
        raise InputValueError("replay=... with resume=True, expected one of them: a replay needs every step of a run")
    entries = {
        "name": name,
        "loss_convention": None if loss is None else losses.name(loss),
        "budget": budget,
        "every": every_entry(every),
        "settings": None if settings is None else _plain_settings(settings),
    }
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputTypeError(f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer or None")
    if not isinstance(alerts, bool) and not callable(alerts):
        raise InputTypeError(f"alerts={alerts!r}, expected True, False, or a function of an alert")
    patterns: Sequence[str] = ()
    if live or sinks or not isinstance(sinks, list | tuple):
        from featlearn.monitoring.sinks import checked_send, listed  # late: few runs need it

        sinks, patterns = [*listed(["live"] if live else []), *listed(sinks)], checked_send(send)
    network = unwrapped(model)
    if optimizer is not None and not trains(optimizer, network):
        names = [parameter for parameter, _ in network.named_parameters()]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        raise InputValueError(
            f"optimizer ({type(optimizer).__name__}) trains no parameter of the model ({type(network).__name__}): "
            f"{shown} are not the optimizer's, expected the one that trains them. An average of weights (EMA) is "
            "watched without optimizer=. A model that was copied or built again needs an optimizer of its own"
        )
    tested = None if test is None else probe_data(test, "test", network, readout)
    watched = WatchedNetwork(
        network, probe_data(probe, "probe", network, readout), tested, optimizer, readout, loss=loss
    )
    samples = None if replay is None else probe_data(replay, "replay", network, readout)
    if samples is not None:
        from featlearn.monitoring.replay_record import ReplayRecorder  # late: few runs need it

        ReplayRecorder(watched, samples)  # checks optimizer, loss and targets
    chosen = scheduled_quantities(quantities, test=test is not None, optimizer=optimizer is not None)
    chosen = [one for one in chosen if pictures or one.name != "pictures"]
    entries["quantities"] = [one.name for one in chosen]
    return Watch(
        WatchOptions(
            watched=watched,
            path=Path(out),
            schedule=Schedule(every),
            budget=_checked_budget(budget),
            quantities=chosen,
            entries=entries,
            sinks=sinks,
            send=patterns,
            alerts=alerts,
            resume=resume,
            overwrite=overwrite,
            replay=samples,
        )
    )


def _checked_budget(share: float | None) -> float | None:
    expected = "expected a share of the work of training between 0 and 1, or None"
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        raise InputTypeError(f"budget={share!r}, {expected}")
    if share is not None and not 0 < share <= 1:
        raise InputValueError(f"budget={share}, {expected}")
    return share


def _plain_settings(settings: Any) -> dict[str, Any]:
    """A copy of the settings after a round trip through JSON."""
    if not isinstance(settings, Mapping):
        raise InputTypeError(f"settings is {type(settings).__name__}, expected a mapping: settings={{'width': 100}}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = InputValueError if isinstance(error, ValueError) else InputTypeError
        raise kind(
            f"settings cannot be written as JSON: {error}; expected finite numbers, words, lists and mappings of them: "
            "turn a tensor into a number by .item() or .tolist(), a path into a word by str()"
        ) from error
    return plain
