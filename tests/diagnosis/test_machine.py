"""Whether a network is a kernel machine."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.diagnosis.machine import _largest_eigenvalue, kernel_machine
from featlearn.diagnosis.run_data import RunData
from featlearn.record import open_run
from tests.diagnosis.recording import record


def data(outputs: int):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64, generator=generator)
    w = torch.randn(5, outputs, dtype=torch.float64, generator=generator)
    y = torch.tanh(x @ w)
    return (x[:25], y[:25]), (x[25:], y[25:])


def network(outputs: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, outputs)).double()


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("steps", [40, 400])
def test_a_linearized_network_is_the_machine_of_its_first_kernel_at_any_time(tmp_path: Path, outputs: int, steps: int):
    (x, y), test = data(outputs)
    model = fl.dynamics.linearize(network(outputs))
    run = record(tmp_path / "run", model, x, y, lr=0.05, steps=steps, test=test, layers=False, gap=False)
    found = kernel_machine(RunData(run))
    assert found.of == "initial"
    assert found.errors["initial"] < 0.01
    assert found.errors["final"] == pytest.approx(found.errors["initial"], abs=1e-3)
    assert found.correlations["initial"] > 0.999


def test_a_rich_network_is_not(tmp_path: Path):
    (x, y), test = data(1)
    model = fl.steer.scale_output(network(1), 1 / 30)
    run = record(tmp_path / "run", model, x, y, lr=0.005 * 900, steps=700, test=test, layers=False, gap=False)
    found = kernel_machine(RunData(run))
    assert found.errors["initial"] > 0.15
    assert found.of != "initial"
    assert found.errors["final"] < found.errors["initial"]


def test_without_test_points_it_cannot_be_told(tmp_path: Path):
    (x, y), _ = data(1)
    run = record(tmp_path / "run", network(1), x, y, lr=0.05, steps=20, layers=False, gap=False)
    found = kernel_machine(RunData(run))
    assert found.of is None
    assert found.reason == "no test points were watched (test=(x, y))"


def test_test_points_that_were_measured_once_are_not_taken_for_none(tmp_path: Path):
    (x, y), test = data(1)
    run = record(tmp_path / "run", network(1), x, y, lr=0.05, steps=20, test=test, layers=False, gap=False)
    for step, when in ((20, "before training only"), (0, "not before training")):
        folder = tmp_path / str(step)
        shutil.copytree(run.path, folder)
        for file in (folder / "arrays" / "test").iterdir():
            if (int(file.stem) > 0) == (step > 0):
                file.unlink()
        assert kernel_machine(RunData(open_run(folder))).reason == f"test points were measured {when}"


def test_a_lazy_network_of_several_outputs_that_was_watched_needs_the_terms_between_them(tmp_path: Path):
    """Outputs that share all but their last weights: the mean over outputs is not enough."""
    (x, y), test = data(3)
    torch.manual_seed(1)
    layers = [nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)]
    model = fl.steer.scale_output(nn.Sequential(*layers).double(), 500.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05 * model.rate_factor)
    with fl.watch(
        model,
        (x, y),
        out=tmp_path / "run",
        test=test,
        optimizer=optimizer,
        loss="mean",
        budget=None,
        quantities=["kernel", "test"],
        every=200,
    ) as watch:
        for _ in range(400):
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    run_data = RunData(watch.run)
    whole = kernel_machine(run_data)
    assert whole.of == "initial"
    assert whole.outputs == "all"
    assert whole.errors["initial"] < 0.01
    run_data = RunData(watch.run)
    for step in (0, 400):
        run_data._arrays["kernel", step, "full"] = None
    mean = kernel_machine(run_data)
    assert mean.outputs == "mean"
    assert mean.errors["initial"] > 3 * whole.errors["initial"]


def test_the_largest_eigenvalue_sets_the_times():
    root = torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    kernel = root @ root.T
    assert _largest_eigenvalue(kernel) == pytest.approx(float(torch.linalg.eigvalsh(kernel)[-1]), rel=0.02)
