"""A callback for the Hugging Face Trainer."""

import os
from collections.abc import Mapping
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.monitoring import Watch
from featlearn.monitoring.entry import watch
from featlearn.monitoring.probe_data import trains

__all__ = ["callback"]

_CONSOLE = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
"""Callbacks that print what is logged, which would take more than a line."""


def callback(probe: Any, out: str | os.PathLike[str], **options: Any) -> Any:
    """Return a callback that watches the training of a `transformers.Trainer`.

        callback = fl.integrations.transformers.callback(collator(examples), out="runs/a")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.trainer = trainer  # also send numbers to the Trainer's reporters, through trainer.log
        trainer.train()

    Args:
        probe: A batch with `labels`, as the Trainer's collator makes it, or (inputs, y) as for `fl.watch`.
        out: Directory of the run.
        options: Other arguments of `fl.watch`. The optimizer is the Trainer's.

    Returns:
        A `TrainerCallback` with the attribute `watch`, None until training begins. A Trainer does not notify callbacks
        of exceptions: all measurements are on disk, and `callback.close()` makes the last measurement.
    """
    base = _callback_class()

    class TransformersWatchCallback(base):  # type: ignore[misc, valid-type]
        """Callback that watches training."""

        def __init__(self) -> None:
            super().__init__()
            self.watch: Watch | None = None
            self.trainer: Any = None
            """Trainer to whose reporters numbers are sent; None for no reporters."""
            self._emitting = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Make the first measurement."""
            watch_options = dict(options)
            optimizer = kwargs.get("optimizer")
            optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate
            if optimizer is not None and trains(optimizer, kwargs["model"]):  # skip sharded copies
                watch_options.setdefault("optimizer", optimizer)
            watch_options["sinks"] = [*_listed(watch_options.get("sinks", ())), self]
            self.watch = watch(kwargs["model"], probe=probe, out=out, **watch_options)
            self.watch.__enter__()
            self.watch.steps = max(self.watch.steps, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Record a step of the optimizer."""
            if self.watch is not None:
                self.watch.step(step=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Record losses and evaluations, averaged by the Trainer."""
            if self.watch is not None and not self._emitting and logs:
                trainer_keys = ("loss", "grad_norm")
                entries = {k: v for k, v in logs.items() if k in trainer_keys or k.startswith("eval_")}
                numbers = {key: value for key, value in entries.items() if isinstance(value, int | float)}
                if numbers:
                    self.watch.log(**numbers)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Make the last measurement."""
            self.close()

        def close(self) -> None:
            """Make the last measurement, unless it was made."""
            finished_watch, self.watch = self.watch, None
            if finished_watch is not None:
                finished_watch.__exit__(None, None, None)
                self.finished = finished_watch

        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            """Send numbers of the current step to the reporters, except those of the Trainer; nothing is printed."""
            measured = {key: value for key, value in metrics.items() if "/" in key}
            if self.trainer is not None and measured and step == self.trainer.state.global_step:
                control = self.trainer.control
                # trainer.log resets should_log, and the Trainer would skip its pending log.
                due, self._emitting = control.should_log, True
                handler = self.trainer.callback_handler
                callbacks = handler.callbacks
                handler.callbacks = [one for one in callbacks if type(one).__name__ not in _CONSOLE]
                try:
                    self.trainer.log(measured)
                finally:
                    control.should_log, self._emitting, handler.callbacks = due, False, callbacks

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
