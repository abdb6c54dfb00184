"""Advice that is followed changes the regime."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import GAP
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run, RunWriter
from featlearn.steer import scale_init, scale_output
from featlearn.steer.advice import LARGEST, SMALLEST, _gamma, advise
from tests.diagnosis.recording import record

FIRST = 0.005
"""Divisor of the output at which the network is lazy."""


def task():
    data = fl.data.digits("train")
    x, labels = data.x[:80], data.labels[:80]
    return x, nn.functional.one_hot(labels, 10).float() - 0.1


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 48, bias=bias), nn.ReLU(), nn.Linear(48, 48, bias=bias), nn.ReLU(), nn.Linear(48, 10, bias=bias)
    )


def trained(path: Path, model: nn.Module, lr: float, steps: int = 500) -> Run:
    """Half of the largest stable rate of the first kernel, or a quarter of it until training is stable."""
    x, y = task()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for attempt in range(8):
        model.load_state_dict(start)
        run = record(path / str(attempt), model, x, y, lr=lr / 4**attempt, steps=steps, until=0.05, growth=1.8)
        losses = run.scalar("probe/loss")[1]
        if all(math.isfinite(loss) and loss <= 1.1 * losses[0] for loss in losses) and losses[-1] < 0.5 * losses[0]:
            return run
    raise AssertionError("training was unstable at every rate")


def stable_rate(model: nn.Module) -> float:
    x, _ = task()
    return 0.5 / float(torch.linalg.eigvalsh(fl.ntk(model, x))[-1]) * len(x) / 2


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    lr = stable_rate(network())
    run = trained(tmp_path_factory.mktemp("lazy"), scale_output(network(), 1 / FIRST), lr * FIRST**2)
    assert diagnose(run).regime == "lazy"
    return run, lr * FIRST**2


def test_the_advice_makes_a_lazy_run_rich_and_a_rich_one_lazy(lazy: tuple[Run, float], tmp_path: Path):
    run, lr = lazy
    advice = advise(run, toward="rich")
    assert advice.regime == "lazy"
    assert advice.gamma > 1
    assert advice.rate_factor == pytest.approx(advice.gamma**2)
    gamma = FIRST * advice.gamma  # its output was divided by that already
    rich = trained(tmp_path / "rich", scale_output(network(), 1 / gamma), lr * advice.rate_factor)
    assert diagnose(rich).regime == "rich"
    back = advise(diagnose(rich), toward="lazy")
    assert back.gamma < 1
    gamma *= back.gamma
    again = trained(tmp_path / "lazy", scale_output(network(), 1 / gamma), stable_rate(network()) * gamma**2)
    assert diagnose(again).regime == "lazy"


@dataclass
class Known:
    """A diagnosis as far as the factor needs it."""

    gap: float

    @property
    def numbers(self) -> dict[str, Estimate]:
        return {"gap": Estimate(self.gap, 0.0, 1)}


@pytest.mark.parametrize("toward", ["rich", "lazy"])
def test_the_factor_leads_from_gap_to_gap_along_measured_runs(toward: str):
    """Gaps of one network at divisors of its output from 0.01 to 30, measured once: advice reaches the other end."""
    measured = {0.01: 0.1135, 0.05: 0.287, 0.2: 0.503, 1.0: 0.776, 3.0: 0.899, 10.0: 0.941, 30.0: 0.980}
    places, gaps = (numpy.array(list(part)) for part in (measured.keys(), measured.values()))
    for gamma, gap in measured.items():
        if (gap > GAP.high) == (toward == "rich"):
            continue
        after = gamma * _gamma(Known(gap), toward)  # type: ignore[arg-type]
        if toward == "rich":
            assert numpy.interp(math.log(after), numpy.log(places), gaps) > 0.5
            assert after < 3.0  # not further than needed
        else:
            assert 1e-4 < after < 0.01  # where it is lazy


def test_factors_are_bounded_and_go_the_right_way():
    for gap in (0.0, 1e-9, 0.3, 0.99, 1.0, 7.0):
        assert SMALLEST <= _gamma(Known(gap), "rich") <= LARGEST  # type: ignore[arg-type]
        assert 0.1 / LARGEST <= _gamma(Known(gap), "lazy") <= 0.34  # type: ignore[arg-type]


def test_scaled_weights_do_the_same_as_a_divided_output(lazy: tuple[Run, float]):
    """Exactly, for a homogeneous network: the second change of the advice is the first one."""
    advice = advise(lazy[0], toward="rich")
    divide, scale = advice.changes[:2]
    assert divide.rate_factor == pytest.approx(advice.gamma**2)
    sigma = float(scale.call.rpartition(" ")[2].rstrip(")"))
    x, y = (values.double() for values in task())
    paths = []
    lr = 1e-3 / advice.rate_factor
    for model, factor in (
        (scale_output(network(bias=False).double(), 1 / advice.gamma, center=False), divide.rate_factor),
        (scale_init(network(bias=False).double(), sigma), scale.rate_factor),
    ):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr * factor)
        for _ in range(20):
            optimizer.zero_grad()
            (model(x) - y).square().sum(1).mean().backward()
            optimizer.step()
        paths.append(model(x).detach())
    # sigma is given in three digits
    torch.testing.assert_close(paths[0], paths[1], rtol=0.05, atol=0.02 * float(paths[0].abs().max()))


def test_it_says_what_to_change_and_why(lazy: tuple[Run, float]):
    text = str(advise(lazy[0], toward="rich"))
    for word in (
        "fl.steer.scale_output",
        "fl.steer.scale_init",
        "mean_field",
        "fl.steer.SLO",
        "Cor. 2",
        "expect:",
        "because:",
    ):
        assert word in text
    nothing = advise(lazy[0], toward="lazy")
    assert nothing.changes == ()
    assert nothing.gamma == 1
    assert "nothing has to change" in str(nothing)


def test_a_run_that_shows_nothing_gets_a_guess(tmp_path: Path):
    RunWriter(tmp_path / "run", {}).close()
    said = {"rich": (100.0, "divide the output"), "lazy": (0.01, "multiply the output by 100")}
    for toward, (gamma, what) in said.items():
        advice = advise(tmp_path / "run", toward=toward)
        assert advice.gamma == gamma
        assert advice.changes[0].what == what
        assert "guess" in str(advice)


def test_other_directions_are_refused(tmp_path: Path):
    with pytest.raises(fl.errors.InputValueError, match="expected 'rich' or 'lazy'"):
        advise(tmp_path, toward="richer")
