"""How much faster than its first kernel a run learned, against theories that say so."""

import shutil
from pathlib import Path

import pytest
import torch

from featlearn.diagnosis.loss_speed import LossSpeed, SpeedRatio, TimeScale, Unknown
from featlearn.diagnosis.run_data import RunData
from featlearn.dynamics import kernel_descent
from featlearn.record import open_run
from featlearn.theory import ofe
from tests.diagnosis.recording import written

STEPS = [0, *range(1, 20), *range(20, 400, 10)]


def task(seed: int = 0, samples: int = 12):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(samples, 2 * samples, dtype=torch.float64, generator=generator)
    y = torch.randn(samples, dtype=torch.float64, generator=generator) + 0.4
    return root @ root.T / (2 * samples), y


def ofe_run(path: Path, gamma: float, lr: float = 0.02, **options):
    K0, y = task()
    times = lr * torch.tensor(STEPS, dtype=torch.float64)
    solution = ofe.solve(K0, y, gamma, times, f0=torch.full_like(y, 0.1))
    kernels = torch.stack([solution.kernel(float(t)) for t in times])
    run = written(path, STEPS, kernels, solution.outputs[..., None], y[:, None], lr=lr, **options)
    return run, K0, y, times, solution


def first(times, values, level):
    i = int((values <= level).nonzero()[0])
    share = (values[i - 1] / level).log() / (values[i - 1] / values[i]).log()
    return float(times[i - 1] + share * (times[i] - times[i - 1]))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 5.0, 50.0])
def test_optimal_feature_evolution_is_as_much_faster_as_its_solution(tmp_path: Path, gamma: float):
    run, K0, y, times, solution = ofe_run(tmp_path / "run", gamma, lr=0.02 if gamma < 10 else 0.002)
    found = LossSpeed(RunData(run)).speed
    assert isinstance(found, SpeedRatio)
    level = found.level * float(solution.loss[0])
    long = torch.linspace(0, 400, 400_000, dtype=torch.float64)
    frozen = kernel_descent(K0, y, times=long, f0=torch.full_like(y, 0.1)).loss
    exact = first(long, frozen, level) / first(times, solution.loss, level)
    assert float(found.frozen) == pytest.approx(exact, rel=0.03)
    assert not found.bound
    if gamma == 0:
        assert float(found.frozen) == pytest.approx(1.0, rel=0.01)
        assert float(found.rescaled) == pytest.approx(1.0, rel=0.01)
    else:
        assert float(found.rescaled) < float(found.frozen)


@pytest.mark.parametrize(
    ("lr", "loss", "factor"),
    [(0.02, "sum-half", 1.0), (0.02, None, 1.0), (None, None, 0.02), (0.02, "mean", 1.0)],
)
def test_the_rate_is_declared_or_fitted_to_the_first_steps(tmp_path: Path, lr, loss, factor):
    """In the unit of the learning rate, where there is one; a wrong declaration (mean) is not believed."""
    K0, y = task()
    times = 0.02 * torch.tensor(STEPS, dtype=torch.float64)
    path = kernel_descent(K0, y, times=times)
    kernels = K0.expand(len(STEPS), -1, -1)
    run = written(tmp_path / "run", STEPS, kernels, path.outputs[..., None], y[:, None], lr=lr, loss=loss)
    time_scale = LossSpeed(RunData(run)).time_scale
    assert isinstance(time_scale, TimeScale)
    assert time_scale.rate == pytest.approx(factor, rel=0.02)
    assert ("declared learning rate" in time_scale.source) == (loss == "sum-half")
    assert ("times that" in time_scale.source) == (loss == "mean")


def test_momentum_is_taken_into_account(tmp_path: Path):
    """Heavy-ball descent on a linear model, by hand: asymptotically lr / (1 - momentum)."""
    K0, y = task()
    f, velocity, outputs, lr, momentum = torch.zeros_like(y), torch.zeros_like(y), [], 0.002, 0.9
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            outputs.append(f.clone())
        velocity = momentum * velocity + K0 @ (f - y)
        f = f - lr * velocity
    settings = {"class": "SGD", "groups": [{"lr": lr, "momentum": momentum, "weight_decay": 0.0}]}
    kernels = K0.expand(len(STEPS), -1, -1)
    for loss in ("sum-half", None):
        run = written(
            tmp_path / str(loss),
            STEPS,
            kernels,
            torch.stack(outputs)[..., None],
            y[:, None],
            lr=lr,
            loss=loss,
            optimizer=settings,
        )
        loss_speed = LossSpeed(RunData(run))
        assert isinstance(loss_speed.time_scale, TimeScale)
        assert loss_speed.time_scale.rate == pytest.approx(10.0, rel=0.1)
        assert isinstance(loss_speed.speed, SpeedRatio)
        assert float(loss_speed.speed.frozen) == pytest.approx(1.0, rel=0.02)


def test_a_learning_rate_that_changes_is_summed(tmp_path: Path):
    K0, y = task()
    rates = [0.03 / (1 + step / 50) for step in range(STEPS[-1] + 1)]
    elapsed = torch.tensor([sum(rates[:step]) for step in STEPS], dtype=torch.float64)
    path = kernel_descent(K0, y, times=elapsed)
    kernels = K0.expand(len(STEPS), -1, -1)
    run = written(
        tmp_path / "run",
        STEPS,
        kernels,
        path.outputs[..., None],
        y[:, None],
        lr=None,
        scalars={"lr": [rates[step] for step in STEPS]},
    )
    loss_speed = LossSpeed(RunData(run))
    torch.testing.assert_close(loss_speed.elapsed.at(torch.tensor(STEPS).double()), elapsed, rtol=0.02, atol=0.02)
    assert isinstance(loss_speed.time_scale, TimeScale)
    assert loss_speed.time_scale.source.startswith("the declared")


def test_noise_or_another_optimizer_gives_no_clock(tmp_path: Path):
    K0, y = task()
    noise = torch.randn(len(STEPS), len(y), 1, dtype=torch.float64).cumsum(0) * 0.1
    noise[0] = 0
    run = written(tmp_path / "run", STEPS, K0.expand(len(STEPS), -1, -1), noise, y[:, None])
    time_scale = LossSpeed(RunData(run)).time_scale
    assert isinstance(time_scale, Unknown)
    assert "no descent with the first kernel" in time_scale.reason


@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_the_error_of_a_speed_is_its_change_when_every_other_kernel_is_left_out(tmp_path: Path, gamma: float):
    """Against the speed of a copy of the run from which these kernels were removed."""
    run, *_ = ofe_run(tmp_path / "run", gamma, lr=0.02 / gamma)
    found = LossSpeed(RunData(run)).speed
    assert isinstance(found, SpeedRatio)
    reach = int(found.frozen.samples)  # kernels before the loss at which speeds are compared
    assert 4 < reach < len(STEPS)
    shutil.copytree(run.path, tmp_path / "sparse")
    for step in STEPS[1:reach:2]:
        (tmp_path / "sparse" / "arrays" / "kernel" / f"{step:012d}.npz").unlink()
    sparse = LossSpeed(RunData(open_run(tmp_path / "sparse"))).speed
    assert isinstance(sparse, SpeedRatio)
    change = abs(float(found.frozen) - float(sparse.frozen))
    assert float(found.frozen.stderr) == pytest.approx(change, rel=1e-6)
    assert 0 < change < 0.1 * float(found.frozen)
    growth = float(found.frozen) / float(found.rescaled)
    assert float(found.rescaled.stderr) == pytest.approx(change / growth, rel=1e-6)


def test_a_loss_that_has_not_fallen_says_nothing(tmp_path: Path):
    run, *_ = ofe_run(tmp_path / "run", 0.0, lr=1e-5)
    speed = LossSpeed(RunData(run)).speed
    assert isinstance(speed, Unknown)
    assert "fell only to" in speed.reason
