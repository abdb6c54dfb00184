"""Lightning: a callback for its Trainer."""

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
    """A callback that watches what a Lightning Trainer trains.

        trainer = lightning.Trainer(callbacks=[fl.integrations.lightning.callback(probe=(x, y), out="runs/a")])

    Works with `lightning` and with `pytorch_lightning`, whichever is imported (their callbacks are different classes);
    with neither, the first that is installed.

    Args:
        probe, out: as for `fl.watch`.
        network: the module to watch, as a function of the LightningModule; by default the LightningModule itself, whose
            `forward` is called with the probe.
        options: further arguments of `fl.watch`. `optimizer` is taken from the Trainer where it has one only, and
            `sinks` are its loggers by default.

    Returns:
        A `Callback` with the attribute `watch`, None until training begins.
    """

    class LightningWatchCallback(_callback_class()):  # type: ignore[misc]
        """Watches what is trained."""

        def __init__(self) -> None:
            super().__init__()
            self.watch: Watch | None = None
            self._losses: list[Any] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """The first measurement."""
            given = {"sinks": list(trainer.loggers), **options}
            model = _alone(pl_module) if network is None else network(pl_module)
            if "optimizer" not in options and len(trainer.optimizers) == 1:
                optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
                # A part that is not trained by gradients, an average of the weights say, may be watched, too.
                given["optimizer"] = optimizer if trains(optimizer, model) else None
            self.watch = watch(model, probe=probe, out=out, **given)
            self.watch.__enter__()
            self.watch.steps = max(self.watch.steps, trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """One step, if the optimizer made one: gradients may be accumulated over several batches."""
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self._losses.append(loss.detach())
            if self.watch is not None and trainer.global_step > self.watch.steps:
                # The loss of a batch is divided by how many are accumulated.
                total = sum(self._losses) if self._losses else None
                self._losses = []
                self.watch.step(loss=total, step=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """The last measurement."""
            self._leave(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """The last measurement."""
            self._leave(exception)

        def _leave(self, error: BaseException | None) -> None:
            if self.watch is not None:
                self.watch.__exit__(None if error is None else type(error), error, None)

    return LightningWatchCallback()


def _alone(module: Any) -> Any:
    """The same module, sharing everything but its trainer: copies of it must not copy that."""
    alone = copy.copy(module)
    for name in ("_trainer", "_fabric"):
        if name in alone.__dict__:
            alone.__dict__[name] = None
    return alone


def _callback_class() -> Any:
    """`Callback` of the package that is imported already, or can be."""
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name].Callback
    for name in _PACKAGES:
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise FeatlearnError("neither lightning nor pytorch_lightning is installed; pip install 'featlearn[lightning]'")
