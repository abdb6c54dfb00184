"""A callback for the Lightning Trainer."""

import copy
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.monitoring import Watch
from featlearn.monitoring.entry import watch
from featlearn.monitoring.probe_data import trains

__all__ = ["callback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback(
    probe: tuple[Any, Any], out: str | os.PathLike[str], *, network: Callable[[Any], Any] | None = None, **options: Any
) -> Any:
    """Return a callback that watches the training of a Lightning Trainer.

        trainer = lightning.Trainer(callbacks=[fl.integrations.lightning.callback(probe=(x, y), out="runs/a")])

    The callback is for `lightning` or `pytorch_lightning`, whichever is imported (their callback classes differ), or
    otherwise the first that is installed.

    Args:
        probe, out: As for `fl.watch`.
        network: Function from the LightningModule to the module to watch; by default the LightningModule, whose
            `forward` is called with the probe.
        options: Other arguments of `fl.watch`. By default, `optimizer` is the Trainer's only optimizer, if it has a
            single one, and `sinks` are its loggers.

    Returns:
        A `Callback` with the attribute `watch`, None until training begins.
    """

    class LightningWatchCallback(_callback_class()):  # type: ignore[misc]
        """Callback that watches training."""

        def __init__(self) -> None:
            super().__init__()
            self.watch: Watch | None = None
            self._losses: list[Any] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Make the first measurement."""
            watch_options = {"sinks": list(trainer.loggers), **options}
            model = _without_trainer(pl_module) if network is None else network(pl_module)
            if "optimizer" not in options and len(trainer.optimizers) == 1:
                optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
                # The watched module may not be trained by gradients, for example averaged weights.
                watch_options["optimizer"] = optimizer if trains(optimizer, model) else None
            self.watch = watch(model, probe=probe, out=out, **watch_options)
            self.watch.__enter__()
            self.watch.steps = max(self.watch.steps, trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Record a step if the optimizer took one; gradients may accumulate over several batches."""
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self._losses.append(loss.detach())
            if self.watch is not None and trainer.global_step > self.watch.steps:
                # The loss of a batch is already divided by the number of accumulated batches.
                total = sum(self._losses) if self._losses else None
                self._losses = []
                self.watch.step(loss=total, step=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Make the last measurement."""
            self._leave(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Make the last measurement."""
            self._leave(exception)

        def _leave(self, error: BaseException | None) -> None:
            if self.watch is not None:
                self.watch.__exit__(None if error is None else type(error), error, None)

    return LightningWatchCallback()


def _without_trainer(module: Any) -> Any:
    """Return a shallow copy of the module without its trainer, so that deep copies exclude the trainer."""
    module_copy = copy.copy(module)
    for name in ("_trainer", "_fabric"):
        if name in module_copy.__dict__:
            module_copy.__dict__[name] = None
    return module_copy


def _callback_class() -> Any:
    """Return `Callback` of the package that is imported, or can be imported."""
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name].Callback
    for name in _PACKAGES:
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise FeatlearnError("neither lightning nor pytorch_lightning is installed; pip install 'featlearn[lightning]'")
