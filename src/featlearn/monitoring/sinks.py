"""Further destinations of the numbers of a run: TensorBoard, Weights & Biases, any object with `log_metrics`."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from featlearn.errors import FeatlearnError, InputTypeError


class Sink(Protocol):
    """Receives the numbers of a step."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers by name."""


def sinks(given: Any, path: Path) -> list[Sink]:
    """The requested sinks, opened."""
    return [_opened(one, path) for one in listed(given)]


def listed(given: Any) -> Sequence[Any]:
    """The argument `sinks` as a list."""
    found = [given] if isinstance(given, str) or hasattr(given, "log_metrics") else given
    if not isinstance(found, Sequence):
        raise InputTypeError(
            f"sinks={given!r}, expected a list of 'tensorboard', 'wandb' and objects with log_metrics(mapping, step)"
        )
    return found


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def checked_sinks(given: Any) -> None:
    """Raise for a sink that is unknown or not installed, before anything runs."""
    for one in [given] if isinstance(given, str) or not isinstance(given, Sequence) else given:
        if one == "live":
            from featlearn.monitoring.live_page import require_live_extra

            require_live_extra()
        elif isinstance(one, str) and one in _MODULES:
            _module(one)
        elif not callable(getattr(one, "log_metrics", None)):
            raise InputTypeError(
                f"sinks has {one!r}, expected 'tensorboard', 'wandb', or an object with log_metrics(mapping, step)"
            )


def _opened(one: Any, path: Path) -> Sink:
    if one == "live":
        from featlearn.monitoring.live_page import LivePage

        return LivePage(path)
    if isinstance(one, str):
        return TensorBoard(path / "tensorboard") if one == "tensorboard" else WandB(path)
    sink: Sink = one
    return sink


class TensorBoard:
    """Event files in a folder of the run; needs the extra `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        self._writer = _module("tensorboard").SummaryWriter(str(folder))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


class WandB:
    """The active run of wandb, or a new one; needs the extra `wandb`.

    The step counter of a wandb run belongs to the user. Numbers are drawn over a metric `watch/step` instead. Names
    without a slash (`loss`, `lr`), which the user may log as well, are prefixed with `watch/`.
    """

    STEP = "watch/step"

    def __init__(self, path: Path) -> None:
        wandb = _module("wandb")
        self._run = wandb.run
        self._own = self._run is None
        if self._own:
            self._run = wandb.init(project="featlearn", name=path.name)
        self._run.define_metric(self.STEP, hidden=True)
        self._known: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of one step."""
        named = {name if "/" in name else f"watch/{name}": value for name, value in metrics.items()}
        for name in named.keys() - self._known:
            self._run.define_metric(name, step_metric=self.STEP)
            self._known.add(name)
        self._run.log({**named, self.STEP: step})

    def close(self) -> None:
        """Finish the run if this sink started it."""
        if self._own:
            self._run.finish()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise FeatlearnError(f"{name} cannot be imported ({error}); pip install 'featlearn[{name}]'") from error
