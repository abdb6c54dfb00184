"""Test errors of regression with the first and the last kernel, by hand with numpy."""

import math
from pathlib import Path

import numpy
import pytest

from featlearn.diagnosis import Diagnosis, diagnose
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
    assert f"Test accuracy is {1 - found.network:.0%}" in said
    assert f"a kernel method on the initial features reaches {1 - found.first:.0%}" in said


def errors(**values: float) -> Usefulness:
    """Errors of a network that learned and equals regression with both kernels, by default."""
    known = {"first": 0.2, "later": 0.2, "network": 0.2, "constant": 0.9}
    spreads = {"error": 0.01, "gain_error": 0.01, "learned_error": 0.01}
    return Usefulness(**(known | spreads | values), unit="variance", samples=100)


@pytest.mark.parametrize(
    ("values", "helped"),
    [
        ({"network": 0.05}, "yes"),
        ({"network": 0.05, "gain_error": 0.1}, "cannot tell"),  # too few test points
        ({"network": 0.19}, "no"),
        ({"network": 0.3}, "no"),
        ({"network": 0.2, "gain_error": 0.06}, "cannot tell"),  # a gain of a tenth is not excluded
        ({"first": 4e-8, "later": 5e-7, "network": 1e-9, "gain_error": 1e-10}, "no"),
        ({"network": 0.88, "constant": 0.9, "first": 0.9, "learned_error": 0.02}, "no"),  # labels that are noise
        ({"network": 0.88, "constant": 0.9, "first": 0.9, "learned_error": 0.06}, "cannot tell"),  # few test points
        ({"network": 0.88, "constant": 0.9, "learned_error": 0.02}, "no"),  # worse than the first kernel
        ({"network": 0.96, "constant": 0.9, "first": 0.9, "learned_error": 0.02}, "no"),  # labels that are noise
        ({"network": 0.9, "constant": 0.9, "first": 0.9, "learned_error": 0.004}, "no"),  # many test points
        ({"first": 1.16, "later": 1.24, "network": 0.057, "constant": 1.0}, "cannot tell"),
        ({"first": 0.76, "later": 0.8, "network": 0.5}, "yes"),  # no kernel comes near
        ({"first": math.nan, "later": math.nan}, "cannot tell"),
        ({"network": math.nan}, "cannot tell"),
    ],
)
def test_features_helped_if_the_network_beats_the_first_kernel_and_chance(values: dict[str, float], helped: str):
    assert errors(**values).helped == helped


def test_the_verdict_says_it_beside_the_regime(tmp_path: Path):
    """Accuracies by hand, with those of the constant prediction and of both kernels."""
    generator = numpy.random.default_rng(4)
    labels, tested = generator.integers(3, size=9), generator.integers(3, size=7)
    y, wanted = numpy.eye(3)[labels] - 1 / 3, numpy.eye(3)[tested] - 1 / 3
    run = written(tmp_path / "run", y, wanted, classes=True)
    f = run.array("test", 1)["f"]
    accuracy, chance = (f.argmax(1) == tested).mean(), numpy.bincount(tested).max() / 7
    diagnosis = diagnose(run)
    assert f"Test accuracy is {100 * accuracy:.0f}% (chance {100 * chance:.0f}%)" in diagnosis.why_helped
    assert diagnosis.helped == diagnosis.useful.helped
    assert diagnosis.why_helped in str(diagnosis)


def test_four_right_of_64_bound_what_was_learned(tmp_path: Path):
    """The binomial error of the paired difference, by hand: 4 are gained and 6 lost, of 64."""
    tested = numpy.concatenate([numpy.zeros(6, int), 1 + numpy.arange(58) % 19])  # chance: 6 of 64
    labels = numpy.arange(9) % 3
    y, wanted = numpy.eye(20)[labels] - 1 / 20, numpy.eye(20)[tested] - 1 / 20
    answers = (tested + 1) % 20
    answers[6:10] = tested[6:10]
    assert (answers == 0)[6:].sum() == 3
    assert (answers == tested).sum() == 4
    writer = RunWriter(tmp_path / "run", {"name": "run", "loss_convention": "mean", "probe": {"classification": True}})
    writer.array("targets", 0, y=y)
    for step in range(4):
        writer.array("test", step, f=numpy.eye(20)[answers], y=wanted)
        writer.scalars(step, {"probe/loss": 1.0 / (1 + step), **({"gap/probe": 0.9} if step else {})})
    writer.close()
    diagnosis = diagnose(tmp_path / "run")
    error = math.sqrt((10 - 2**2 / 64) / 63 / 64)
    assert diagnosis.useful.learned_error == pytest.approx(error)
    assert diagnosis.helped == "no"
    bound = round(100 * (-2 / 64 + 2 * error))
    assert f"at most {bound} percentage points better than a constant prediction" in diagnosis.why_helped
    assert "no better than" not in str(diagnosis)


def test_without_test_data_it_cannot_be_told(tmp_path: Path):
    def diagnosis_of(name: str, *, targets: bool) -> Diagnosis:
        writer = RunWriter(tmp_path / name, {"name": name})
        if targets:
            writer.array("targets", 0, y=numpy.arange(5.0)[:, None])
        for step in range(4):
            writer.scalars(step, {"probe/loss": 1.0 / (1 + step), **({"gap/probe": 0.9} if step else {})})
        writer.close()
        return diagnose(tmp_path / name)

    diagnosis = diagnosis_of("run", targets=True)
    assert diagnosis.helped == "cannot tell"
    assert diagnosis.why_helped == "Cannot tell: no test data."
    assert "Next:         Pass test=(x, y) to fl.watch to see whether that helped." in str(diagnosis)
    without = diagnosis_of("without", targets=False)
    assert without.why_helped == "Cannot tell: the run has no targets."
    assert "Next:         Nothing has to change." in str(without)


def test_squared_error_is_no_criterion_for_a_loss_of_another_kind(tmp_path: Path):
    """Counts under a Poisson loss, which falls, while outputs, logarithms of rates, do not fit in squared error."""
    y = numpy.array([[0.0], [30.0], [4.0], [12.0], [1.0], [9.0]])
    writer = RunWriter(tmp_path / "run", {"name": "run", "probe": {"samples": 6, "classification": False}})
    writer.array("targets", 0, y=y)
    for step in range(8):
        f = (step / 7) * numpy.log(y + 0.5)
        writer.array("outputs", step, f=f)
        writer.array("test", step, f=f, y=y)
        poisson = float((numpy.exp(f) - y * f).mean())
        writer.scalars(step, {"probe/loss": float(((f - y) ** 2).mean()), **({"loss": poisson} if step else {})})
    writer.close()
    useful = usefulness(RunData(open_run(tmp_path / "run")))
    assert math.isnan(useful.network)
    assert "the training loss is not known to be squared error" in useful.reason


def test_why_it_is_unknown_is_said_and_it_has_no_numbers(tmp_path: Path):
    y = numpy.random.default_rng(3).normal(size=(9, 1))
    alike = usefulness(RunData(written(tmp_path / "alike", y, numpy.ones((7, 1)), classes=False)))
    assert alike.reason == "the targets of the test points are constant"
    killed = usefulness(RunData(written(tmp_path / "killed", y, y[:7], classes=False, last=2)))
    assert killed.reason == "kernels between test points and probe were not recorded at both ends"
    assert math.isnan(killed.first)
    assert killed.network > 0
    assert diagnose(tmp_path / "killed").helped in ("no", "cannot tell")
