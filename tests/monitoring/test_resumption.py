"""A run that was killed is opened, and goes on."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featlearn.errors import RunError
from featlearn.metrics import kernel_distance
from featlearn.monitoring import description as description_module
from featlearn.monitoring.entry import watch
from featlearn.record import open_run

from .children import Child, children, wait_for, wait_for_end


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def probe() -> tuple[Any, Any]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Any, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.step(loss=loss, step=number)


def begun(path: Path, until: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seen = watch(model, probe=probe(), out=path, every=1, budget=None, optimizer=optimizer, **options)
    seen.__enter__()
    steps(model, optimizer, seen, range(1, until + 1))
    return model, optimizer, seen


def without_time(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], line["values"]) for line in open_run(path).lines]


def test_a_resumed_run_is_the_run_itself(tmp_path: Path):
    _, _, whole = begun(tmp_path / "whole", 8)
    whole.__exit__(None, None, None)
    model, optimizer, _ = begun(tmp_path / "cut", 5)  # and is lost
    with watch(
        model, probe=probe(), out=tmp_path / "cut", every=1, budget=None, optimizer=optimizer, resume=True
    ) as seen:
        assert seen.steps == 5
        steps(model, optimizer, seen, range(4, 9))  # from a checkpoint that is older than the last line
    found, expected = (dict(without_time(tmp_path / name)) for name in ("cut", "whole"))
    assert found.keys() == expected.keys()
    for step in range(1, 9):
        assert found[step].keys() == expected[step].keys()
    assert seen.measurements == seen.run.config["measurements"] == whole.measurements == 9, "none is counted twice"
    # the weights of steps 4 and 5 were made twice, so that the network is further on; what compares with the start
    # must be there, and be about as large
    assert found[8]["weights/distance"] == pytest.approx(expected[8]["weights/distance"], rel=0.8)
    assert "features/0/centered" in found[8]
    assert [event["kind"] for event in seen.run.events] == ["started", "resumed", "finished"]
    assert seen.run.config["finished"]


def test_where_the_run_began_is_known_exactly_after_a_resume(tmp_path: Path):
    _, _, whole = begun(tmp_path / "whole", 8)
    whole.__exit__(None, None, None)
    model, optimizer, _ = begun(tmp_path / "cut", 5)
    with watch(
        model, probe=probe(), out=tmp_path / "cut", every=1, budget=None, optimizer=optimizer, resume=True
    ) as seen:
        steps(model, optimizer, seen, range(6, 9))
    found, expected = (dict(without_time(tmp_path / name)) for name in ("cut", "whole"))
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        # kernels are on disk in single precision, and the last of them is what the sixth is compared with
        close = {name: 1e-4 if (step, name) == (6, "ntk/velocity") else 1e-6 for name in values}
        assert found[step].keys() == values.keys()
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value, rel=close[name], abs=1e-9, nan_ok=True), (step, name)


def kernel(run: Any, step: int) -> torch.Tensor:
    return torch.from_numpy(run.array("kernel", step)["mean"])


def test_a_velocity_is_from_the_last_kernel_on_disk_before_it(tmp_path: Path):
    """Kernels at 0, 4 and, from a part that is made again, 8: the next, at 6, is compared with that at 4."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = {"probe": probe(), "out": tmp_path / "run", "budget": None, "quantities": ["kernel"]}
    first = watch(model, every=4, **given).__enter__()
    steps(model, optimizer, first, range(1, 9))
    with watch(model, every=lambda step: step in (6, 7), resume=True, **given) as seen:
        steps(model, optimizer, seen, range(5, 8))
    run = seen.run
    velocity = dict(zip(*(part.tolist() for part in run.scalar("ntk/velocity")), strict=True))
    assert velocity.keys() == {4, 6, 7, 8}
    assert velocity[6] == pytest.approx(float(kernel_distance(kernel(run, 6), kernel(run, 4))) / 2, rel=1e-4)
    assert velocity[7] == pytest.approx(float(kernel_distance(kernel(run, 7), kernel(run, 6))), rel=1e-4)
    (tmp_path / "run" / "arrays" / "kernel" / f"{8:012d}.npz").write_bytes(b"damaged")
    with watch(model, every=1, resume=True, **given) as seen:
        steps(model, optimizer, seen, range(9, 11))
    assert seen.run.scalar("ntk/velocity")[0].tolist() == [4, 6, 7, 8, 10], "what is not known is left out"


def test_what_a_resumed_run_cost_is_the_sum_where_it_is_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    model, optimizer, first = begun(tmp_path / "run", 3)
    first.__exit__(None, None, None)
    before = first.run.config
    given = {"probe": probe(), "out": tmp_path / "run", "every": 2, "budget": None, "optimizer": optimizer}
    with watch(model, resume=True, **given) as seen:
        assert seen.run.config["overhead"] is None, "it would not be known if this process were killed"
        assert seen.measurements == 4
        steps(model, optimizer, seen, range(4, 8))
    config, lines = seen.run.config, seen.run.lines
    assert config["measurements"] == 7, "0 to 3, 4, 6 and 7"
    assert config["measuring"] > before["measuring"] > 0
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds), "of training, by both"
    assert "since step" not in capfd.readouterr().err
    lost = watch(model, resume=True, **given).__enter__()
    steps(model, optimizer, lost, range(8, 10))
    with watch(model, resume=True, **given) as seen:
        steps(model, optimizer, seen, range(9, 12))
    assert "10 measurements in 11 steps" in (said := capfd.readouterr().err), "8, 10 and 11 as well"
    assert ", since step 8: " in said
    assert seen.run.config["measuring"] < config["measuring"], "of what was not lost"


def test_settings_of_a_resumed_run(tmp_path: Path):
    model, _, _ = begun(tmp_path / "run", 2, settings={"part": 1})
    for settings, expected in ((None, 1), ({"part": 1}, 1), ({"part": 2}, 2)):
        with watch(model, probe=probe(), out=tmp_path / "run", resume=True, settings=settings) as seen:
            assert seen.run.config["settings"] == {"part": expected}
    told = [event.get("settings_before") for event in seen.run.events if event["kind"] == "resumed"]
    assert told == [None, None, {"part": 1}]


def test_a_start_too_large_to_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(description_module, "LARGEST_STATE", 10)
    model, optimizer, _ = begun(tmp_path / "run", 5)
    with pytest.warns(UserWarning, match="too large to be stored"):
        seen = watch(model, probe=probe(), out=tmp_path / "run", every=1, budget=None, resume=True).__enter__()
    steps(model, optimizer, seen, range(6, 8))
    seen.__exit__(None, None, None)
    run = seen.run
    assert "initial" not in run.arrays
    assert run.scalar("ntk/distance")[0].tolist() == list(range(8)), "from the first kernel, which is on disk"
    assert run.scalar("ntk/distance")[1][-1] > run.scalar("ntk/distance")[1][1] > 0
    assert run.scalar("features/0/centered")[0].tolist() == [1, 2, 3, 4, 5]


def test_another_probe_or_model_is_refused(tmp_path: Path):
    model, _, _ = begun(tmp_path / "run", 2)
    x, y = probe()
    with pytest.raises(RunError, match="another probe"):
        watch(model, probe=(x + 1, y), out=tmp_path / "run", resume=True).__enter__()
    with pytest.raises(RunError, match="another model"):
        watch(nn.Linear(4, 2), probe=(x, y), out=tmp_path / "run", resume=True).__enter__()


def test_resume_without_a_run_begins_one(tmp_path: Path):
    _, _, seen = begun(tmp_path / "run", 2, resume=True)
    seen.__exit__(None, None, None)
    assert seen.run.scalar("ntk/norm")[0].tolist() == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills copies of a process")
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_lose_the_measurement_in_progress_at_most(kills: int, tmp_path: Path):
    child = Child("killed.py", tmp_path / "run", kills, 0, log=tmp_path / "log")
    with children(child):
        wait_for_end([child], 60 + 5 * kills)
    assert int(child.said.split()[-1]) > kills, "it came further between the kills"


def test_control_c_ends_a_run_in_order(tmp_path: Path):
    child = Child("endless.py", tmp_path / "run", log=tmp_path / "log")
    with children(child):
        wait_for(lambda: "entered" in child.said or child.process.poll() is not None, [child], 60)
        time.sleep(0.3)
        child.process.send_signal(signal.SIGINT)
        wait_for(lambda: child.process.poll() is not None, [child], 30)
    assert child.process.returncode != 0
    assert "KeyboardInterrupt" in child.said
    assert "featlearn: " in child.said
    run = open_run(tmp_path / "run")
    kinds = [event["kind"] for event in run.events]
    assert (kinds[0], kinds[-2:]) == ("started", ["interrupted", "finished"])
    assert run.scalar("ntk/norm")[0][-1] == run.config["steps"]
