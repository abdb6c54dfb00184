"""Checkpoints give the run that a live watch records, whatever happens in between."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CheckpointError, InputTypeError, RunError
from featlearn.monitoring import description as description_module
from featlearn.record import Run

from .children import Child, children, wait_for

STEPS = (0, 1, 3, 10, 24)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 2),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(20, 3),
    ).double()


class Transformer(nn.Module):
    """One block of attention over four tokens, with a tied read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(x)))


def transformer() -> nn.Module:
    return Transformer().double()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(samples: int, seed: int) -> Tensor:
    return torch.randint(7, (samples, 4), generator=torch.Generator().manual_seed(seed))


def labeled(x: Tensor, classes: int = 3) -> tuple[Tensor, Tensor]:
    return x, torch.arange(len(x)) % classes


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "mlp": (mlp, lambda samples, seed: labeled(numbers(samples, 5, seed=seed)), {}),
    "cnn with batch norm": (cnn, lambda samples, seed: labeled(numbers(samples, 2, 5, 5, seed=seed)), {}),
    "transformer": (
        transformer,
        lambda samples, seed: labeled(tokens(samples, seed), 7),
        {"readout": fl.readouts.last_token},
    ),
}


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name][0]()


def saved_while_watched(name: str, folder: Path, out: Path) -> Run:
    """A live run measured at STEPS, its checkpoints saved into the folder."""
    model, (_, data, options) = built(name), CASES[name]
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    folder.mkdir()

    def save(step: int) -> None:
        if step in STEPS:
            torch.save(model.state_dict(), folder / f"step{step}.pt")

    save(0)
    with fl.watch(
        model, probe=data(9, 1), test=data(7, 2), out=out, every=lambda step: step in STEPS, budget=None, **options
    ) as seen:
        for step in range(1, STEPS[-1] + 1):
            x, y = data(20, 10 + step)
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs if outputs.dim() == 2 else outputs[:, -1], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            save(step)
            seen.step()
    return seen.run


def measured(case: str, folder: Any, out: Path, **changes: Any) -> Run:
    _, data, options = CASES[case]
    given = {"model": built(case, seed=5), "probe": data(9, 1), "test": data(7, 2), **options, **changes}
    return fl.watch_checkpoints(checkpoints=folder, out=out, **given)


def assert_same(found: Run, expected: Run, steps: tuple[int, ...] = STEPS, velocity: float = 1e-6) -> None:
    """All scalars and arrays equal to 1e-6; after a resume a velocity is from a kernel in single precision."""
    assert [line["step"] for line in found.lines] == [line["step"] for line in expected.lines] == list(steps)
    for one, other in zip(found.lines, expected.lines, strict=True):
        assert one["values"].keys() == other["values"].keys()
        for name, value in other["values"].items():
            close = velocity if name == "ntk/velocity" else 1e-6
            assert one["values"][name] == pytest.approx(value, rel=close, abs=1e-9, nan_ok=True), (one["step"], name)
    assert found.arrays == expected.arrays
    for name, taken in expected.arrays.items():
        for step in taken:
            one, other = found.array(name, step), expected.array(name, step)
            assert one.keys() == other.keys(), (name, step)
            for key, array in other.items():
                size = 1e-6 * numpy.abs(array).max(initial=0.0)
                numpy.testing.assert_allclose(one[key], array, rtol=1e-6, atol=size, err_msg=f"{name} {step} {key}")


def assert_close(found: Any, expected: Any) -> None:
    """JSON documents that are equal, numbers to 1e-6."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        number = isinstance(expected, float)
        assert found == (pytest.approx(expected, rel=1e-6, abs=1e-9) if number else expected)


@pytest.fixture(scope="module", params=list(CASES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Run]:
    folder = tmp_path_factory.mktemp("trained")
    return request.param, folder / "saved", saved_while_watched(request.param, folder / "saved", folder / "live")


@pytest.fixture(scope="module")
def mlps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("mlps")
    return folder / "saved", saved_while_watched("mlp", folder / "saved", folder / "live")


def _summary_without_cost(run: Run) -> list[str]:
    """Lines of the summary but for the overhead, which checkpoints do not know."""
    return [line for line in str(fl.diagnose(run)).splitlines() if not line.strip().startswith("Overhead")]


def test_the_run_and_its_diagnosis_are_those_of_a_live_watch(trained: tuple[str, Path, Run], tmp_path: Path):
    name, folder, live = trained
    run = measured(name, folder, tmp_path / "live")
    assert_same(run, live)
    one, other = (json.loads(fl.diagnose(each).to_json()) for each in (run, live))
    assert _summary_without_cost(run) == _summary_without_cost(live)
    assert_close(one, other)
    own = {"created", "every", "checkpoints", "seed", "overhead", "measuring", "wall_share"}
    assert {k: v for k, v in run.config.items() if k not in own} == {
        k: v for k, v in live.config.items() if k not in own
    }
    assert run.config["overhead"] is run.config["wall_share"] is None
    assert [one["name"] for one in run.config["checkpoints"]] == [f"step{step}.pt" for step in STEPS]
    assert [event["kind"] for event in run.events] == ["started", "finished"]


def test_the_model_is_left_as_it_was(trained: tuple[str, Path, Run], tmp_path: Path):
    name, folder, _ = trained
    model = built(name, seed=5).train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def load(inner: nn.Module, path: Path) -> None:
        torch.rand(3), random.random(), numpy.random.rand()
        inner.load_state_dict(torch.load(path))
        inner.eval()

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    measured(name, folder, tmp_path / "run", model=model, load=load)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert bool((next(model.parameters()).grad == 1).all())


def test_own_formats_are_read_by_a_function_of_ones_own(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    for step in STEPS:
        state = torch.load(folder / f"step{step}.pt")
        numpy.savez(tmp_path / f"weights-{step}.npz", **{key: value.numpy() for key, value in state.items()})
    (tmp_path / "README.txt").write_text("no checkpoint")

    def states(model: nn.Module, path: Path) -> dict[str, Tensor]:
        with numpy.load(path) as arrays:
            return {key: torch.from_numpy(arrays[key]) for key in arrays}

    def into(model: nn.Module, path: Path) -> None:
        model.load_state_dict(states(model, path))

    for number, load in enumerate((states, into)):
        assert_same(measured("mlp", tmp_path, tmp_path / f"run{'ab'[number]}", load=load), live)


def test_what_the_function_gets_need_not_be_a_file(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    given = [(step, f"revision {step}") for step in STEPS]
    seen = []

    def load(model: nn.Module, revision: str) -> None:
        seen.append(revision)
        model.load_state_dict(torch.load(folder / f"step{revision.split()[1]}.pt"))

    assert_same(measured("mlp", given, tmp_path / "run", load=load), live)
    assert seen == [revision for _, revision in given]


def test_a_state_dict_may_stand_for_a_path(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    initial = torch.load(folder / "step0.pt")
    given = [(step, folder / f"step{step}.pt") for step in STEPS[1:]]
    assert_same(measured("mlp", [*given, (0, initial)], tmp_path / "run"), live)
    initial["0.weight"] += 1
    with pytest.raises(RunError, match=r"step 0 \(a state dict\) has changed"):
        measured("mlp", [*given, (0, initial)], tmp_path / "run")


def test_a_second_call_measures_only_what_is_new(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    given = [(step, folder / f"step{step}.pt") for step in STEPS]
    measured("mlp", given[:3], tmp_path / "live")
    first = {f: f.stat().st_mtime_ns for f in (tmp_path / "live" / "arrays" / "outputs").iterdir()}
    calls: list[int] = []

    def load(model: nn.Module, path: Path) -> None:
        calls.append(int(path.stem[4:]))
        model.load_state_dict(torch.load(path))

    run = measured("mlp", given, tmp_path / "live", load=load)
    assert calls == [0, 3, 10, 24], "the start, the last before, and the new ones"
    assert all(f.stat().st_mtime_ns == time for f, time in first.items())
    for line, other in zip(run.lines, live.lines, strict=True):
        for name, value in other["values"].items():
            close = 1e-4 if name == "ntk/velocity" else 1e-6
            assert line["values"][name] == pytest.approx(value, rel=close, abs=1e-9, nan_ok=True), (line["step"], name)
    assert [one["step"] for one in run.config["checkpoints"]] == list(STEPS)
    before = {f: f.read_bytes() for f in (tmp_path / "live").rglob("*") if f.is_file()}
    calls.clear()
    again = measured("mlp", given, tmp_path / "live", load=load)
    assert not calls
    assert again.lines == run.lines
    assert {f: f.read_bytes() for f in (tmp_path / "live").rglob("*") if f.is_file()} == before


def test_a_start_too_large_to_be_stored_is_read_again(
    mlps: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, live = mlps
    monkeypatch.setattr(description_module, "LARGEST_STATE", 10)
    given = [(step, folder / f"step{step}.pt") for step in STEPS]
    measured("mlp", given[:2], tmp_path / "run")
    run = measured("mlp", given, tmp_path / "run")
    assert "initial" not in run.arrays
    for name in ("features/0/centered", "weights/distance", "layers/0--2/balance_drift", "ntk/distance"):
        numpy.testing.assert_allclose(run.scalar(name)[1], live.scalar(name)[1], rtol=1e-6, atol=1e-9)


def test_a_kill_loses_the_measurement_in_progress_at_most(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    child = Child("killed_checkpoints.py", folder, tmp_path / "live", 10, log=tmp_path / "log")
    with children(child):  # killed while step 10 is loaded
        wait_for(lambda: child.process.poll() is not None, [child], 60)
    assert child.process.returncode == -9, child.said
    assert [line["step"] for line in fl.open_run(tmp_path / "live").lines] == [0, 1, 3]
    assert_same(measured("mlp", folder, tmp_path / "live"), live, velocity=1e-4)


def test_a_run_killed_before_its_end_is_completed(mlps: tuple[Path, Run], tmp_path: Path):
    """All checkpoints are measured, and what only the last measurement records is missing."""
    folder, live = mlps
    child = Child("killed_checkpoints.py", folder, tmp_path / "live", "end", log=tmp_path / "log")
    with children(child):
        wait_for(lambda: child.process.poll() is not None, [child], 60)
    assert child.process.returncode == -9, child.said
    cut = fl.open_run(tmp_path / "live")
    assert "cross" in cut.array("test", 0)
    assert "cross" not in cut.array("test", STEPS[-1])
    assert cut.config["finished"] is False
    assert_same(measured("mlp", folder, tmp_path / "live"), live)


def test_a_bad_file_is_named_and_what_was_measured_before_is_kept(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    (tmp_path / "saved").mkdir()
    for step in STEPS:
        (tmp_path / "saved" / f"step{step}.pt").write_bytes((folder / f"step{step}.pt").read_bytes())
    bad = tmp_path / "saved" / "step10.pt"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"step 10 \(.*step10.pt\) is damaged"):
        measured("mlp", tmp_path / "saved", tmp_path / "live")
    cut = fl.open_run(tmp_path / "live")
    assert [line["step"] for line in cut.lines] == [0, 1, 3]
    for name, value in cut.lines[-1]["values"].items():
        if name.startswith("ntk/test/"):  # the live run went on, and has them at its end
            continue
        assert value == pytest.approx(live.lines[2]["values"][name], rel=1e-6, abs=1e-9, nan_ok=True), name
    bad.write_bytes((folder / "step10.pt").read_bytes())
    run = measured("mlp", tmp_path / "saved", tmp_path / "live")
    assert [line["step"] for line in run.lines] == list(STEPS)
    numpy.testing.assert_allclose(run.array("kernel", 24)["full"], live.array("kernel", 24)["full"], rtol=1e-5)


def test_a_failing_function_is_named_and_leaves_no_trace_in_the_run(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps

    def load(model: nn.Module, path: Path) -> None:
        model.load_state_dict(torch.load(path))
        if path.name == "step10.pt":
            with torch.no_grad():
                model[0].weight.fill_(7.0)
            raise KeyError("lost")

    with pytest.raises(CheckpointError, match=r"load\(model, path\) failed on .*step10.pt\): KeyError: 'lost'"):
        measured("mlp", folder, tmp_path / "run", load=load)
    run = fl.open_run(tmp_path / "run")
    assert [line["step"] for line in run.lines] == [0, 1, 3]
    numpy.testing.assert_allclose(run.array("kernel", 3)["mean"], live.array("kernel", 3)["mean"], rtol=1e-6)
    assert run.array("kernel", 3)["full"].shape == (9, 9, 3, 3), "the last measurement, of the weights of step 3"
    assert numpy.trace(run.array("kernel", 3)["full"].mean((2, 3))) < 1e3


def test_another_run_is_not_gone_on_with(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    given = [(step, folder / f"step{step}.pt") for step in (0, 10, 24)]
    measured("mlp", given[:2], tmp_path / "run")
    probe, test = CASES["mlp"][1](9, 1), CASES["mlp"][1](7, 2)
    with pytest.raises(RunError, match="was not made from checkpoints"):
        measured("mlp", given, live.path)
    with pytest.raises(RunError, match="another probe"):
        measured("mlp", given, tmp_path / "run", probe=(probe[0] + 1, probe[1]))
    with pytest.raises(RunError, match="another test"):
        measured("mlp", given, tmp_path / "run", test=None)
    with pytest.raises(RunError, match="another test"):
        measured("mlp", given, tmp_path / "run", test=(test[0] + 1, test[1]))
    with pytest.raises(RunError, match="another choice of quantities"):
        measured("mlp", given, tmp_path / "run", quantities=["kernel"])
    with pytest.raises(RunError, match="another model"):
        measured("mlp", given, tmp_path / "run", model=nn.Sequential(nn.Linear(5, 3)).double())
    with pytest.raises(RunError, match=r"step 1 \(.*step1.pt\) is new, .* it has measured step 10"):
        measured("mlp", [*given, (1, folder / "step1.pt")], tmp_path / "run")
    with pytest.raises(RunError, match="step 10, which is not among the checkpoints"):
        measured("mlp", [given[0], given[2]], tmp_path / "run")
    assert [line["step"] for line in fl.open_run(tmp_path / "run").lines] == [0, 10]
    run = measured("mlp", [*given, (1, folder / "step1.pt")], tmp_path / "run", overwrite=True)
    assert [line["step"] for line in run.lines] == [0, 1, 10, 24]


def test_a_file_that_was_written_anew_is_not_taken_for_the_old_one(mlps: tuple[Path, Run], tmp_path: Path):
    folder, _ = mlps
    (tmp_path / "saved").mkdir()
    for step in (0, 1):
        (tmp_path / "saved" / f"step{step}.pt").write_bytes((folder / f"step{step}.pt").read_bytes())
    measured("mlp", tmp_path / "saved", tmp_path / "run")
    torch.save(built("mlp", seed=9).state_dict(), tmp_path / "saved" / "step1.pt")
    with pytest.raises(RunError, match=r"step1.pt\) has changed since; .* overwrite=True"):
        measured("mlp", tmp_path / "saved", tmp_path / "run")
    run = measured("mlp", tmp_path / "saved", tmp_path / "run", overwrite=True)
    assert run.scalar("weights/distance")[1][-1] > 0.5


def test_settings_quantities_and_names_are_those_of_a_watch(mlps: tuple[Path, Run], tmp_path: Path):
    run = measured(
        "mlp",
        mlps[0],
        tmp_path / "run",
        quantities=["weights"],
        name="mine",
        settings={"width": 8},
        loss="cross-entropy",
        test=None,
    )
    assert (run.name, run.config["settings"]) == ("mine", {"width": 8})
    assert run.config["loss_convention"] == "cross-entropy"
    assert not any(name.startswith("ntk/") for name in run.names)
    assert math.isfinite(run.scalar("weights/distance")[1][-1])


def test_wrapped_models_are_those_inside(mlps: tuple[Path, Run], tmp_path: Path):
    folder, live = mlps
    assert_same(measured("mlp", folder, tmp_path / "run", model=nn.DataParallel(built("mlp", seed=5))), live)


def test_what_cannot_be_used_is_refused_before_anything_is_written(mlps: tuple[Path, Run], tmp_path: Path):
    folder, _ = mlps
    with pytest.raises(InputTypeError, match="load is int, expected a function"):
        measured("mlp", folder, tmp_path / "run", load=3)
    with pytest.raises(InputTypeError, match="checkpoints is int, expected a folder"):
        measured("mlp", 3, tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        measured("mlp", folder, tmp_path / "run", model=nn.Linear(5, 3).double())
    with pytest.raises(fl.FeatlearnError, match=r"expected a torch\.nn\.Module"):
        measured("mlp", folder, tmp_path / "run", model=built("mlp").forward)
    with pytest.raises(CheckpointError, match=r"returned another Linear for .*step0.pt"):
        measured("mlp", folder, tmp_path / "run", load=lambda model, path: nn.Linear(2, 3))
    assert not (tmp_path / "run").exists()
