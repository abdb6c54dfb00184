"""The verdict on small networks whose regime is known, and on runs that show little."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import featlearn as fl
from featlearn.diagnosis import Diagnosis, diagnose
from featlearn.diagnosis.loss_kind import CROSS_ENTROPY, SQUARE
from featlearn.diagnosis.run_data import RunData
from featlearn.record import Run, RunWriter, open_run
from tests.diagnosis.recording import record, written


def digits(samples: int = 48, seed: int = 0, tested: int = 90):
    data = fl.data.digits("train")
    some = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))
    x, y = data.x[some], nn.functional.one_hot(data.labels[some], 10).float() - 0.1
    return (x[:samples], y[:samples]), (x[samples : samples + tested], y[samples : samples + tested])


def trained(path: Path, scale: float, seed: int = 0, share: float = 0.5, steps: int = 700, **options) -> Run:
    (x, y), test = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
    model = fl.steer.scale_output(model, scale)
    largest = float(torch.linalg.eigvalsh(fl.ntk(model.network, x))[-1])
    lr = share / largest * len(x) / 2 * model.rate_factor
    return record(path, model, x, y, lr=lr, steps=steps, test=test, until=0.05, growth=1.5, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    rich = trained(folder / "rich", 0.1, share=0.1, steps=300)
    return {"lazy": trained(folder / "lazy", 300.0, steps=300), "rich": rich}


@pytest.mark.parametrize("regime", ["lazy", "rich"])
def test_the_regime_is_the_one_that_was_made(runs: dict[str, Run], regime: str):
    found = diagnose(runs[regime])
    assert found.regime == regime
    assert found.silent is False
    assert found.times["loss_half"] > 0
    assert (found.kernel_machine.of == "initial") == (regime == "lazy")
    assert (found.times["kernel_settled"] == 0) == (regime == "lazy")
    said = {item.verdict for item in found.evidence if item.topic == "regime"}
    assert regime in said
    assert not {"lazy", "rich"} - {regime} & said
    assert all(item.threshold and item.source for item in found.evidence if item.topic == "regime" and item.verdict)
    gap = found.numbers["gap"]
    assert float(gap) == found.gap.test.last
    assert 0 < float(gap.stderr) < 0.1
    assert float(found.gap) == float(gap)


def test_without_terms_between_outputs_a_failed_regression_proves_nothing(tmp_path: Path):
    found = diagnose(trained(tmp_path / "run", 300.0, steps=300, layers=False, full=False)).kernel_machine
    assert found.of is None
    assert found.errors["initial"] > 0.1
    assert "between different outputs" in found.reason


def test_it_can_be_read_by_people_and_programs(runs: dict[str, Run]):
    found = diagnose(runs["rich"])
    assert found.summary == str(found)
    assert str(found).startswith("rich: it learned features")
    assert len(str(found).splitlines()) <= 8
    text = found.full
    assert text.startswith("rich: it learned features")
    for topic in ("regime", "silent alignment", "kernel machine", "mechanism", "where features are learned"):
        assert f"\n{topic}:" in text
    assert max(map(len, text.splitlines())) <= 100
    told = json.loads(found.to_json())
    assert told["regime"] == "rich"
    assert told.keys() == {
        "schema",
        "regime",
        "so_far",
        "helped",
        "why_helped",
        "numbers",
        "gap",
        "plain_gap",
        "features_moved",
        "statistics_moved",
        "growth",
        "turning",
        "useful",
        "opinions",
        "silent",
        "kernel_machine",
        "mechanism",
        "layers",
        "times",
        "evidence",
        "runs",
        "headline",
        "explanation",
        "diverged",
    }
    assert told["schema"] == 4
    assert told["numbers"].keys() == {
        "gap",
        "plain_gap",
        "features_moved",
        "statistics_moved",
        "turning",
        "turning_raw",
        "growth",
        "alignment_rise",
        "loss_left",
        "weights_moved",
    }
    assert told["numbers"]["gap"]["value"] == told["gap"]["value"]["value"] == float(found.gap)
    assert told["gap"]["steps"] == found.gap.steps
    assert len(told["gap"]["values"]) == len(told["gap"]["test"]) == len(found.gap.steps)
    assert found.to_json() == diagnose(runs["rich"]).to_json()
    assert told["times"]["loss_half"] == found.times["loss_half"]
    assert told["evidence"][0].keys() >= {"topic", "says", "value", "threshold", "source", "spread", "runs", "verdict"}
    assert "NaN" not in found.to_json()


def test_paths_and_packed_runs_are_taken(runs: dict[str, Run], tmp_path: Path):
    packed = runs["lazy"].pack(tmp_path / "lazy.zip")
    assert diagnose(packed).regime == diagnose(str(runs["lazy"].path)).regime == "lazy"


@pytest.mark.parametrize("loss", ["mean", "cross-entropy", None])
def test_runs_of_the_watch_are_read(tmp_path: Path, loss: str | None):
    """Squared error and cross-entropy, told or found out by which of the two fell."""
    (x, y), test = digits(20, tested=24)
    labels = y.argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if loss == "mean" else 0.3, momentum=0.5)
    with fl.watch(
        model, (x, labels), out=tmp_path / "run", test=test, optimizer=optimizer, loss=loss, budget=None
    ) as watch:
        for _ in range(120):
            optimizer.zero_grad()
            f = model(x)
            value = (f - y).square().sum(1).mean() if loss == "mean" else nn.functional.cross_entropy(f, labels)
            value.backward()
            optimizer.step()
            watch.step(loss=value)
    found = diagnose(watch.run)
    assert found.regime in ("rich", "mixed", "lazy")
    assert set(found.kernel_machine.errors) == {"final", "initial"}
    assert found.kernel_machine.outputs == "all"
    assert set(found.mechanism) == {"0--2"}
    assert set(found.layers) == {"0", "2"}
    assert RunData(watch.run).loss_kind is (SQUARE if loss == "mean" else CROSS_ENTROPY)


def test_several_seeds_give_means_and_spreads(runs: dict[str, Run], tmp_path: Path):
    other = trained(tmp_path / "other", 300.0, seed=1, steps=300, layers=False)
    one, two = diagnose(runs["lazy"]), diagnose(other)
    both = diagnose([runs["lazy"], other.path])
    assert both.regime == "lazy"
    assert both.runs == ("lazy", "other")
    gap = next(item for item in both.evidence if "of the change of the centered outputs on test points" in item.says)
    values = [float(found.numbers["gap"]) for found in (one, two)]
    assert gap.value == pytest.approx(sum(values) / 2)
    assert gap.spread == pytest.approx(numpy.std(values, ddof=1))
    assert gap.runs == both.numbers["gap"].samples == 2
    over, own = gap.spread / math.sqrt(2), sum(float(one.numbers["gap"].stderr) for one in (one, two)) / 2**1.5
    assert float(both.numbers["gap"].stderr) == pytest.approx(max(over, own))
    # seeds that disagree are no evidence for either
    assert diagnose([runs["lazy"], runs["rich"]]).regime == "mixed"


def test_training_that_did_not_happen_cannot_be_judged(tmp_path: Path):
    found = diagnose(trained(tmp_path / "run", 1.0, share=1e-5, steps=30, layers=False))
    assert found.regime == "cannot tell"
    assert found.silent in (None, False)


def test_of_a_run_that_broke_down_that_is_the_headline_and_it_is_read_up_to_there(tmp_path: Path):
    run = trained(tmp_path / "run", 0.1, share=40.0, steps=40)
    run_data, found = RunData(run), diagnose(run)
    assert run_data.diverged is not None
    assert run_data.steps < run_data.diverged
    first = run.lines[0]["values"]["probe/loss"]
    assert all(line["values"]["probe/loss"] <= 2 * first for line in run.lines if line["step"] <= run_data.steps)
    assert found.headline.startswith(f"training broke down at step {run_data.diverged}")
    assert found.diverged is True
    assert not any(item.value > 1e3 for item in found.evidence)  # no weights of a run that is lost


def test_of_a_run_that_was_lost_from_the_start_nothing_else_is_said(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run"})
    for step, loss in enumerate([1.0, 50.0, 1e9, math.inf]):
        writer.scalars(step, {"probe/loss": loss, "weights/0/distance": 10.0**step, "ntk/norm": 10.0**step})
    writer.close()
    found = diagnose(tmp_path / "run")
    assert found.regime == "cannot tell"
    assert found.headline == "training broke down at step 2. Nothing else can be told."
    assert [item.says for item in found.evidence] == ["run broke down at step 2; it is read up to step 0"]
    assert "thresholds:" not in str(found)


def exploded(path: Path, losses: list[float], **config) -> RunData:
    writer = RunWriter(path, {"name": "run", **config})
    writer.array("targets", 0, y=numpy.eye(3)[[0, 1, 2, 0, 1]] - 1 / 3)
    for step, loss in enumerate(losses):
        values = {"probe/loss": loss, "ntk/norm": float(loss < 1e5), "weights/0/distance": loss}
        if "loss_convention" in config:
            values["probe/cross_entropy"] = 1.0 / (1 + step)
        writer.scalars(step, values)
    writer.close()
    return RunData(open_run(path))


def test_a_network_that_blew_up_and_died_broke_down_where_its_loss_exploded(tmp_path: Path):
    run_data = exploded(tmp_path / "run", [0.9, 0.8, 24.7, 6.5e5, 4e22, *[0.888] * 20])
    assert (run_data.diverged, run_data.steps) == (3, 1)
    found = diagnose(tmp_path / "run")
    assert found.headline.startswith("training broke down at step 3. Up to step 1: ")
    assert not any(item.value > 1e3 for item in found.evidence)


@pytest.mark.parametrize("convention", ["cross-entropy", None])
def test_outputs_that_grow_on_cross_entropy_and_a_small_first_loss_are_no_breakdown(tmp_path: Path, convention):
    run_data = exploded(tmp_path / "entropy", [0.9, 40.0, 2e3, 5e4], loss_convention=convention)
    assert run_data.diverged is None
    assert exploded(tmp_path / "fine", [1e-6, 0.5, 0.1]).diverged is None
    assert exploded(tmp_path / "square", [0.9, 40.0, 2e3, 5e4], loss_convention="mean").diverged == 2


def test_training_that_breaks_down_late_is_judged_by_what_came_before(runs: dict[str, Run], tmp_path: Path):
    shutil.copytree(runs["rich"].path, tmp_path / "run")
    last = runs["rich"].lines[-1]["step"]
    begun = runs["rich"].lines[0]["values"]["probe/loss"]
    writer = RunWriter(tmp_path / "run", {}, resume=True)
    for step, loss in ((last + 1, 9 * begun), (last + 2, 1e30), (last + 3, math.nan)):
        writer.scalars(step, {"probe/loss": loss, "weights/network.0/distance": 1e20})
    writer.close()
    found, whole = diagnose(tmp_path / "run"), diagnose(runs["rich"])
    assert found.headline == f"training broke down at step {last + 2}. Up to step {last}: {whole.headline}"
    for name, number in whole.numbers.items():
        assert float(found.numbers[name]) == pytest.approx(float(number), nan_ok=True), name
    assert found.layers.keys() == whole.layers.keys()
    for name, layer in whole.layers.items():  # from Python 3.13 on a nan makes dataclasses unequal
        assert astuple(found.layers[name]) == pytest.approx(astuple(layer), rel=0, abs=0, nan_ok=True), name


def test_a_number_that_was_not_finite_once_is_no_end(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run"})
    for step, loss in enumerate([4.0, math.nan, 2.0, 1.0]):
        writer.scalars(step, {"probe/loss": loss})
    writer.event("diverged", 1)
    writer.close()
    run_data = RunData(open_run(tmp_path / "run"))
    assert run_data.diverged is None
    assert diagnose(tmp_path / "run").diverged is False
    assert run_data.loss is not None
    assert run_data.loss.values.tolist() == [4.0, 2.0, 1.0]


def test_the_kernel_is_compared_without_its_constant(tmp_path: Path):
    """A constant much larger than the rest, which turns by an angle: 1 - cosine without the constant is known."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    u, v = torch.linalg.qr(columns - columns.mean(0))[0].unbind(1)
    angle = 0.3
    w = math.cos(angle) * u + math.sin(angle) * v
    constant = 50 * torch.ones(7, 7, dtype=torch.float64)
    kernels = torch.stack([constant + torch.outer(a, a) for a in (u, w)])
    y = u[:, None]
    run = written(tmp_path / "run", [0, 5], kernels, torch.stack([0 * y, 0.5 * y]), y)
    numbers = diagnose(run).numbers
    assert float(numbers["turning"]) == pytest.approx(1 - math.cos(angle) ** 2, rel=1e-6)
    assert float(numbers["turning_raw"]) < 1e-5


def test_a_constant_target_has_no_centered_alignment(tmp_path: Path):
    (x, _), _ = digits(20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 1))
    found = diagnose(record(tmp_path / "run", model, x, torch.ones(20, 1), lr=0.02, steps=60, layers=False))
    assert math.isnan(float(found.numbers["alignment_rise"]))
    assert found.silent is None
    said = next(item.says for item in found.evidence if item.topic == "silent alignment")
    assert said.startswith("cannot tell whether alignment was silent: the target is constant")


def test_a_kernel_that_vanishes_when_centered_is_not_called_unrecorded(tmp_path: Path):
    """Kernels that are constant over all samples: norm and growth are known, the angle is not."""
    y = torch.tensor([[1.0], [-1.0], [0.5], [2.0]], dtype=torch.float64)
    kernels = torch.ones(3, 4, 4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    f = torch.stack([share * y for share in (0.0, 0.4, 0.8)])
    found = diagnose(written(tmp_path / "run", [0, 5, 9], kernels, f, y))
    said = [item.says for item in found.evidence]
    assert "cannot tell how far the kernel rotated: the centered kernel vanishes" in said
    assert float(found.growth) == pytest.approx(3.0)
    assert any(one.startswith("the kernel norm became 3") for one in said)
    assert "not both recorded" not in found.full


def test_after_three_steps_nothing_is_claimed(tmp_path: Path):
    found = diagnose(trained(tmp_path / "run", 1.0, share=0.02, steps=3, layers=False))
    assert found.regime == "cannot tell"
    assert found.silent is None
    assert found.kernel_machine.errors["initial"] < 0.1  # trivially
    assert found.kernel_machine.of is None
    assert "hardly fallen" in found.kernel_machine.reason


def test_what_makes_numbers_less_sure_is_said(tmp_path: Path):
    (x, y), _ = digits(24)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with fl.watch(
        model, (x, y), out=tmp_path / "run", optimizer=optimizer, budget=None, quantities=["kernel"]
    ) as watch:
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            watch.step()
    text = " ".join(diagnose(watch.run).full.split())
    assert "the steps of AdamW do not follow the tangent kernel" in text
    assert "BatchNorm" in text


def test_an_empty_run_is_no_error(tmp_path: Path):
    RunWriter(tmp_path / "run", {"name": "nothing"}).close()
    found = diagnose(tmp_path / "run")
    assert found.regime == "cannot tell"
    assert found.silent is None
    assert found.kernel_machine.of is None
    assert all(math.isnan(time) for time in found.times.values())
    assert isinstance(str(found), str)


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(fl.errors.RunError):
        diagnose(tmp_path)
    with pytest.raises(fl.errors.InputTypeError, match="expected a Run"):
        diagnose(3)
    with pytest.raises(fl.errors.InputValueError, match="no runs"):
        diagnose([])


def thinned(run: Run, out: Path, draw) -> tuple[Run, bool]:
    """A copy in which scalars and arrays are missing or nan, and at times damaged."""
    shutil.rmtree(out, ignore_errors=True)
    config = {key: value for key, value in run.config.items() if key not in ("schema", "created")}
    for key in list(config):
        if draw(st.integers(0, 4)) == 0:
            config[key] = draw(st.sampled_from([None, 3, "mean", [], {"groups": [None]}, {"class": 3, "groups": 7}]))
    writer, damage = RunWriter(out, config), draw(st.booleans())
    bad = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308])
    gone = {name for name in run.names if draw(st.integers(0, 5)) == 0}
    spoiled = {name: draw(bad) for name in run.names if draw(st.integers(0, 5)) == 0}
    for line in run.lines:
        if draw(st.integers(0, 9)) == 0:
            continue
        values = {name: value for name, value in line["values"].items() if name not in gone}
        some = draw(st.integers(0, 1))
        values |= {name: value for name, value in spoiled.items() if name in values and (some or line["step"] > 5)}
        writer.scalars(line["step"], values)
    for name, steps in run.arrays.items():
        for step in steps:
            act = draw(st.integers(0, 11))
            act = 0 if act in (2, 4, 5) and not damage else act
            arrays = run.array(name, step)
            if act == 0:
                continue
            if act == 1:
                arrays = {key: numpy.full_like(array, draw(bad)) for key, array in arrays.items()}
            elif act == 2:
                arrays = {key: array[..., :-1] for key, array in arrays.items()}
            elif act == 3:
                arrays = dict([*arrays.items()][1:]) or {"other": numpy.zeros(3)}
            elif act == 4:
                arrays = {key: array.ravel() for key, array in arrays.items()}
            writer.array(name, step, **arrays)
            if act == 5:
                (out / "arrays" / name / f"{step:012d}.npz").write_bytes(b"damaged")
    writer.close()
    return open_run(out), damage


@pytest.fixture(scope="module", params=["mean", "cross-entropy"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    if request.param == "cross-entropy":
        y = nn.functional.one_hot(y.argmax(1), 2) - 0.5
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    path = tmp_path_factory.mktemp("small") / "run"
    return record(path, model, x, y, lr=0.3, steps=30, test=(x[:4] + 1, y[:4]), loss=request.param)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_whatever_is_missing_or_nan_it_is_no_error(small: Run, tmp_path_factory, data: st.DataObject):
    run, damaged = thinned(small, tmp_path_factory.getbasetemp() / "thinned", data.draw)
    try:
        found = diagnose(run)
    except fl.errors.RunError:
        assert damaged
        return
    assert isinstance(found, Diagnosis)
    assert found.regime in ("lazy", "rich", "mixed", "lazy then rich", "cannot tell")
    said = {item.verdict for item in found.evidence if item.topic == "regime"}
    assert not (found.regime == "lazy" and said & {"rich"})
    assert str(found)
    json.loads(found.to_json())


def copied(run: Run, out: Path, name: str, step: int, change: Callable[[Path], None]) -> Path:
    """A copy of a run, one of its arrays changed."""
    shutil.copytree(run.path, out)
    change(out / "arrays" / name / f"{step:012d}.npz")
    return out


def other_shape(file: Path) -> None:
    arrays = dict(numpy.load(file))
    numpy.savez(file, **{key: array[..., :-1] for key, array in arrays.items()})


def flat(file: Path) -> None:
    arrays = dict(numpy.load(file))
    numpy.savez(file, **{key: array.ravel() for key, array in arrays.items()})


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("kernel", 0),
        ("kernel", 10),
        ("kernel", 30),
        ("outputs", 0),
        ("outputs", 30),
        ("targets", 0),
        ("test", 0),
        ("test", 30),
    ],
)
@pytest.mark.parametrize(
    "change",
    [lambda file: file.write_bytes(file.read_bytes()[:300]), other_shape, flat],
    ids=["truncated", "other shape", "flat"],
)
def test_a_damaged_array_is_an_error_not_another_verdict(small: Run, tmp_path: Path, name: str, step: int, change):
    with pytest.raises(fl.errors.RunError, match="damaged"):
        diagnose(copied(small, tmp_path / "run", name, step, change))


@pytest.mark.parametrize("regime", ["lazy", "rich"])
def test_no_other_kernel_is_taken_for_the_first(runs: dict[str, Run], tmp_path: Path, regime: str):
    run, whole = runs[regime], diagnose(runs[regime])
    without = diagnose(copied(run, tmp_path / "run", "kernel", 0, Path.unlink))
    assert math.isnan(float(without.numbers["turning"]))
    assert without.kernel_machine.of is None
    # what was measured against it in training is left
    assert float(without.numbers["turning_raw"]) == pytest.approx(float(whole.numbers["turning_raw"]), rel=1e-3)
    assert float(without.numbers["growth"]) == pytest.approx(float(whole.numbers["growth"]), rel=1e-5)
    assert math.isnan(float(without.numbers["growth"].stderr))
    # the regime rests on the gap, which needs no kernel
    assert without.regime == regime
    said = [item.says for item in without.evidence]
    assert "cannot tell how far the kernel rotated: the first kernel and a later one were not both recorded" in said


def test_numbers_that_were_not_measured_before_training_are_held_against_nothing(runs: dict[str, Run], tmp_path: Path):
    shutil.copytree(runs["rich"].path, tmp_path / "run")
    lines = (tmp_path / "run" / "scalars.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "scalars.jsonl").write_text("".join(lines[1:]))
    found = diagnose(tmp_path / "run")
    names = ("gap", "alignment_rise", "loss_left")
    assert all(math.isnan(float(found.numbers[name])) for name in names)
    assert math.isnan(found.times["loss_half"])
    assert found.mechanism == {}
    assert found.regime == "cannot tell"
