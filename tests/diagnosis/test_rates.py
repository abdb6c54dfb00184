"""The rate of a run, on runs whose rate is known."""

from pathlib import Path

import pytest
import torch

from featlearn.diagnosis.rates import LossRates, TimeScale, Unknown
from featlearn.diagnosis.run_data import RunData
from featlearn.dynamics import kernel_descent
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


@pytest.mark.parametrize("gamma", [0.0, 0.5, 5.0, 50.0])
def test_the_rate_of_the_loss_is_that_of_the_solution(tmp_path: Path, gamma: float):
    """Optimal feature evolution at rate one, recorded in units of the learning rate."""
    run, *_ = ofe_run(tmp_path / "run", gamma, lr=0.02 if gamma < 10 else 0.002)
    scale = LossRates(RunData(run)).of_loss
    assert isinstance(scale, TimeScale)
    assert scale.rate == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("lr", "loss", "factor"),
    [(0.02, "sum-half", 1.0), (0.02, None, 1.0), (None, None, 0.02), (0.02, "mean", 1.0)],
)
def test_the_rate_is_declared_or_fitted_to_the_loss(tmp_path: Path, lr, loss, factor):
    """In the unit of the learning rate, where there is one; a wrong declaration (mean) is not believed."""
    K0, y = task()
    times = 0.02 * torch.tensor(STEPS, dtype=torch.float64)
    path = kernel_descent(K0, y, times=times)
    kernels = K0.expand(len(STEPS), -1, -1)
    run = written(tmp_path / "run", STEPS, kernels, path.outputs[..., None], y[:, None], lr=lr, loss=loss)
    time_scale = LossRates(RunData(run)).best
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
        rates = LossRates(RunData(run))
        assert isinstance(rates.best, TimeScale)
        assert rates.best.rate == pytest.approx(10.0, rel=0.1)


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
    rates = LossRates(RunData(run))
    torch.testing.assert_close(rates.elapsed.at(torch.tensor(STEPS).double()), elapsed, rtol=0.02, atol=0.02)
    assert isinstance(rates.best, TimeScale)
    assert rates.best.source.startswith("the declared")


def test_noise_or_another_optimizer_gives_no_clock(tmp_path: Path):
    K0, y = task()
    noise = torch.randn(len(STEPS), len(y), 1, dtype=torch.float64).cumsum(0) * 0.1
    noise[0] = 0
    run = written(tmp_path / "run", STEPS, K0.expand(len(STEPS), -1, -1), noise, y[:, None])
    time_scale = LossRates(RunData(run)).best
    assert isinstance(time_scale, Unknown)
    assert "the loss on the probe" in time_scale.reason


def test_a_loss_that_has_not_fallen_says_nothing(tmp_path: Path):
    run, *_ = ofe_run(tmp_path / "run", 0.0, lr=1e-5)
    scale = LossRates(RunData(run)).of_loss
    assert isinstance(scale, Unknown)
    assert "fell only to" in scale.reason
