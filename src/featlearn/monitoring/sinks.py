"""Further destinations of the numbers of a run: TensorBoard, Weights & Biases, Trackio, objects with `log_metrics`."""

import importlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError
from featlearn.record import open_run
from featlearn.record.layout import USER

HEADLINES = (
    "loss",
    "lr",
    "probe/loss",
    "probe/accuracy",
    "test/loss",
    "test/accuracy",
    "gap/link",
    "features/moved",
    "ntk/centered_alignment",
    "ntk/centered_distance",
    "ntk/norm",
    "measuring/overhead",
)
"""Numbers that sinks get by default, beside those of the user."""

Send = str | Sequence[str]
"""`"headlines"`, `"all"`, or a list of patterns such as `"gap/*"`."""

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
_EXPECTED = "'tensorboard', 'wandb', 'trackio', or an object with log_metrics(mapping, step)"


class Sink(Protocol):
    """Receives the numbers of a step.

    A sink may also have `log_alert(alert)`, for alerts as mappings, and `close()`.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers by name."""


def listed(sinks: Any) -> list[Any]:
    """Return the argument `sinks` as a list; raise for a sink that is unknown or not installed."""
    several = [sinks] if isinstance(sinks, str) or hasattr(sinks, "log_metrics") else sinks
    if not isinstance(several, Sequence):
        raise InputTypeError(f"sinks={sinks!r}, expected a list of {_EXPECTED}")
    for sink in several:
        if sink == "live":
            from featlearn.monitoring.live_page import require_live_extra

            require_live_extra()
        elif isinstance(sink, str) and sink in _MODULES:
            _module(sink)
        elif not callable(getattr(sink, "log_metrics", None)):
            raise InputTypeError(f"sinks has {sink!r}, expected {_EXPECTED}")
    return list(several)


def checked_send(send: Any) -> tuple[str, ...]:
    """Return the patterns of the names that are sent."""
    if send in ("headlines", "all"):
        return HEADLINES if send == "headlines" else ("*",)
    if isinstance(send, str) or not isinstance(send, Sequence) or not all(isinstance(name, str) for name in send):
        raise InputValueError(
            f"send={send!r}, expected 'headlines', 'all', or a list of names such as ['gap/*', 'loss']"
        )
    return tuple(send)


def is_sent(name: str, patterns: Sequence[str]) -> bool:
    """Whether a number goes to the sinks: it matches a pattern, or it is the user's own."""
    return name.startswith(USER) or any(fnmatchcase(name, pattern) for pattern in patterns)


def open_sink(sink: Any, path: Path) -> Sink:
    """Return a sink that is ready for numbers."""
    if sink == "live":
        from featlearn.monitoring.live_page import LivePage

        return LivePage(path)
    if isinstance(sink, str):
        return TensorBoard(path) if sink == "tensorboard" else Tracker(sink, path)
    opened: Sink = sink
    return opened


class TensorBoard:
    """Event files in a folder of the run; needs the extra `tensorboard`."""

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, 0
        self._writer = _module("tensorboard").SummaryWriter(str(path / "tensorboard"))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of one step."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_alert(self, alert: Mapping[str, Any]) -> None:
        """Log an alert as text."""
        self._writer.add_text("alerts", f"{alert['text']}. {alert['action']}", alert["step"])

    def close(self) -> None:
        """Name the report, and close the writer."""
        self._writer.add_text("report", f"`featlearn report {self._path}`", self._step)
        self._writer.close()


class Tracker:
    """The active run of wandb or trackio, or a new one; needs the extra of that name.

    The step counter of an active run belongs to the user. Numbers have a metric `watch/step` beside them instead, over
    which wandb draws them. Names without a slash (`loss`, `lr`), which the user may log as well, are prefixed with
    `watch/`. The report becomes an artifact at the end.
    """

    STEP = "watch/step"

    def __init__(self, name: str, path: Path) -> None:
        self._path, self._module = path, _module(name)
        self._run = _active_run(self._module)
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = self._module.init(project="featlearn", name=path.name)
        self._define = getattr(self._run, "define_metric", lambda name, **options: None)  # trackio has none
        self._define(self.STEP, hidden=True)
        self._known: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of one step."""
        named = {name if "/" in name else f"watch/{name}": value for name, value in metrics.items()}
        for name in named.keys() - self._known:
            self._define(name, step_metric=self.STEP)
            self._known.add(name)
        self._run.log({**named, self.STEP: step})

    def log_alert(self, alert: Mapping[str, Any]) -> None:
        """Send an alert."""
        self._run.alert(title=f"{alert['kind']} at step {alert['step']}", text=f"{alert['text']}. {alert['action']}")

    def close(self) -> None:
        """Attach the report, and finish the run if this sink started it."""
        try:
            report = open_run(self._path).report(self._path / "report.html")
            self._run.log_artifact(str(report), name=f"report-{self._path.name}", type="report")
        finally:
            if self._is_ours:
                self._run.finish()


def _active_run(module: Any) -> Any:
    """Return the run that the user has begun, or None."""
    if hasattr(module, "context_vars"):  # trackio
        return module.context_vars.current_run.get()
    return module.run


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise FeatlearnError(f"{name} cannot be imported ({error}); pip install 'featlearn[{name}]'") from error
