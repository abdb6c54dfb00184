"""Test errors of regression with the first and the last kernel, by hand with numpy."""

import math
from pathlib import Path

import numpy
import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.run_data import RunData
from featlearn.diagnosis.usefulness import RIDGE, Usefulness, usefulness
from featlearn.record import Run, RunWriter, open_run


def kernels(seed: int, samples: int = 9, tested: int = 7) -> tuple[numpy.ndarray, numpy.ndarray]:
    rows = numpy.random.default_rng(seed).normal(size=(samples + tested, 5))
    kernel = rows @ rows.T + 0.1 * numpy.eye(samples + tested)
    return kernel[:samples, :samples], kernel[samples:, :samples]


def written(path: Path, y: numpy.ndarray, wanted: numpy.ndarray, *, classes: bool, last: int = 1, **config) -> Run:
    generator = numpy.random.default_rng(5)
    writer = RunWriter(
        path, {"name": path.name, "loss_convention": "mean", "probe": {"classification": classes}} | config
    )
    writer.array("targets", 0, y=y)
    for step in range(last + 1):
        kernel, cross = kernels(step)
        writer.array("kernel", step, mean=kernel)
        writer.array("outputs", step, f=generator.normal(size=y.shape))
        writer.array(
            "test", step, f=generator.normal(size=wanted.shape), y=wanted, **({} if step == 2 else {"cross": cross})
        )
        writer.scalars(step, {"probe/loss": 1.0 / (1 + step)})
    writer.close()
    return open_run(path)


def predicted(seed: int, y: numpy.ndarray) -> numpy.ndarray:
    kernel, cross = kernels(seed)
    return cross @ numpy.linalg.solve(kernel + RIDGE * kernel.diagonal().mean() * numpy.eye(len(kernel)), y)


def test_errors_of_regression_are_shares_of_the_variance(tmp_path: Path):
    generator = numpy.random.default_rng(3)
    y, wanted = generator.normal(size=(9, 2)), generator.normal(size=(7, 2))
    run = written(tmp_path / "run", y, wanted, classes=False)
    found = usefulness(RunData(run))
    variance = ((wanted - wanted.mean(0)) ** 2).sum(1).mean()
    errors = [((predicted(seed, y) - wanted) ** 2).sum(1) / variance for seed in (0, 1)]
    assert found.first == pytest.approx(errors[0].mean(), rel=1e-6)
    assert found.later == pytest.approx(errors[1].mean(), rel=1e-6)
    assert found.error == pytest.approx((errors[1] - errors[0]).std(ddof=1) / math.sqrt(7), rel=1e-6)
    outputs = run.array("test", 1)["f"]
    assert found.network == pytest.approx(((outputs - wanted) ** 2).sum(1).mean() / variance, rel=1e-6)
    assert found.unit == "variance"


def test_errors_of_classes_are_those_that_are_missed(tmp_path: Path):
    generator = numpy.random.default_rng(4)
    labels, tested = generator.integers(3, size=9), generator.integers(3, size=7)
    y, wanted = numpy.eye(3)[labels] - 1 / 3, numpy.eye(3)[tested] - 1 / 3
    run = written(tmp_path / "run", y, wanted, classes=True)
    found = usefulness(RunData(run))
    for seed, error in ((0, found.first), (1, found.later)):
        assert error == pytest.approx((predicted(seed, y).argmax(1) != tested).mean())
    assert found.network == pytest.approx((run.array("test", 1)["f"].argmax(1) != tested).mean())
    assert found.unit == "misclassified"
    said = next(item.says for item in diagnose(run).evidence if item.topic == "usefulness")
    assert f"with the first kernel {found.first:.3g} of the test points misclassified" in said


@pytest.mark.parametrize(
    ("change", "error", "better"),
    [
        (-0.3, 0.1, True),
        (0.3, 0.1, False),
        (-0.3, 0.2, None),
        (0.0, 0.0, None),
        (-0.3, math.nan, None),
    ],
)
def test_a_kernel_is_better_by_more_than_twice_its_error(change: float, error: float, better: bool | None):
    assert Usefulness(0.5, 0.5 + change, 0.1, error, "variance").better is better


def test_the_headline_says_it_beside_the_regime(tmp_path: Path):
    generator = numpy.random.default_rng(3)
    y = generator.normal(size=(9, 2))
    # what regression with the second kernel predicts, so that this kernel is better
    found = diagnose(written(tmp_path / "run", y, predicted(1, y), classes=False))
    assert found.useful.better is True
    assert found.headline.endswith("For unseen points the last kernel is better than the first.")


def test_why_it_is_unknown_is_said_and_it_has_no_numbers(tmp_path: Path):
    y = numpy.random.default_rng(3).normal(size=(9, 1))
    alike = usefulness(RunData(written(tmp_path / "alike", y, numpy.ones((7, 1)), classes=False)))
    assert alike.reason == "the targets of the test points are constant"
    killed = usefulness(RunData(written(tmp_path / "killed", y, y[:7], classes=False, last=2)))
    assert killed.reason == "kernels between test points and probe were not recorded at both ends"
    assert math.isnan(killed.first)
    assert "For unseen points" not in diagnose(tmp_path / "killed").headline
