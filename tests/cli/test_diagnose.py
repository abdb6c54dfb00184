"""`featlearn diagnose` on small networks, and the pieces that it is made of."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.cli.app import main
from featlearn.cli.built_in_task import built_in_task
from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training import step_size
from featlearn.cli.training_task import TrainingTask, scale_task
from featlearn.cli.user_task import checked_task, user_task
from tests.cli.conftest import SMALL

OWN = """
import torch
from torch import nn

def setup():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), (x, x[:, :1] * x[:, 1:2]), "mse"

def mapping():
    model, data, _ = setup()
    return {"model": model, "data": data, "loss": nn.MSELoss(), "test": data,
            "optimizer": torch.optim.SGD(model.parameters(), 0.125)}

def broken():
    return nn.Linear(3, "a")

def wrong():
    return 1

def leaves():
    raise SystemExit(3)

def vector():
    return *setup()[:2], lambda output, y: output - y

def detached():
    return *setup()[:2], lambda output, y: (output - y).square().mean().detach()

def failing():
    return *setup()[:2], lambda output, y: output.no_such_thing

class Late(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 3:
            raise IndexError("first line\\nsecond line")
        return super().forward(x)

def late():
    print("not for stdout")
    return Late(3, 1), *setup()[1:]

def ours():
    import featlearn
    featlearn.open_run("nowhere")
"""


def small(**changes: object) -> TrainingSettings:
    return replace(TrainingSettings(samples=24, test=8, width=8, steps=12, output_scale=0.03), **changes)


def test_two_seeds_are_recorded_judged_and_reported(recorded: Path):
    assert sorted(path.name for path in recorded.iterdir()) == ["report.html", "seed-0", "seed-1"]
    runs = [fl.open_run(recorded / f"seed-{seed}") for seed in (0, 1)]
    for seed, run in enumerate(runs):
        assert run.config["seed"] == seed
        assert run.lines[-1]["step"] == 12
        assert run.config["settings"]["width"] == 8
        assert run.config["settings"]["output_scale"] == 0.03
    # but for weights and batches they are the same, so that a report can average them
    assert runs[0].config["settings"] == runs[1].config["settings"]
    assert runs[0].config["probe"] == runs[1].config["probe"]
    assert runs[0].array("outputs", 12)["f"].tolist() != runs[1].array("outputs", 12)["f"].tolist()


def test_it_prints_verdict_plot_and_places(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL, "--out", "a", "--no-report"]) == 0
    out, err = capsys.readouterr()
    assert str(fl.diagnose("a")) in out
    assert len(out.splitlines()) <= 20
    assert "kernel-task alignment" in out
    assert "step 1" in out
    assert "run:     a" in out
    assert err == ""
    assert "\033" not in out
    assert not Path("a/report.html").exists()


def test_advice_of_a_trained_network_was_tried(capsys: pytest.CaptureFixture[str]):
    options = ["--samples", "40", "--test", "20", "--width", "16", "--steps", "300", "--output-scale", "100", "--quiet"]
    assert main(["diagnose", *options, "--out", "a", "--no-report"]) == 0
    advice = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  Next:"))
    assert "(tried for" in advice
    assert "`featlearn diagnose --output-scale " in advice
    assert "(not tried)" in str(fl.diagnose("a"))


def test_all_statements_are_printed_on_request(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL, "--out", "a", "--no-report"]) == 0
    short = capsys.readouterr().out
    assert main(["diagnose", "a", "--all"]) == 0
    assert fl.diagnose("a").full in capsys.readouterr().out
    assert "thresholds:" not in short


def test_several_seeds_are_judged_each_and_together_within_100_columns(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL, "--seeds", "2", "--out", "a", "--no-report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("seed ")))
    each = [fl.diagnose(f"a/seed-{seed}") for seed in (0, 1)]
    for seed, (one, line) in enumerate(zip(each, lines[head + 1 : head + 3], strict=True)):
        assert line.split()[0] == f"seed-{seed}"
        assert one.regime in line
        assert f"{float(one.numbers['gap']):.3g}" in line.split()
    together = fl.diagnose(["a/seed-0", "a/seed-1"])
    assert str(together) in "\n".join(lines)
    assert max(map(len, lines[head:])) <= 100


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL[:-1], "--json", "--no-report"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    path = Path(found["runs"][0]["path"])
    assert path.parent == Path("runs")
    assert found["regime"] == found["diagnosis"]["regime"] == fl.diagnose(path).regime
    assert found["runs"][0]["settings"]["samples"] == 24
    assert "step=12 " in err


def test_a_second_run_goes_to_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert main(["diagnose", *SMALL, "--no-report"]) == 0
    first, second = sorted(Path("runs").iterdir())
    assert second.name == f"{first.name}-2"
    assert main(["diagnose", *SMALL, "--out", str(first)]) == 1
    assert "not empty" in capsys.readouterr().err


def test_the_same_seed_is_the_same_run():
    for name in ("a", "b"):
        assert main(["diagnose", *SMALL, "--batch", "5", "--out", name, "--no-report"]) == 0
    a, b = (fl.open_run(name).scalar("probe/loss")[1].tolist() for name in ("a", "b"))
    assert a == b


@pytest.mark.parametrize("place", ["own.py:setup", "own:setup", "own.py:mapping"])
def test_a_network_of_ones_own_is_trained_as_it_is(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    Path("own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["diagnose", place, "--steps", "5", "--quiet", "--no-report", "--out", "a"]) == 0
    run = fl.open_run("a")
    assert run.config["settings"]["subject"] == place
    assert run.config["model"]["class"] == "torch.nn.modules.container.Sequential"
    assert run.config["loss_convention"] == "mse"
    assert (run.config["settings"]["lr"] == 0.125) == ("mapping" in place)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "own.py, line 15); --debug"),
        ("wrong", "own.py:wrong returns int, expected (model, (x, y), loss)"),
        ("leaves", "own.py:leaves failed: SystemExit: 3 ("),
        ("vector", "the loss of own.py:vector gives a tensor of shape (20, 1), expected a tensor with a single number"),
        ("detached", "the loss of own.py:detached has no gradient"),
        ("failing", "own.py, line 30); --debug"),
        ("late", "own.py:late failed: IndexError: first line ("),
        ("ours", "own.py:ours failed: RunError: nowhere does not exist"),
    ],
)
def test_what_fails_in_ones_own_code_is_a_line_with_its_place(name: str, said: str, capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    assert main(["diagnose", f"own.py:{name}", "--steps", "6", "--quiet", "--no-report", "--json"]) == 1
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert said in error
    assert "\n" not in error
    assert err.endswith(f"featlearn: {error}\n")
    assert "Traceback" not in err


def test_what_ones_own_function_prints_is_not_in_the_answer(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    assert main(["diagnose", "own.py:late", "--steps", "2", "--no-report", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["complete"] is True
    assert "not for stdout" in err


def test_no_such_function_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    assert main(["diagnose", "own.py:setpu"]) == 2
    assert "own.py has no function 'setpu'; did you mean 'setup'?" in capsys.readouterr().err


X, Y, NET = torch.zeros(4, 3), torch.zeros(4, 2), nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"model": NET, "data": (X, Y)}, "no 'loss'"),
        ({"model": NET, "data": (X, Y), "loss": "mse", "optimzer": 1}, "did you mean 'optimizer'?"),
        ((NET.forward, (X, Y), "mse"), "expected a torch.nn.Module"),
        ((NET, X, "mse"), r"expected a pair \(x, y\)"),
        ((NET, (X, Y[:3]), "mse"), "4 inputs and targets of shape"),
        ((NET, (X, Y), "msee"), "loss of here: loss='msee'.*did you mean 'mse'"),
        ({"model": NET, "data": (X, Y), "loss": "mse", "optimizer": "sgd"}, "expected a torch.optim.Optimizer"),
    ],
)
def test_what_a_function_returns_is_checked(returned: object, said: str):
    with pytest.raises(fl.FeatlearnError, match=said):
        checked_task(returned, "here")


def test_options_of_the_built_in_network_are_refused_beside_ones_own():
    with pytest.raises(fl.FeatlearnError, match="--samples is passed with own:setup"):
        user_task("own:setup", TrainingSettings(samples=3))


def save_checkpoints(folder: Path, steps: Sequence[int]) -> None:
    """Weights of the network of OWN, trained a little."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    folder.mkdir(exist_ok=True)
    for step in range(max(steps) + 1):
        if step in steps:
            torch.save(model.state_dict(), folder / f"step{step}.pt")
        (model(x) - x[:, :1] * x[:, 1:2]).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


def test_checkpoints_are_measured_and_nothing_is_trained(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    save_checkpoints(Path("saved"), (0, 2, 9))
    options = ["diagnose", "own.py:mapping", "--checkpoints", "saved", "--out", "a", "--quiet"]
    assert main([*options, "--no-report"]) == 0
    out, err = capsys.readouterr()
    run = fl.open_run("a")
    assert [line["step"] for line in run.lines] == [0, 2, 9]
    assert run.config["settings"] == {"subject": "own.py:mapping", "probe": 256, "checkpoints": "saved"}
    assert run.config["loss_convention"] == "mse"
    assert run.config["test"]["samples"] == 20
    assert run.config["optimizer"] is None
    initial = torch.load("saved/step0.pt")
    assert all((run.array("initial", 0)[f"t{n}"] == value.numpy()).all() for n, value in enumerate(initial.values()))
    assert out.startswith("Sequential, 26 parameters: 9 steps\n")
    assert "--steps" not in out
    assert err == ""
    save_checkpoints(Path("more"), (0, 2, 9, 30))
    Path("more/step30.pt").rename("saved/step30.pt")
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] is True
    assert found["regime"] == fl.diagnose("a").regime
    assert [line["step"] for line in fl.open_run("a").lines] == [0, 2, 9, 30]
    assert Path("a/report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--checkpoints", "saved"], 2, "--checkpoints without FILE.py:function"),
        (["own.py:setup", "--checkpoints", "saved", "--steps", "5"], 2, "--steps is given beside --checkpoints"),
        (["own.py:setup", "--checkpoints", "saved", "--lr", "5"], 2, "--lr is given beside --checkpoints"),
        (["own.py:setup", "--checkpoints", "saved", "--seeds", "2"], 2, "--seeds is given beside --checkpoints"),
        (["own.py:setup", "--checkpoints", "none"], 1, "none is not a folder"),
        (["own.py:setup", "--checkpoints", "late"], 1, "the first checkpoint is of step 5, expected one of step 0"),
        (["own.py:setup", "--checkpoints", "broken"], 1, "broken/step0.pt) is damaged"),
    ],
)
def test_checkpoints_that_cannot_be_measured_are_told(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    Path("own.py").write_text(OWN)
    save_checkpoints(Path("saved"), (0,))
    save_checkpoints(Path("late"), (5,))
    Path("broken").mkdir()
    Path("broken/step0.pt").write_bytes(Path("saved/step0.pt").read_bytes()[:99])
    assert main(["diagnose", *words]) == code
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    import featlearn.cli.training as training

    step, count = training._step, [0]

    def interrupted(*args: object) -> object:
        count[0] += 1
        if count[0] == 7:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(training, "_step", interrupted)
    assert main(["diagnose", *SMALL, "--seeds", "3", "--out", "a", "--no-report", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] is False
    assert [Path(run["path"]).name for run in found["runs"]] == ["seed-0"]
    run = fl.open_run("a/seed-0")
    assert run.lines[-1]["step"] == 6
    assert run.config["settings"]["width"] == 8
    assert 6 in run.arrays["kernel"]


def test_ctrl_c_before_anything_is_measured_leaves_the_runs_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import featlearn.cli.training as training

    build = training.built_in_task

    def interrupted(settings: TrainingSettings) -> TrainingTask:
        if settings.seed == 1:
            raise KeyboardInterrupt
        return build(settings)

    monkeypatch.setattr(training, "built_in_task", interrupted)
    options = ["diagnose", *SMALL, "--no-report", "--json"]
    assert main([*options, "--seeds", "2", "--out", "a"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert [Path(run["path"]).name for run in found["runs"]] == ["seed-0"]
    assert found["complete"] is False
    assert main([*options, "--seed", "1", "--out", "b"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


def test_a_rate_that_is_too_large_is_told(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL, "--lr", "1e9", "--no-report"]) == 1
    out = capsys.readouterr().out
    assert "training broke down" in out
    assert "Lower the learning rate." in out


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_the_default_rate_is_stable_at_every_output_scale(loss: str, scale: float, optimizer: str):
    """rate x curvature x largest eigenvalue of the kernel between all outputs is a half, or less where it will grow."""
    settings = small(loss=loss, output_scale=scale, optimizer=optimizer)
    torch.manual_seed(0)
    task = scale_task(built_in_task(settings), settings)
    full = fl.ntk(task.model, task.x, outputs="full", dtype=torch.float64)
    largest = float(torch.linalg.eigvalsh(full.transpose(1, 2).flatten(0, 1).flatten(1))[-1])
    second_derivative = {"mse": 2.0 / 10, "cross-entropy": 1.0}[loss] / task.samples
    product = step_size(task, settings) * largest * second_derivative
    product *= 10 if optimizer == "momentum" else 1  # its steps add up to ten times as much
    assert product == pytest.approx(min(0.5, 2 * scale ** (4 / 3)), rel=1e-4)


def test_the_default_rate_leaves_room_for_rich_networks_to_grow():
    torch.manual_seed(0)
    task = built_in_task(small())
    rates = []
    for scale in (0.001, 0.01, 10.0, 100.0):
        settings = small(output_scale=scale)
        rates.append(step_size(scale_task(task, settings), settings) * scale**2)
    # lazy: the rate times scale^2 is constant; rich: it falls by 10^(-4/3) for three weight layers
    assert rates[3] == pytest.approx(rates[2], rel=1e-4)
    assert rates[0] / rates[1] == pytest.approx(10 ** (-4 / 3), rel=1e-4)


def test_adam_moves_no_output_further_than_the_targets_are_large():
    for scale in (1.0, 100.0):
        settings = small(output_scale=scale, optimizer="adam")
        torch.manual_seed(0)
        task = scale_task(built_in_task(settings), settings)
        rate = step_size(task, settings)
        optimizer = torch.optim.Adam([p for p in task.model.parameters() if p.requires_grad], rate)
        before = task.model(task.x).detach()
        task.loss(task.model(task.x), task.y).backward()
        optimizer.step()
        moved = float((task.model(task.x) - before).detach().square().mean().sqrt())
        assert 0 < moved < float(task.y.square().mean().sqrt())


def test_the_default_rate_is_the_safe_rate_of_the_library():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, net = x.square(), nn.Linear(3, 3).double()
    for returned in ("mse", nn.MSELoss(), lambda f, t: 5 * (f - t).square().sum()):
        task = checked_task((net, (x, y), returned), "here")
        expected = fl.steer.safe_lr(net, x, None if returned == "mse" else y, loss=returned)
        assert step_size(task, TrainingSettings()) == pytest.approx(expected, rel=1e-6)
        assert step_size(task, TrainingSettings(batch=4)) != pytest.approx(expected, rel=1e-3)


def test_arrays_from_a_file(tmp_path: Path):
    rng = numpy.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    numpy.savez(tmp_path / "numbers.npz", x=x, y=y, x_test=x[:5], y_test=y[:5])
    task = built_in_task(small(data=str(tmp_path / "numbers.npz")))
    assert (task.samples, task.y.shape) == (24, (24, 2))
    assert task.test is not None
    assert torch.equal(task.test[0], torch.tensor(x[:5], dtype=torch.float32))
    rows = {tuple(row) for row in torch.tensor(x, dtype=torch.float32).tolist()}
    assert {tuple(row) for row in task.x.tolist()} < rows

    numpy.savez(tmp_path / "classes.npz", x=x.reshape(30, 1, 2, 2), y=numpy.arange(30) % 3)
    entropy = built_in_task(small(data=str(tmp_path / "classes.npz"), loss="cross-entropy", model="cnn"))
    assert entropy.model(entropy.x).shape == (24, 3)
    assert entropy.y.dtype == torch.int64
    assert entropy.test is not None
    assert len(entropy.test[0]) == 6  # what training left


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": numpy.zeros((4, 2))}, "expected x and y"),
        ({"x": numpy.zeros((40, 2)), "y": numpy.zeros(39)}, "40 samples in x and 39 in y"),
        ({"x": numpy.full((40, 2), math.nan), "y": numpy.zeros(40)}, "nan or infinite"),
        ({"x": numpy.array(["a"] * 40), "y": numpy.zeros(40)}, "expected an array of numbers"),
        ({"x": numpy.zeros((40, 2)), "y": numpy.full(40, -1)}, "classes from -1"),
    ],
)
def test_a_file_that_does_not_fit_is_told(arrays: dict[str, numpy.ndarray], said: str, tmp_path: Path):
    numpy.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(fl.FeatlearnError, match=said):
        built_in_task(small(data=str(tmp_path / "a.npz")))


def test_a_pickle_in_a_file_is_not_run(tmp_path: Path):
    numpy.savez(tmp_path / "a.npz", x=numpy.array([{"a": 1}], dtype=object), y=numpy.zeros(1), allow_pickle=True)
    with pytest.raises(fl.FeatlearnError, match="cannot be read"):
        built_in_task(small(data=str(tmp_path / "a.npz")))


def test_whitened_inputs_have_equal_eigenvalues():
    task = built_in_task(small(whiten=True, samples=200))
    sizes = torch.linalg.svdvals(task.x.double())
    kept = sizes[sizes > 1e-3 * sizes[0]]
    assert float(kept[-1] / kept[0]) > 0.99


def test_kernels_of_some_samples_are_not_held_against_a_network_trained_on_all(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", *SMALL, "--probe", "10", "--out", "a", "--no-report"]) == 0
    run = fl.open_run("a")
    assert run.config["probe"]["samples"] == 10
    assert run.config["test"] is None


@pytest.mark.slow
def test_the_default_says_rich_and_a_large_output_scale_lazy(capsys: pytest.CaptureFixture[str]):
    for options, regime in ([], "rich"), (["--output-scale", "30"], "lazy"):
        assert main(["diagnose", *options, "--json", "--quiet", "--no-report"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["regime"] == regime


def test_a_small_network_has_one_thread_and_the_others_come_back(monkeypatch: pytest.MonkeyPatch):
    import featlearn.cli.training as training

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, seen, step = torch.get_num_threads(), [], training._step
    monkeypatch.setattr(training, "_step", lambda *args: (seen.append(torch.get_num_threads()), step(*args))[1])
    torch.set_num_threads(2)
    try:
        assert main(["diagnose", *SMALL, "--out", "a", "--no-report"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
