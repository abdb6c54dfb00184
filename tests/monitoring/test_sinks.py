"""Numbers go where they are sent, and a broken sink stops nothing."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from featlearn.errors import FeatlearnError
from featlearn.monitoring.entry import watch
from featlearn.monitoring.sinks import HEADLINES


class Kept:
    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, metrics))

    def close(self) -> None:
        self.closed = True


def watched(path: Path, sinks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    probe = (torch.randn(6, 4), torch.arange(6) % 2)
    with watch(nn.Linear(4, 2), probe=probe, out=path, every=1, budget=None, sinks=sinks, **options) as seen:
        for _ in range(3):
            seen.step(loss=0.5)
    return seen


def test_a_sink_gets_what_is_recorded(tmp_path: Path):
    kept = Kept()
    run = watched(tmp_path / "run", [kept], send="all").run
    overheads = [metrics.pop("measuring/overhead") for _, metrics in kept.lines]  # type: ignore[attr-defined]
    assert overheads[0] == 0 < overheads[1]
    assert repr([(line["step"], line["values"]) for line in run.lines]) == repr(kept.lines)  # nan is not nan
    assert kept.closed


def test_by_default_a_sink_gets_about_ten_numbers(tmp_path: Path):
    """A network of many layers, and numbers of the user."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())))
    probe, sent, chosen = (torch.randn(9, 4), torch.arange(9) % 4), Kept(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"every": 1, "budget": None, "optimizer": optimizer, "test": probe}
    for sink, send in ((sent, "headlines"), (chosen, ["gap/*", "weights/norm"])):
        out = tmp_path / f"run {len(send)}"
        with watch(model, probe=probe, out=out, sinks=[sink], send=send, **options) as seen:
            for _ in range(3):
                nn.functional.cross_entropy(model(probe[0]), probe[1]).backward()
                optimizer.step()
                seen.step(loss=0.5, reward=2.0)
    assert set(sent.lines[-2][1]) == {*HEADLINES, "reward"}
    assert len(seen.run.names) > 80
    assert {name.partition("/")[0] for name in chosen.lines[-2][1]} == {"gap", "weights", "reward"}


@pytest.mark.parametrize("send", ["some", ["loss", 3], 7])
def test_what_is_sent_is_checked(send: Any, tmp_path: Path):
    with pytest.raises(FeatlearnError, match="expected 'headlines', 'all', or a list of names"):
        watched(tmp_path / "run", [Kept()], send=send)


def test_a_broken_sink_is_left_alone(tmp_path: Path):
    class Broken(Kept):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            super().log_metrics(metrics, step)
            if step == 1:
                raise OSError("no connection")

    broken, kept = Broken(), Kept()
    with pytest.warns(UserWarning, match="Broken failed and gets no more numbers: no connection"):
        run = watched(tmp_path / "run", [broken, kept]).run
    assert [step for step, _ in broken.lines] == [0, 1]
    assert [step for step, _ in kept.lines] == [0, 1, 2, 3]
    assert [event["what"] for event in run.events if event["kind"] == "failed"] == ["Broken"]


class Run:
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self.metrics: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []
        self.artifacts: list[tuple[str, str]] = []
        self.alerts: list[str] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, data: dict[str, float]) -> None:  # no step=: it belongs to the user
        self.logged.append(data)

    def log_artifact(self, path: str, name: str, type: str) -> None:
        self.artifacts.append((path, type))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)

    def finish(self) -> None:
        self.finished = True


def test_a_run_of_wandb_that_is_under_way_keeps_its_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    watched(tmp_path / "run", "wandb")
    assert [line["watch/step"] for line in run.logged] == [0, 1, 2, 3]
    assert all(line.keys() <= run.metrics.keys() for line in run.logged)
    assert run.metrics["ntk/centered_alignment"] == "watch/step"
    assert run.artifacts == [(str(tmp_path / "run" / "report.html"), "report")]
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    assert "watch/loss" in run.metrics
    assert "loss" not in run.metrics, "it may be the user's"
    assert not run.finished, "the user does that"


def test_without_a_run_of_wandb_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=lambda **options: run))
    watched(tmp_path / "run", ["wandb"])
    assert run.finished
    assert len(run.logged) == 4


def test_tensorboard_reads_what_is_written(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = watched(tmp_path / "run", "tensorboard").run
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("ntk/centered_alignment")]
    steps, values = run.scalar("ntk/centered_alignment")
    assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in zip(steps, values, strict=True)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_what_is_not_installed_is_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(FeatlearnError, match=rf"pip install 'featlearn\[{name}\]'"):
        watched(tmp_path / "run", [name])
    assert not (tmp_path / "run").exists(), "it can be tried again"


def test_wandb_keeps_what_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real run of wandb, offline, whose counter stays the user's."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true"), ("START_TIMEOUT", "60")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    with wandb.init(project="tests", mode="offline", dir=tmp_path) as run:
        run.log({"own": 1.0})
        seen = watched(tmp_path / "run", "wandb").run
        steps, values = seen.scalar("ntk/centered_alignment")
        assert run.summary["watch/step"] == steps[-1]
        assert run.summary["ntk/centered_alignment"] == pytest.approx(values[-1])
        assert run.summary["watch/loss"] == 0.5
        assert "loss" not in run.summary.keys()  # noqa: SIM118 (its own mapping)
        assert run.step == 1 + len(seen.lines), "one for each line, after the user's own"
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_trackio_keeps_what_is_logged(tmp_path: Path):
    """A real run of trackio on disk, in a process of its own: it reads its folder when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    program = f"""if True:
        import sys
        sys.path[:0] = {sys.path!r}
        import trackio
        from pathlib import Path
        from tests.monitoring.test_sinks import watched
        run = watched(Path({str(tmp_path / "run")!r}), "trackio").run
        from trackio.sqlite_storage import SQLiteStorage
        logs = SQLiteStorage.get_logs("featlearn", "run")
        assert [line["watch/step"] for line in logs] == [0, 1, 2, 3], logs
        steps, values = run.scalar("ntk/norm")
        assert abs(logs[-1]["ntk/norm"] - values[-1]) < 1e-9 * values[-1]
        assert "watch/loss" in logs[1]
    """
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
