"""`fl.watch(live=True)` and `featlearn live`: an address is printed, and the server ends with what it serves."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.errors import FeatlearnError
from featlearn.monitoring.live_page import LivePage
from featlearn.monitoring.watch import Watch
from featlearn.record import RunWriter
from tests.reporting.live.serving import answer


def trained(out: Path, **options: object) -> tuple[list[float], Watch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    with fl.watch(model, (x, y), out=out, **options) as watch:
        for _ in range(20):
            loss = (model(x) - y).square().mean() + 0 * torch.rand(())
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watch.step(loss=loss)
            losses.append(loss.item())
    return losses, watch


def test_the_page_of_a_training_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pages: list[LivePage] = []
    begin = LivePage.__init__

    def kept(self: LivePage, path: Path) -> None:
        begun = time.monotonic()
        begin(self, path)
        assert time.monotonic() - begun < 0.5  # it does not wait for the server
        pages.append(self)

    monkeypatch.setattr(LivePage, "__init__", kept)
    monkeypatch.setattr(LivePage, "close", lambda self: None)
    losses, watch = trained(tmp_path / "live", live=True, quantities=["kernel"])
    monkeypatch.undo()
    (page,) = pages
    said, end = "", time.monotonic() + 20
    while "http" not in said:
        assert time.monotonic() < end
        time.sleep(0.05)
        said += capsys.readouterr().err
    place = urlsplit(re.search(r"http://\S+", said)[0])  # type: ignore[index]
    assert answer(place.port or 0, f"/?{place.query}")[0] == 200
    assert answer(place.port or 0, "/")[0] == 403
    arguments = Path(f"/proc/{page._process.pid}/cmdline")
    if arguments.exists():
        assert place.query.removeprefix("token=").encode() not in arguments.read_bytes()
    page.close()
    assert page._process.wait(15) == 0
    plain, other = trained(tmp_path / "plain", quantities=["kernel"])
    assert losses == plain
    assert watch.run.curves() == other.run.curves()


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from featlearn.monitoring.live_page import LivePage\n"
        "page = LivePage(Path(sys.argv[1])); print(page._process.pid, flush=True); time.sleep(60)"
    )
    RunWriter(tmp_path / "a", {})
    training = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert training.stdout is not None
    assert training.stderr is not None
    served, place = int(training.stdout.readline()), urlsplit(training.stderr.readline().split()[-1])
    assert answer(place.port or 0, f"/?{place.query}")[0] == 200
    training.kill()
    training.communicate()
    end = time.monotonic() + 15
    while _runs(served):
        assert time.monotonic() < end
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    if not state.parent.parent.joinpath("self").exists():
        pytest.skip("there is no /proc")
    return state.exists() and ") Z " not in state.read_text()


def test_the_extra_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(FeatlearnError, match=r"featlearn\[live\]"):
        trained(tmp_path / "a", live=True)
    assert not (tmp_path / "a").exists()


def test_sinks_are_checked_as_ever(tmp_path: Path):
    with pytest.raises(TypeError, match="sinks=5"):
        trained(tmp_path / "a", live=True, sinks=5)


def test_the_command_prints_its_address_and_ends_with_an_interrupt(tmp_path: Path):
    RunWriter(tmp_path / "a", {}).scalars(0, {"loss": 1.0})
    words = [sys.executable, "-m", "featlearn", "live", str(tmp_path)]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None
    stop = threading.Timer(60, command.kill)
    stop.start()
    said = command.stderr.readline()
    place = urlsplit(re.search(r"http://\S+", said)[0])  # type: ignore[index]
    assert place.hostname == "127.0.0.1"
    assert answer(place.port or 0, f"/?{place.query}")[0] == 200
    command.send_signal(signal.SIGINT)
    out, rest = command.communicate(timeout=20)
    stop.cancel()
    assert (command.returncode, out, rest) == (0, f"ended: {tmp_path}\n", "")
