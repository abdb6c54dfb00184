"""Hugging Face transformers: a callback for its Trainer."""

import os
from collections.abc import Mapping
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.monitoring import Watch
from featlearn.monitoring.entry import watch
from featlearn.monitoring.probe_data import trains

__all__ = ["callback"]


def callback(probe: tuple[Any, Any], out: str | os.PathLike[str], **options: Any) -> Any:
    """A callback that watches what a `transformers.Trainer` trains.

        seen = fl.integrations.transformers.callback((inputs, labels), out="runs/a", readout=fl.readouts.last_token)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[seen])
        seen.trainer = trainer  # numbers then go to the Trainer's own reporters as well, through trainer.log
        trainer.train()

    Args:
        probe: (inputs, y): a mapping of what the model takes, without labels, and targets as for `fl.watch`.
        out: the directory of the run.
        options: further arguments of `fl.watch`. The optimizer is that of the Trainer.

    Returns:
        A `TrainerCallback` with the attribute `watch`, None until training begins. A Trainer does not tell its
        callbacks of an exception: what was measured is on disk by then; `seen.close()` makes the last measurement.
    """
    base = _callback_class()

    class TransformersWatchCallback(base):  # type: ignore[misc, valid-type]
        """Watches what is trained."""

        def __init__(self) -> None:
            super().__init__()
            self.watch: Watch | None = None
            self.trainer: Any = None
            """Set it for numbers to go to the Trainer's reporters."""
            self._emitting = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """The first measurement."""
            given = dict(options)
            optimizer = kwargs.get("optimizer")
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            if optimizer is not None and trains(optimizer, kwargs["model"]):  # not its sharded copies
                given.setdefault("optimizer", optimizer)
            given["sinks"] = [*_listed(given.get("sinks", ())), self]
            self.watch = watch(kwargs["model"], probe=probe, out=out, **given)
            self.watch.__enter__()
            self.watch.steps = max(self.watch.steps, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """One step of the optimizer."""
            if self.watch is not None:
                self.watch.step(step=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Losses and evaluations, as the Trainer averages them."""
            if self.watch is not None and not self._emitting and logs:
                known = ("loss", "grad_norm")
                found = {k: v for k, v in logs.items() if k in known or k.startswith("eval_")}
                numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
                if numbers:
                    self.watch.log(**numbers)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """The last measurement."""
            self.close()

        def close(self) -> None:
            """Make the last measurement, if that has not been done."""
            seen, self.watch = self.watch, None
            if seen is not None:
                seen.__exit__(None, None, None)
                self.finished = seen

        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            """Send the numbers of the present step to the reporters, without those that they got from the Trainer."""
            own = {key: value for key, value in metrics.items() if "/" in key}
            if self.trainer is not None and own and step == self.trainer.state.global_step:
                control = self.trainer.control
                # What is logged counts as what the Trainer was about to log itself, which it would then leave out.
                due, self._emitting = control.should_log, True
                try:
                    self.trainer.log(own)
                finally:
                    control.should_log, self._emitting = due, False

    return TransformersWatchCallback()


def _listed(sinks: Any) -> list[Any]:
    return [sinks] if isinstance(sinks, str) or hasattr(sinks, "log_metrics") else list(sinks)


def _callback_class() -> Any:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise FeatlearnError(
            f"transformers cannot be imported: {error}; pip install 'featlearn[transformers]'"
        ) from error
    return TrainerCallback
