"""What a watched run holds, and that nothing stops training."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, RunError
from featlearn.monitoring import StepView
from featlearn.monitoring import step_measurement as step_module
from featlearn.monitoring.entry import watch
from featlearn.monitoring.numbers import UserNumbers, safe
from featlearn.monitoring.watch import Watch
from featlearn.record import RunWriter, open_run


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs)).double()


def data(samples: int = 9, outputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=generator).double(), torch.arange(samples) % outputs


def train(model: nn.Module, seen: Watch | None, optimizer: torch.optim.Optimizer, steps: int, **scalars: Any) -> None:
    x, y = data(30, seed=1)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if seen is not None:
            seen.step(loss=loss, **scalars)


def watched(path: Path, steps: int = 5, **options: Any) -> Watch:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    given = {"probe": data(), "out": path, "every": 1, "budget": None, "optimizer": optimizer, **options}
    with watch(model, **given) as seen:
        train(model, seen, optimizer, steps)
    return seen


def at(step: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """The network after so many steps, as it was at the start, and its optimizer."""
    model, start = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    train(model, None, optimizer, step)
    return model, start, optimizer


def gaps(model: nn.Module, start: nn.Module, x: Tensor, test: Tensor) -> dict[str, float]:
    """The numbers under gap/, with standard errors by leaving out one sample after the other."""
    found = {}
    for name, linked, inputs in (("probe", "link", x), ("test", "link_test", test)):
        every = torch.arange(len(inputs))
        gap = fl.linearization_gap(model, inputs, start.state_dict())
        found[f"gap/{name}"] = float(gap)
        parts = [
            fl.linearization_gap(model, inputs[every % 16 != i], start.state_dict()) for i in range(min(16, len(x)))
        ]
        left = torch.tensor(parts[: len(inputs)], dtype=torch.float64)
        found[f"gap/{name}_error"] = math.sqrt(float((left - left.mean()).square().sum()) * (len(left) - 1) / len(left))
        found |= {f"gap/{linked}": found[f"gap/{name}"], f"gap/{linked}_error": found[f"gap/{name}_error"]}
    found["gap/rounding"] = fl.linearization_gap(model, x, start.state_dict()).rounding
    found |= {"gap/link_ops": 0.0, "gap/merged_weights": 0.0}
    change = (model(x) - start(x)).detach()
    found["gap/change"] = float((change - change.mean(0)).norm()) / math.sqrt(len(x))
    return found


def changes(model: nn.Module, start: nn.Module, x: Tensor) -> dict[str, float]:
    """The numbers of the quantity "moved"."""
    initial = start.state_dict()
    last = fl.quantities.features_moved(model, x, initial)
    found = {
        "features/moved": float(last),
        "features/moved_error": last.relative.stderr,
        "features/cka": last.cka,
    }
    for name, change in fl.quantities.features_moved(model, x, initial, by="layer").items():
        found |= {f"features/{name}/moved": float(change), f"features/{name}/cka": change.cka}
    return found


def test_numbers_are_those_of_the_functions(tmp_path: Path):
    """Every scalar against the public function that defines it, at a step in the middle."""
    test = data(7, seed=5)
    seen = watched(tmp_path / "run", test=test, quantities={"optimizer": True})
    model, start, _ = at(3)
    before, _, _ = at(2)
    x, labels = data()
    y = torch.nn.functional.one_hot(labels, 3).double() - 1 / 3
    kernel, first = fl.ntk(model, x), fl.ntk(start, x)
    layers = fl.ntk(model, x, by="layer")
    f = model(x).detach()
    features = fl.neural_features(model, x, initial=start.state_dict())
    pairs = fl.layer_alignment(model, x)
    balances = [fl.quantities.layer_balance(net, x, rates={"*": 0.5}) for net in (model, start)]
    expected = {
        "lr": 0.5,
        "probe/loss": float((f - y).square().sum(1).mean()),
        "probe/cross_entropy": float(nn.functional.cross_entropy(f, labels)),
        "probe/accuracy": float((f.argmax(1) == labels).double().mean()),
        "test/accuracy": float((model(test[0]).argmax(1) == test[1]).double().mean()),
        "test/cross_entropy": float(nn.functional.cross_entropy(model(test[0]).detach(), test[1])),
        "ntk/norm": float(kernel.norm()),
        "ntk/trace": float(kernel.trace()),
        "ntk/effective_rank": float(fl.metrics.effective_rank(kernel)),
        "ntk/distance": float(fl.metrics.kernel_distance(kernel, first)),
        "ntk/centered_distance": float(fl.metrics.kernel_distance(kernel, first, centered=True)),
        "ntk/velocity": float(fl.metrics.kernel_distance(kernel, fl.ntk(before, x))),
        "ntk/alignment": float(fl.metrics.alignment(kernel, y)),
        "ntk/centered_alignment": float(fl.metrics.centered_alignment(kernel, y)),
        "ntk/specialization": float(fl.metrics.specialization(fl.ntk(model, x, outputs="each"), y).diagonal().mean()),
        "ntk/optimizer/norm": 0.5 * float(kernel.norm()),
        "ntk/optimizer/alignment": float(fl.metrics.alignment(kernel, y)),
        "weights/norm": math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters())),
    }
    expected |= gaps(model, start, x, test[0]) | changes(model, start, x)
    last_features = model[:4](x).detach()
    expected["richness/low_rank"] = float(fl.metrics.low_rank_richness(last_features, f))
    own = torch.nn.functional.one_hot(test[1], 3).double() - 1 / 3
    expected["test/loss"] = float((model(test[0]).detach() - own).square().sum(1).mean())
    for name in ("0", "2", "4"):
        expected[f"ntk/layers/{name}/share"] = float((layers[name] * kernel).sum() / kernel.square().sum())
        expected[f"ntk/layers/{name}/alignment"] = float(fl.metrics.alignment(layers[name], y))
        now, then = ([p.detach() for p in net[int(name)].parameters()] for net in (model, start))
        expected[f"weights/{name}/norm"] = float(torch.cat([p.flatten() for p in now]).norm())
        gone, size = (
            torch.cat([p.flatten() for p in part]) for part in ([a - b for a, b in zip(now, then, strict=True)], then)
        )
        expected[f"weights/{name}/distance"] = float(gone.norm() / size.norm())
        for quantity in (
            "uncentered",
            "centered",
            "double_centered",
            "ptk_centered",
            "centered_share",
            "weight_change",
        ):
            expected[f"features/{name}/{quantity}"] = getattr(features[name], quantity)
    for quantity in ("uncentered", "centered"):
        expected[f"features/mean/{quantity}"] = features.mean(quantity)
    for a, b in (("0", "2"), ("2", "4")):
        expected[f"layers/{a}--{b}/alignment"] = pairs[a, b].value
        expected[f"layers/{a}--{b}/random"] = pairs[a, b].random
        size = float(start[int(a)].weight.detach().square().sum()) / 0.5
        drift = balances[0][a, b].value - balances[1][a, b].value
        expected[f"layers/{a}--{b}/balance_drift"] = float(drift.norm()) / size
    all_now, all_then = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (model, start))
    expected["weights/distance"] = float((all_now - all_then).norm() / all_then.norm())
    (line,) = [line["values"] for line in seen.run.lines if line["step"] == 3]
    assert set(line) - {"loss"} == set(expected)
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name
    steps, alignments = seen.run.scalar("ntk/test/alignment")
    assert steps.tolist() == [0, 5], "at the ends only"
    assert alignments[1] == pytest.approx(float(fl.metrics.alignment(fl.ntk(at(5)[0], test[0]), own)))
    centered = float(fl.metrics.centered_alignment(fl.ntk(at(5)[0], test[0]), own))
    assert seen.run.scalar("ntk/test/centered_alignment")[1][1] == pytest.approx(centered)


class Recurrent(nn.Module):
    """An LSTM, which holds its weights in a list besides; the last step is read out by a weight that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.again = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.out(self.body(x)[0][:, -1])))


def tokens_first() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(5, 6), layer, nn.Flatten(), nn.Linear(18, 4), nn.LogSoftmax(1))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers)


def normalized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 4))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Recurrent, (3, 5)), (tokens_first, (3, 5)), (convolutions, (2, 3, 3)), (normalized, (5,))],
)
def test_numbers_of_difficult_networks_are_those_of_the_functions(make: Any, shape: tuple[int, ...], tmp_path: Path):
    """Later steps compare with what the first ones stored: gradients and representations of the start."""
    torch.manual_seed(0)
    model = make().double()
    start = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    x, tests = (torch.randn(count, *shape, generator=generator).double() for count in (11, 6))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    labels = torch.arange(11) % 4
    states = []
    with watch(
        model, (x, labels), test=(tests, labels[:6]), out=tmp_path / "run", every=1, budget=None, optimizer=optimizer
    ) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            seen.step(loss=loss)
            states.append(copy.deepcopy(model))
    compared = 0
    for step, later in enumerate(states, 1):
        (line,) = [line["values"] for line in seen.run.lines if line["step"] == step]
        initial = start.state_dict()
        gap, gap_test = (fl.linearization_gap(later, inputs, initial) for inputs in (x, tests))
        features = fl.neural_features(later, x, initial=initial)
        expected = {"gap/link": float(gap), "gap/probe": gap.plain}
        expected |= {"gap/link_test": float(gap_test), "gap/test": gap_test.plain}
        expected["features/moved"] = float(fl.quantities.features_moved(later, x, initial))
        for name, pair in fl.layer_alignment(later, x).items():
            expected["layers/" + "--".join(map(safe, name)) + "/alignment"] = pair.value
        for name, layer in features.items():
            for quantity in ("uncentered", "centered", "double_centered", "centered_share", "weight_change"):
                expected[f"features/{safe(name)}/{quantity}"] = getattr(layer, quantity)
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, rel=1e-8, abs=1e-11, nan_ok=True), (step, name)
        compared += sum(value == value for value in expected.values())
    assert compared > 40


def test_arrays_are_those_of_the_functions(tmp_path: Path):
    test = data(7, seed=5)
    run = watched(tmp_path / "run", test=test, quantities={"optimizer": True}).run
    model, _, _ = at(5)
    x, labels = data()
    y = (torch.nn.functional.one_hot(labels, 3).double() - 1 / 3).numpy()
    kernel = fl.ntk(model, x)
    every = list(range(6))
    assert run.arrays == {
        "initial": [0],
        "kernel": every,
        "optimizer_kernel": [5],
        "outputs": every,
        "pictures": [0, 5],
        "specialization": every,
        "spectrum": every,
        "targets": [0],
        "test": every,
    }
    close = {"rtol": 1e-5, "atol": 1e-5}
    last = run.array("kernel", 5)
    assert numpy.allclose(last["mean"], kernel, **close)
    assert numpy.allclose(last["each"], fl.ntk(model, x, outputs="each"), **close)
    assert set(run.array("kernel", 3)) == {"mean"}
    assert set(run.array("kernel", 0)) == {"mean", "each", "full"}
    assert numpy.allclose(last["full"], fl.ntk(model, x, outputs="full"), **close)
    assert numpy.allclose(run.array("kernel", 0)["full"], fl.ntk(network(), x, outputs="full"), **close)
    assert numpy.allclose(run.array("outputs", 5)["f"], model(x).detach(), **close)
    assert numpy.allclose(run.array("targets", 0)["y"], y, **close)
    spectrum = fl.metrics.spectrum(kernel, torch.from_numpy(y))
    assert numpy.allclose(run.array("spectrum", 5)["eigenvalues"], spectrum.eigenvalues, **close)
    assert numpy.allclose(run.array("spectrum", 5)["task_power"], spectrum.task_power, **close)
    unseen = run.array("test", 5)
    assert numpy.allclose(unseen["cross"], fl.ntk(model, test[0], x2=x), **close)
    assert numpy.allclose(unseen["kernel"], fl.ntk(model, test[0]), **close)
    assert numpy.allclose(unseen["cross_full"], fl.ntk(model, test[0], x2=x, outputs="full"), **close)
    assert numpy.allclose(run.array("test", 0)["cross_full"], fl.ntk(network(), test[0], x2=x, outputs="full"), **close)
    assert unseen["f"].shape == unseen["y"].shape == (7, 3)
    assert numpy.allclose(run.array("optimizer_kernel", 5)["mean"], 0.5 * kernel, **close)
    update = run.array("optimizer_kernel", 5)
    assert numpy.allclose(update["cross"], 0.5 * fl.ntk(model, test[0], x2=x), **close)
    assert numpy.allclose(update["full"], 0.5 * fl.ntk(model, x, outputs="full"), **close)
    assert numpy.allclose(update["cross_full"], 0.5 * fl.ntk(model, test[0], x2=x, outputs="full"), **close)


@pytest.mark.parametrize(("outputs", "every", "found"), [(1, 5, {"mean"}), (3, 5, {"mean", "each"}), (3, 1, None)])
def test_kernels_between_outputs_are_kept_where_they_are_small_and_say_something_new(
    outputs: int, every: int, found: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 9 samples 2 outputs at most; the last step is measured once whether or not it was due."""
    monkeypatch.setattr(step_module, "LARGEST_FULL", 18 if found else 27)
    x, y = data(outputs=outputs)
    model = network(outputs)
    with watch(
        model,
        probe=(x, y if outputs > 1 else x[:, 0]),
        out=tmp_path / "run",
        every=every,
        budget=None,
        test=(x[:4], None),
    ) as seen:
        for _ in range(5):
            seen.step()
    run = seen.run
    for step in (0, 5):
        assert set(run.array("kernel", step)) == (found or {"mean", "each", "full"})
        assert ("cross_full" in run.array("test", step)) == (found is None)
    assert seen.measurements == 1 + 5 // every
    assert run.scalar("ntk/norm")[0].tolist() == list(range(0, 6, every))


def test_the_configuration_says_what_was_run(tmp_path: Path):
    config = watched(tmp_path / "run", loss="cross-entropy", name="mine").run.config
    assert config["model"] == {
        "class": "torch.nn.modules.container.Sequential",
        "parameters": 123,
        "trainable": 123,
        "layers": ["0", "2", "4"],
        "batch_norm": False,
        "dropout": False,
    }
    assert config["optimizer"]["class"] == "SGD"
    assert config["optimizer"]["groups"][0]["lr"] == 0.5
    assert (config["name"], config["loss_convention"], config["every"], config["budget"]) == (
        "mine",
        "cross-entropy",
        1,
        None,
    )
    probe = config["probe"]
    assert (probe["samples"], probe["outputs"], probe["classification"], len(probe["sha256"])) == (9, 3, True, 64)
    assert config["layer_names"] == {"0": "0", "2": "2", "4": "4"}
    assert (config["finished"], config["steps"], config["device"], config["dtype"]) == (True, 5, "cpu", "float64")
    assert config["versions"]["torch"] == torch.__version__
    assert config["seed"] == torch.initial_seed()
    assert "mine" in repr(open_run(tmp_path / "run"))


def test_losses_are_means_since_the_last_line(tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", every=3, budget=None) as seen:
        for loss in range(1, 8):
            seen.step(loss=torch.tensor(float(loss)) if loss % 2 else float(loss))
    steps, values = seen.run.scalar("loss")
    assert steps.tolist() == [3, 6, 7]
    assert values.tolist() == [2.0, 5.0, 7.0]


def test_a_loss_on_a_device_is_not_read_at_every_step():
    """Tensors of the meta device cannot be read at all, but they can be added."""
    means = UserNumbers()
    for _ in range(9):
        means.add("loss", torch.tensor(1.0, device="meta", requires_grad=True))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        means.means()


def test_own_scalars_are_averaged_if_frequent_and_kept_at_their_step_if_rare(tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", every=10, budget=None) as seen:
        for step in range(1, 11):
            seen.step(**{"each step": float(step)}, **({"test/acc %": 0.5} if step == 4 else {}))
        seen.log(late=torch.tensor(2))
    run = seen.run
    assert [part.tolist() for part in run.scalar("each_step")] == [[1, 10], [1.0, 6.0]]
    assert [part.tolist() for part in run.scalar("test/acc__")] == [[4], [0.5]]
    assert [part.tolist() for part in run.scalar("late")] == [[10], [2.0]]


def test_steps_are_log_spaced_by_default(tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None, quantities=["kernel"]) as seen:
        for _ in range(20):
            seen.step()
    assert seen.run.scalar("ntk/norm")[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 20]


def test_each_quantity_may_have_its_own_schedule(tmp_path: Path):
    quantities = {"features": 3, "layers": False, "weights": lambda step: step == 5}
    with watch(network(), probe=data(), out=tmp_path / "run", every=2, budget=None, quantities=quantities) as seen:
        for _ in range(7):
            seen.step()
    run = seen.run
    assert run.scalar("ntk/norm")[0].tolist() == [0, 2, 4, 6, 7]
    assert run.scalar("features/0/uncentered")[0].tolist() == [0, 3, 6, 7]
    assert run.scalar("weights/norm")[0].tolist() == [0, 5, 7]
    assert not any(name.startswith("layers/") for name in run.names)


def test_own_quantities_see_the_moment(tmp_path: Path):
    def sizes(view: StepView) -> dict[str, float]:
        return {"own/trace": view.kernel.trace(), "own/outputs": float(view.outputs.abs().max())}

    quantities = {"sizes": sizes, "depth": (lambda view: view.step, 2)}
    run = watched(tmp_path / "run", quantities=quantities).run
    assert run.scalar("own/trace")[1] == pytest.approx(run.scalar("ntk/trace")[1])
    assert [part.tolist() for part in run.scalar("depth")] == [[0, 2, 4, 5], [0, 2, 4, 5]]
    only = watched(tmp_path / "only", quantities=[sizes]).run
    assert set(only.names) == {
        "lr",
        "loss",
        "own/trace",
        "own/outputs",
        "probe/loss",
        "probe/accuracy",
        "probe/cross_entropy",
    }


def test_regression_and_probes_without_targets(tmp_path: Path):
    model, x = network(1), data()[0]
    with watch(model, probe=(x, x[:, 0]), out=tmp_path / "a", budget=None) as seen:
        seen.step()
    values = seen.run.lines[0]["values"]
    expected = float((model(x)[:, 0].detach() - x[:, 0]).square().mean())
    assert values["probe/loss"] == pytest.approx(expected)
    assert "probe/accuracy" not in values
    assert "ntk/specialization" not in values
    with watch(model, probe=(x, None), out=tmp_path / "b", budget=None) as seen:
        seen.step()
    assert "ntk/norm" in seen.run.names
    assert not any("alignment" in name and name.startswith("ntk") for name in seen.run.names)


def test_many_outputs_are_sampled(tmp_path: Path):
    model = network(40)
    x, y = data(9, 40)
    with watch(model, probe=(x, y), out=tmp_path / "run", budget=None) as seen:
        seen.step()
    run, kernel = seen.run, fl.ntk(model, x)
    assert run.scalar("ntk/trace")[1][0] == pytest.approx(float(kernel.trace()), rel=0.5)
    assert run.array("kernel", 0)["mean"].shape == (9, 9)
    assert "each" not in run.array("kernel", 0)
    assert "ntk/specialization" not in run.names


def test_the_probe_is_copied(tmp_path: Path):
    x, y = data()
    with watch(network(), probe=(x, y), out=tmp_path / "run", budget=None) as seen:
        x.zero_()
        seen.step()
    assert seen.run.scalar("ntk/distance")[1].tolist() == [0.0, 0.0]


def test_awkward_names_are_made_safe(tmp_path: Path):
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))
            self.add_module("a b/c", nn.Linear(3, 3))
            self.add_module("a_b_c", nn.Linear(3, 2))
            self.add_module("x" * 150, nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.weight.mT
            for part in self.children():
                h = torch.relu(part(h))
            return h

    torch.manual_seed(0)
    with watch(Root(), probe=(torch.randn(6, 5), None), out=tmp_path / "run", budget=None) as seen:
        seen.step()
    names, scalars = seen.run.config["layer_names"], seen.run.names
    assert (names[""], names["a b/c"], names["a_b_c"]) == ("root", "a_b_c", "a_b_c_2")
    assert {f"ntk/layers/{name}/share" for name in names.values()} <= set(scalars)
    assert any(name.startswith("layers/root--a_b_c/") for name in scalars)


def test_a_model_that_cannot_be_measured_is_refused_on_entering(tmp_path: Path):
    with (
        pytest.raises(FeatlearnError, match="max_norm"),
        watch(nn.Embedding(5, 3, max_norm=1.0), probe=(torch.zeros(4, dtype=torch.long), None), out=tmp_path / "run"),
    ):
        pytest.fail("entered")
    assert not (tmp_path / "run").exists(), "it can be tried again"


def test_what_only_some_models_have_is_left_out_unless_asked_for(tmp_path: Path):
    """A model with no linear map has a kernel, and no neural features."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sum(1)

    probe = (torch.randn(4, 5), None)
    with (
        pytest.warns(UserWarning, match="features could not be measured"),
        watch(Scale(), probe=probe, out=tmp_path / "a", budget=None) as seen,
    ):
        seen.step()
    assert [event["what"] for event in seen.run.events if event["kind"] == "failed"] == ["features"]
    assert seen.run.scalar("ntk/norm")[0].tolist() == [0, 1]
    with pytest.raises(FeatlearnError), watch(Scale(), probe=probe, out=tmp_path / "b", quantities=["features"]):
        pytest.fail("entered")


def messages(told: Any) -> list[str]:
    return [str(warning.message) for warning in told if "fl.watch" in str(warning.message)]


def test_a_diverged_run_goes_on(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    model = network()
    with watch(model, probe=data(), out=tmp_path / "run", every=1, budget=None) as seen:
        seen.step(loss=1.0)
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
        for _ in range(3):
            seen.step(loss=math.nan)
    assert seen.steps == 4
    assert math.isnan(seen.run.scalar("loss")[1][-1])
    events = [(event["kind"], event.get("what")) for event in seen.run.events]
    kinds = [
        ("started", None),
        ("diverged", "measurement"),
        ("diverged", "loss"),
        ("repeated", "measurement"),
        ("finished", None),
    ]
    assert events == kinds, "an event once, not at each of the steps 2, 3 and 4"
    assert [event["count"] for event in seen.run.events if event["kind"] == "repeated"] == [2]
    told = messages(recwarn)
    assert any("the loss is nan at step 2" in message for message in told)
    assert any("nothing could be measured at step 2: the model gives values" in message for message in told)
    assert {warning.filename for warning in recwarn if "fl.watch" in str(warning.message)} == {__file__}
    assert len(told) == len(set(told)), "told once"


def test_a_loss_that_is_nan_is_an_event_and_told_once(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    with watch(network(), probe=data(), out=tmp_path / "run", every=2, budget=None) as seen:
        for step in range(1, 9):
            seen.step(loss=math.nan if step in (3, 7) else 1.0)
    (told,) = messages(recwarn)
    assert "the loss is nan at step 4" in told
    run = seen.run
    assert [(e["kind"], e["step"], e["what"]) for e in run.events if "what" in e] == [("diverged", 4, "loss")]
    assert run.scalar("loss")[1].tolist() == pytest.approx([1.0, math.nan, 1.0, math.nan], nan_ok=True)
    assert run.scalar("ntk/norm")[0].tolist() == [0, 2, 4, 6, 8], "the network itself can be measured"


def test_a_kernel_that_overflows_is_an_event_and_told_once(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    """Outputs of 1e10, and a kernel of 1e40, which single precision does not hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 2, bias=False))
    x, y = data(outputs=2)
    with watch(model, probe=(x.float(), y), out=tmp_path / "run", every=1, budget=None) as seen:
        seen.step(loss=1.0)
        with torch.no_grad():
            model[0].weight.mul_(1e-10), model[1].weight.mul_(1e20)
        for _ in range(3):
            seen.step(loss=1.0)
    run = seen.run
    assert len(messages(recwarn)) == len(set(messages(recwarn)))
    assert any("kernel could not be measured" in told for told in messages(recwarn))
    assert [e["step"] for e in run.events if (e["kind"], e.get("what")) == ("diverged", "kernel")] == [2]
    assert [e["count"] for e in run.events if (e["kind"], e.get("what")) == ("repeated", "kernel")] == [2]
    assert run.scalar("ntk/norm")[0].tolist() == [0, 1]
    assert run.scalar("weights/norm")[0].tolist() == [0, 1, 2, 3, 4], "what can be measured is"


def test_a_folder_that_cannot_be_written_is_refused_on_entering(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    with (
        pytest.raises(RunError, match="cannot be written"),
        watch(network(), probe=data(), out=tmp_path / "file" / "run"),
    ):
        pytest.fail("entered")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_that_can_no_longer_be_written_does_not_stop_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    """A file in the place of the folder of arrays: root, too, cannot write there."""
    with watch(network(), probe=data(), out=tmp_path / "run", every=1, budget=None) as seen:
        seen.step(loss=1.0)
        (tmp_path / "run" / "arrays").rename(tmp_path / "arrays")
        (tmp_path / "run" / "arrays").touch()
        for _ in range(3):
            seen.step(loss=2.0)
        (tmp_path / "run" / "arrays").unlink()
        (tmp_path / "arrays").rename(tmp_path / "run" / "arrays")
        seen.step(loss=3.0)
    (told,) = messages(recwarn)
    assert "cannot be written" in told
    run = seen.run
    assert run.scalar("loss")[1].tolist() == [1.0, 2.0, 2.0, 2.0, 3.0], "lines are"
    assert run.arrays["kernel"] == [0, 1, 5]
    assert [event["step"] for event in run.events if event["kind"] == "not_written"] == [2, None]


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    def full(*args: Any, **kwargs: Any) -> None:
        raise RunError("the run cannot be written: No space left on device")

    with watch(network(), probe=data(), out=tmp_path / "run", every=1, budget=None) as seen:
        seen.step(loss=1.0)
        with monkeypatch.context() as patch:
            patch.setattr(RunWriter, "array", full)
            patch.setattr(RunWriter, "scalars", full)
            seen.step(loss=2.0)
            seen.step(loss=3.0)
        seen.step(loss=4.0)
    (told,) = messages(recwarn)
    assert "No space left" in told
    run = seen.run
    assert run.scalar("loss")[0].tolist() == [1, 4]
    assert next(event["step"] for event in run.events if event["kind"] == "not_written") == 2


def test_a_folder_that_goes_away_does_not_stop_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
):
    with watch(network(), probe=data(), out=tmp_path / "run", every=1, budget=None) as seen:
        (tmp_path / "run").rename(tmp_path / "gone")
        seen.step(loss=1.0)
        seen.step(loss=1.0)
    (told,) = messages(recwarn)
    assert "cannot be written" in told
    assert "not written" in capfd.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path):
    watched(tmp_path / "run")
    with pytest.raises(RunError, match=r"already holds a run; pass resume=True .*overwrite=True .*out="):
        watched(tmp_path / "run")


def test_a_run_is_overwritten_when_asked_for(tmp_path: Path):
    watched(tmp_path / "run", steps=5)
    watched(tmp_path / "run", steps=3, overwrite=True, name="new")
    run = open_run(tmp_path / "run")
    assert run.name == "new"
    assert [line["step"] for line in run.lines] == run.arrays["kernel"] == [0, 1, 2, 3]
    unfinished = watch(network(), probe=data(), out=tmp_path / "run", overwrite=True).__enter__()
    assert [line["step"] for line in unfinished.run.lines] == [0]
    watched(tmp_path / "run", steps=1, overwrite=True)
    assert open_run(tmp_path / "run").config["finished"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_is_kept_where_the_new_one_cannot_begin(tmp_path: Path):
    watched(tmp_path / "run", steps=2)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    x, y = data()
    with pytest.raises(FeatlearnError):
        watch(nn.Linear(4, 3), probe=(x, y), out=tmp_path / "run", overwrite=True).__enter__()
    with pytest.raises(InputValueError, match="resume=True and overwrite=True, expected one"):
        watch(network(), probe=(x, y), out=tmp_path / "run", overwrite=True, resume=True)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


def test_only_a_run_is_overwritten(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunError, match="expected a run there"):
        watch(network(), probe=data(), out=tmp_path, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def broken_off(path: Path, **options: Any) -> Watch:
    """A run whose third step is followed by an exception."""
    seen = watch(network(), probe=data(), out=path, every=10, budget=None, **options)

    def run() -> None:
        with seen:
            for _ in range(3):
                seen.step(loss=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    return seen


def test_an_exception_goes_on_and_what_was_measured_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = broken_off(tmp_path / "run").run
    assert run.scalar("ntk/norm")[0].tolist() == [0, 3]
    assert [event["kind"] for event in run.events] == ["started", "interrupted", "finished"]
    assert run.config["finished"] is False
    (line,) = capfd.readouterr().err.splitlines()
    words = (
        r"featlearn: 2 measurements in 3 steps, [\d.]+ s of [\d.]+ s for measuring, first and last included: "
        r"training took [\d.e-]+ s, no budget: .*run"
    )
    assert re.fullmatch(words, line)


def test_an_impatient_interrupt_during_the_last_measurement_goes_on(tmp_path: Path):
    def slow(view: StepView) -> float:
        if view.step:
            raise KeyboardInterrupt
        return 0.0

    run = broken_off(tmp_path / "run", quantities=[slow]).run
    assert [event["kind"] for event in run.events] == ["started", "interrupted", "failed", "finished"]


def test_steps_outside_of_the_watch_are_refused(tmp_path: Path):
    seen = watch(network(), probe=data(), out=tmp_path / "run")
    with pytest.raises(InputValueError, match="not running"):
        seen.step()
    with seen:
        pass
    assert seen.run.scalar("ntk/norm")[0].tolist() == [0]
    with pytest.raises(InputValueError, match="used already"):
        seen.__enter__()
    with pytest.raises(InputValueError, match="not running"):
        seen.step()


def test_losses_that_are_no_numbers_are_refused(tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None) as seen:
        for loss, words in ((torch.ones(3), r"shape \(3,\)"), ("low", "'low'"), (torch.tensor(1j), "shape")):
            with pytest.raises(InputTypeError, match=words):
                seen.step(loss=loss)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (1.5, InputTypeError),
        (2.0, InputTypeError),
        ("2", InputTypeError),
        (-1, InputValueError),
        (True, InputValueError),
        (10**12, InputValueError),
    ],
)
def test_steps_that_are_no_steps_are_refused_before_anything_is_written(step: Any, error: Any, tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None) as seen:
        seen.step(loss=1.0, step=numpy.int64(4))
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        with pytest.raises(error, match="expected a whole number"):
            seen.step(loss=100.0, step=step, mine=3.0)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
        assert seen.steps == 4
        seen.step(loss=2.0, step=2)  # back to a checkpoint
    assert seen.run.scalar("loss")[0].tolist() == [2, 4]
    assert seen.run.scalar("loss")[1].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, InputValueError, "every=0"),
        ({"every": "often"}, InputTypeError, "every='often'"),
        ({"budget": 0}, InputValueError, "budget=0"),
        ({"budget": "5%"}, InputTypeError, "budget='5%'"),
        ({"probe": data()[0]}, InputTypeError, "expected a pair"),
        ({"probe": (data()[0], data()[1][:3])}, InputValueError, r"y of probe is of shape \(3,\)"),
        ({"test": (data()[0], [1, 2])}, InputValueError, "y of test is a list"),
        ({"quantities": ["kernle"]}, InputValueError, "did you mean 'kernel'"),
        ({"quantities": "kernel"}, InputTypeError, "expected a list"),
        ({"quantities": ["optimizer"]}, InputValueError, "no optimizer= was given"),
        ({"quantities": {"test": True}}, InputValueError, "no test= was given"),
        ({"quantities": {"mine": 3}}, InputValueError, "a function of a StepView"),
        ({"loss": "msee"}, InputValueError, "loss='msee'"),
        ({"optimizer": 0.1}, InputTypeError, "optimizer is float"),
        ({"optimizer": torch.optim.SGD(network().parameters(), 0.1)}, InputValueError, "no parameter of the model"),
        ({"probe": (data()[0].log(), data()[1])}, InputValueError, r"the x of probe, of shape \(9, 5\), has \d+ entr"),
        ({"probe": (data()[0], data()[0] / 0)}, InputValueError, "the y of probe, .* has 45 entries that are nan"),
        ({"test": (data()[0] * math.inf, None)}, InputValueError, "the x of test, .* has 45 entries"),
        ({"settings": ["lr"]}, InputTypeError, "settings is list, expected a mapping"),
        ({"settings": {"lr": torch.tensor(0.1)}}, InputTypeError, "settings cannot be written as JSON.*item"),
        ({"settings": {("a", 1): 2}}, InputTypeError, "settings cannot be written as JSON"),
        ({"settings": {"a": math.nan}}, InputValueError, "settings cannot be written as JSON.*finite"),
        ({"settings": {"a": [{"b": -math.inf}]}}, InputValueError, "settings cannot be written as JSON"),
        ({"sinks": ["tensorbord"]}, InputTypeError, "sinks has 'tensorbord'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(options: Any, error: Any, words: str, tmp_path: Path):
    with pytest.raises(error, match=words):
        watch(network(), **{"probe": data(), "out": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_labels_that_do_not_fit_are_refused_on_entering(tmp_path: Path):
    x, y = data()
    with (
        pytest.raises(InputValueError, match="labels run from 0 to 5"),
        watch(network(), probe=(x, y + 3 * (y == 2)), out=tmp_path / "run"),
    ):
        pytest.fail("entered")


def test_class_labels_that_are_floats_are_told_apart_from_numbers(tmp_path: Path):
    x, y = data()
    with (
        pytest.raises(InputValueError, match=r"float32 numbers, whole: for labels pass y\.long\(\)"),
        watch(network(), probe=(x, y.float()), out=tmp_path / "run"),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(InputValueError, match=r"float64 numbers, whole: for labels pass y\[:, 0\]\.long\(\)"),
        watch(network(), probe=(x, y.double()[:, None]), out=tmp_path / "run"),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(InputValueError, match=r"or class labels$"),
        watch(network(), probe=(x, x[:, 0]), out=tmp_path / "run"),
    ):
        pytest.fail("entered")


def test_a_mask_of_zeros_and_minus_infinity_may_be_an_input(tmp_path: Path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(5, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.map(x * torch.softmax(mask, 1))

    x = torch.randn(6, 5)
    mask = torch.zeros(6, 5).masked_fill(torch.arange(5) > 2, -math.inf)
    with watch(Masked(), probe=((x, mask), None), out=tmp_path / "run", budget=None) as seen:
        seen.step()
    assert math.isfinite(seen.run.scalar("ntk/norm")[1][-1])


def test_settings_are_there_from_the_start(tmp_path: Path):
    settings = {"width": 8, "rates": (0.1, 0.2), "note": None, "nested": {"seed": 3}}
    with watch(network(), probe=data(), out=tmp_path / "run", settings=settings) as seen:
        settings["width"] = 9  # what is recorded is a copy
        assert seen.run.config["settings"] == {"width": 8, "rates": [0.1, 0.2], "note": None, "nested": {"seed": 3}}
    assert seen.run.config["settings"]["width"] == 8
    assert watched(tmp_path / "none").run.config["settings"] is None


def test_numbers_of_the_user_are_told_from_those_of_the_run_and_keep_their_names(tmp_path: Path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    free = {"accuracy": 0.5, "test/top5": 0.25, "weights/decay": 0.1, "ntk/mine": 3.0}
    also_measured = {"ntk/norm": -1.0, "gap/probe": -2.0, "probe/loss": -3.0, "lr": -4.0, "seconds": -5.0}
    quantities = {"mine": lambda view: {"ntk/trace": -6.0, "own": 7.0}}
    options = {"probe": data(), "every": 1, "budget": None, "optimizer": optimizer, "quantities": quantities}
    with watch(model, out=tmp_path / "run", **options) as seen:
        seen.step(loss=1.0, **free)
        seen.log(loss=2.0, **also_measured)
        train(model, seen, optimizer, 1)
    run = seen.run
    moved = {f"user/{name}": value for name, value in also_measured.items()}
    assert run.user_names == {*free, *moved, "user/ntk/trace", "own"}
    assert {name: run.scalar(name)[1].tolist() for name in moved} == {name: [value] for name, value in moved.items()}
    assert {name: run.scalar(name)[1].tolist() for name in free} == {name: [value] for name, value in free.items()}
    assert set(run.scalar("own")[1]) == {7.0}
    for name in ("ntk/norm", "ntk/trace", "probe/loss", "lr"):
        assert min(run.scalar(name)[1]) > 0, name
    assert "user/seconds" in run.to_csv(tmp_path / "table.csv").read_text().splitlines()[0].split(",")


def test_a_number_of_a_step_may_not_have_the_name_of_a_quantity_of_the_user(tmp_path: Path):
    own = {"mine": lambda view: 3.0, "several": lambda view: {"a": 1.0, "b c": 2.0}}
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None, quantities=own) as seen:
        for name in ("mine", "a", "b c"):
            for act in (seen.step, seen.log):
                with pytest.raises(InputValueError, match="one of your quantities records a number of that name"):
                    act(**{name: 7.0})
        seen.step(several=5.0)  # no number has that name
    values = {name: set(seen.run.scalar(name)[1]) for name in ("mine", "a", "b_c", "several")}
    assert values == {"mine": {3.0}, "a": {1.0}, "b_c": {2.0}, "several": {5.0}}


def test_a_measurement_without_numbers_is_a_run_that_can_be_read(tmp_path: Path):
    switched_off = dict.fromkeys(("gap", "richness", "kernel", "features", "layers", "weights", "convergence"), False)
    silent = {"mine": lambda view: {}, **switched_off}
    with watch(network(), probe=(data()[0], None), out=tmp_path / "run", budget=None, quantities=silent) as seen:
        for step in range(1, 5):
            seen.step(**({"loss": 1.0} if step == 2 else {}))
    assert [line["step"] for line in seen.run.lines] == [2]
    assert seen.run.arrays["outputs"] == [0, 1, 2, 3, 4]
    assert seen.run.config["finished"]
    assert seen.run.config["measurements"] == 1  # as a resume counts them


def test_lines_that_a_finished_run_has_lost_are_noticed(tmp_path: Path):
    """More lines than measurements: the count alone would not tell."""
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None, every=50) as seen:
        for step in range(1, 20):
            seen.step(**({"mine": 1.0} if step % 2 else {}))
    path = tmp_path / "run" / "scalars.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > seen.measurements + 5
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:-1] * (kept % 2))
        with pytest.raises(RunError, match="the run is finished, but it"):
            _ = open_run(tmp_path / "run").lines
    path.unlink()
    with pytest.raises(RunError, match="the run is finished, but it has lines of 0 steps"):
        _ = open_run(tmp_path / "run").names
    path.write_bytes(b"".join(lines))
    assert len(seen.run.lines) > 0


def test_what_goes_wrong_again_later_is_an_event_again(tmp_path: Path):
    """Events say from when on a run was lost; one that recovered was not."""

    def moody(view: StepView) -> float:
        if view.step in (2, 3, 6, 7, 8):
            raise ZeroDivisionError
        return 1.0

    with pytest.warns(UserWarning, match="moody could not be measured"):
        run = watched(tmp_path / "run", steps=9, quantities=["kernel", moody]).run
    assert [(e["kind"], e["step"]) for e in run.events if e.get("what") == "moody"] == [
        ("failed", 2),
        ("failed", 6),
        ("repeated", 9),
    ]
    assert [e["count"] for e in run.events if e["kind"] == "repeated"] == [3]


def test_an_error_of_a_user_is_no_divergence_whatever_its_text_says(tmp_path: Path):
    def careless(view: StepView) -> float:
        if view.step > 2:
            raise ValueError("the buffer would overflow, and its size is not finite")
        return 1.0

    with pytest.warns(UserWarning, match="careless could not be measured"):
        run = watched(tmp_path / "run", steps=5, quantities=["weights", careless]).run
    events = [(event["kind"], event["step"]) for event in run.events if event.get("what") == "careless"]
    assert events[0] == ("failed", 3)
    assert not [event for event in run.events if event["kind"] == "diverged"]


class Spectral(nn.Module):
    """A layer with complex weights for the frequencies of its input, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.last = nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=5).tanh())


def test_complex_weights_move_by_their_imaginary_parts_too(tmp_path: Path):
    torch.manual_seed(0)
    model = Spectral()
    start = model.weight.detach().clone()
    with watch(
        model, probe=data(outputs=2), out=tmp_path / "run", every=1, budget=None, quantities=["weights"]
    ) as seen:
        with torch.no_grad():
            model.weight += torch.tensor([0.3j, -0.2j, 0.5j])
        seen.step()
    numbers = {name: seen.run.scalar(name)[1].tolist() for name in ("weights/root/norm", "weights/root/distance")}
    square = float(start.real.square().sum() + start.imag.square().sum())
    assert numbers["weights/root/distance"] == pytest.approx([0.0, math.sqrt((0.09 + 0.04 + 0.25) / square)])
    assert numbers["weights/root/norm"][0] == pytest.approx(math.sqrt(square))
    assert numbers["weights/root/norm"][1] == pytest.approx(float(torch.linalg.vector_norm(model.weight.detach())))


def test_importing_the_package_leaves_the_function_in_its_place(tmp_path: Path):
    """No package is named like the function, or Python would put it in the place of `fl.watch`."""
    import featlearn as fl

    with fl.watch(network(), probe=data(), out=tmp_path / "run", budget=None) as seen:
        seen.step()
    assert fl.watch is watch
    assert seen.path == tmp_path / "run"


def test_the_run_is_plain_json(tmp_path: Path):
    watched(tmp_path / "run")
    for line in (tmp_path / "run" / "scalars.jsonl").read_text().splitlines():
        assert json.loads(line)["values"]


@pytest.mark.parametrize("loss", [None, "cross-entropy", "mean"])
def test_features_at_convergence_are_recorded_where_weights_decay(tmp_path: Path, loss: str | None):
    """Against the gradient of the loss that was told, by autograd; labels alone mean cross-entropy."""
    model, (x, labels) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01)
    with watch(model, probe=(x, labels), out=tmp_path / "run", optimizer=optimizer, loss=loss, budget=None) as seen:
        seen.step()
    hot = torch.nn.functional.one_hot(labels, 3) - 1 / 3
    f = model(x)
    value = (f - hot).square().sum() if loss == "mean" else nn.functional.cross_entropy(f, labels, reduction="sum")
    value.backward()
    for name in ("0", "2", "4"):
        weight = model[int(name)].weight
        W, G = weight.detach().flatten(1).double(), weight.grad.flatten(1).double()
        A, B = W.T @ W, -W.T @ G
        expected = float((A * B).sum() / (A.norm() * B.norm()))
        assert seen.run.scalar(f"convergence/{name}")[1][-1] == pytest.approx(expected, rel=1e-6)


def test_without_decay_nothing_is_said_of_convergence(tmp_path: Path):
    with watch(network(), probe=data(), out=tmp_path / "run", budget=None) as seen:
        seen.step()
    assert not [name for name in seen.run.names if name.startswith("convergence")]


class Factorization(nn.Module):
    """A matrix as a product of two tables: what enters the layer that is called last are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(5, 4), nn.Embedding(7, 4)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return (self.rows(i) * self.columns(j)).sum(1, keepdim=True)


def test_a_model_whose_last_layer_is_an_embedding_is_watched(tmp_path: Path):
    torch.manual_seed(0)
    model, start = Factorization(), Factorization()
    start.load_state_dict(model.state_dict())
    i, j = torch.arange(11) % 5, torch.arange(11) % 7
    y = torch.randn(11, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fl.watch(model, ((i, j), y), out=tmp_path / "run") as seen:
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(i, j) - y).square().mean()
            loss.backward()
            optimizer.step()
            seen.step(loss=loss)
    assert "richness/low_rank" not in seen.run.names
    assert {event["what"] for event in seen.run.events if event["kind"] == "failed"} == {"features"}
    # f = u v: what the linearization misses is (u - u0)(v - v0)
    u, v, u0, v0 = (one(at).detach() for net in (model, start) for one, at in ((net.rows, i), (net.columns, j)))
    missed, change = ((u - u0) * (v - v0)).sum(1), (u * v - u0 * v0).sum(1)
    expected = float((missed - missed.mean()).norm() / (change - change.mean()).norm())
    assert seen.run.scalar("gap/probe")[1][-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("samples", [1, 2])
def test_too_few_samples_for_an_error_give_no_gap(samples: int, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    x, y = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fl.watch(model, (x[:samples], y[:samples]), out=tmp_path / "a", test=(x, y)) as seen:
        train(model, seen, optimizer, 4)
    assert not any(name.startswith("gap/") for name in seen.run.names)
    assert not messages(recwarn)
    found = fl.diagnose(seen.run)
    assert found.regime == "cannot tell"
    assert "fewer than 3 samples" in found.headline
    with fl.watch(model, (x, y), out=tmp_path / "b", test=(x[:samples], y[:samples])) as seen:
        train(model, seen, optimizer, 4)
    assert {"gap/probe", "gap/probe_error"} <= {*seen.run.names}
    assert "gap/test" not in seen.run.names


def test_a_run_says_through_what_the_gap_was_measured(tmp_path: Path):
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3), nn.LogSoftmax(1)).double()
    x, _ = data()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    with watch(model, (x, None), out=tmp_path / "run", every=1, budget=None, quantities=["gap"]) as seen:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.2 * torch.randn_like(p)
        seen.step()
    values = {name: float(seen.run.scalar(name)[1][-1]) for name in seen.run.names}
    gap = fl.linearization_gap(model, x, initial)
    assert (gap.link, len(gap.merged)) == (("LogSoftmax",), 1)
    assert (values["gap/link_ops"], values["gap/merged_weights"]) == (1.0, 1.0)
    assert values["gap/link"] == pytest.approx(float(gap), rel=1e-10)
    assert values["gap/probe"] == pytest.approx(gap.plain, rel=1e-10)
    assert values["gap/link_error"] == pytest.approx(gap.estimate.stderr, rel=1e-8)


def test_averages_that_settle_are_told_apart_from_learning(tmp_path: Path):
    """A head is trained behind batch normalization: the features move by its averages alone."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh()).double()
    model = nn.Sequential(body, nn.Linear(7, 3).double())
    body.requires_grad_(False)
    x = 3 * torch.randn(11, 6, dtype=torch.float64) + 1
    first = body.eval()(x)
    with watch(model, (x, None), out=tmp_path / "run", every=1, budget=None, quantities=["gap"]) as seen:
        body.train()(x)
        with torch.no_grad():
            model[1].weight += 0.1
        seen.step()
    last = body.eval()(x)
    values = {name: float(seen.run.scalar(name)[1][-1]) for name in seen.run.names}
    relative = float((last - last.mean(0) - (first - first.mean(0))).norm() / (first - first.mean(0)).norm())
    assert values["statistics/moved"] == pytest.approx(relative, rel=1e-10)
    assert values["features/moved"] == pytest.approx(relative, rel=1e-10)
    assert values["features/moved_by_weights"] == 0.0
    assert values["gap/probe"] < 1e-10


def test_parameters_that_join_training_are_compared_with_their_own_start(tmp_path: Path):
    """A head is trained for five steps, then the whole network, each at its own rate."""
    model, start, (x, labels) = network(), network(), data()
    body, head = list(model[:4].parameters()), list(model[4].parameters())
    for parameter in body:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(head, 0.5)
    with watch(model, probe=(x, labels), out=tmp_path / "run", every=1, budget=None, optimizer=optimizer) as seen:
        train(model, seen, optimizer, 5)
        frozen = fl.ntk(model, x)
        for parameter in body:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": body, "lr": 0.25})
        train(model, seen, optimizer, 3)
    run = seen.run
    (event,) = [event for event in run.events if event["kind"] == "trained_set_changed"]
    assert event["step"] == 6
    assert event["added"] == [f"{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")]
    assert event["removed"] == []
    assert not [event for event in run.events if event["kind"] == "failed"]
    lines = {line["step"]: line["values"] for line in run.lines}
    assert lines[5]["ntk/norm"] == pytest.approx(float(frozen.norm()))
    assert "ntk/velocity" not in lines[6], "the kernel before is of other parameters"
    kernel, first = fl.ntk(model, x), fl.ntk(start, x)
    assert lines[8]["ntk/distance"] == pytest.approx(float(fl.metrics.kernel_distance(kernel, first)))
    cosine = float((kernel * first).sum() / (kernel.norm() * first.norm()))
    assert lines[8]["ntk/distance"] == pytest.approx(1 - cosine)
    now, then = (fl.quantities.layer_balance(net, x, rates={"4": 0.5, "*": 0.25}) for net in (model, start))
    drift = float((now["0", "2"].value - then["0", "2"].value).norm())
    size = float(start[0].weight.detach().square().sum()) / 0.25
    assert lines[8]["layers/0--2/balance_drift"] == pytest.approx(drift / size)
    assert lines[8]["gap/probe"] == pytest.approx(fl.linearization_gap(model, x, start.state_dict()))
    expected = fl.neural_features(model, x, initial=start.state_dict())
    assert lines[8]["features/0/centered"] == pytest.approx(expected["0"].centered)
