"""Theories that read a network predict its own training by gradient descent, run here step by step."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import theory
from featlearn.models import MLP

THEORIES = {"deep_linear": theory.deep_linear, "latent": theory.latent, "relu": theory.relu, "early": theory.early}


def linear(*widths: int, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    for layer in layers:
        layer.weight.data *= scale
    return nn.Sequential(*layers).double()


def relu_network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(inputs, width, bias=False), nn.ReLU(), nn.Linear(width, outputs, bias=False)
    ).double()


def data(samples: int, inputs: int, outputs: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (samples,) if outputs is None else (samples, outputs)
    return (
        torch.randn(samples, inputs, generator=generator, dtype=torch.float64),
        torch.randn(*shape, generator=generator, dtype=torch.float64),
    )


def trained(model: nn.Module, x: Tensor, y: Tensor, rate: float, loss: str, steps: int) -> tuple[Tensor, Tensor]:
    """Outputs and kernel after plain gradient descent on a copy."""
    network = copy.deepcopy(model)
    optimizer = torch.optim.SGD(network.parameters(), rate)
    for _ in range(steps):
        residual = (network(x).reshape(y.shape) - y).square()
        value = {"sum-half": residual.sum() / 2, "mean": residual.sum() / len(x), "mse": residual.mean()}[loss]
        optimizer.zero_grad(), value.backward(), optimizer.step()
    return network(x).reshape(y.shape).detach(), fl.ntk(network, x)


CASES = {
    "three linear layers": ("deep_linear", lambda: linear(5, 7, 6, 3), (11, 5, 3)),
    "two linear layers, one output": ("deep_linear", lambda: linear(4, 9, 1), (8, 4, None)),
    "two layers on a line": ("latent", lambda: linear(4, 6, 1), (7, 4, None)),
    "ReLU, two outputs": ("relu", lambda: relu_network(5, 40, 2), (6, 5, 2)),
    "ReLU, one output": ("relu", lambda: relu_network(4, 30, 1), (6, 4, None)),
    "first steps of three tanh layers": (
        "early",
        lambda: nn.Sequential(linear(5, 8, 6)[0], nn.Tanh(), nn.Linear(8, 7).double(), nn.Tanh(), linear(7, 2)[0]),
        (6, 5, 2),
    ),
}


@pytest.mark.parametrize("loss", ["sum-half", "mean", "mse"])
@pytest.mark.parametrize("case", CASES)
def test_a_theory_predicts_the_training_of_the_network_it_reads(case: str, loss: str):
    name, make, (samples, inputs, outputs) = CASES[case]
    model = make()
    x, y = data(samples, inputs, outputs)
    if name == "latent":
        x = torch.outer(x[:, 0], torch.ones(inputs, dtype=torch.float64) / 2)
    steps = 20 if name == "early" else 2000
    rate = 1e-4 if name == "early" else 2e-4 if name == "relu" else 5e-4
    path = THEORIES[name].from_network(model, x, y, rate=rate, loss=loss, times=[0.0, steps / 2, steps])
    expected, kernel = trained(model, x, y, rate, loss, steps)
    start = model(x).reshape(y.shape).detach()
    moved = float((expected - start).norm())
    tolerance = 0.02 if name == "early" else 0.05 if name == "relu" else 2e-3  # Euler steps, turning gates
    assert float((path.outputs[-1] - expected).norm()) < tolerance * moved
    np.testing.assert_allclose(path.outputs[0], start, atol=1e-9)
    first = fl.ntk(model, x)
    np.testing.assert_allclose(path.kernel(0.0), first, atol=1e-9 * float(first.abs().max()))
    assert float((path.kernel(float(steps)) - kernel).norm() / (kernel - first).norm()) < 10 * tolerance
    assert path.loss[-1] == pytest.approx(float((path.outputs[-1] - y).square().sum()), rel=1e-12)
    assert float(path.kernel_norm[0]) == pytest.approx(float(first.norm()), rel=1e-9)
    assert float(path.alignment[0]) == pytest.approx(float(fl.metrics.alignment(first, y)), rel=1e-9)
    assert path.kernel(torch.tensor([0.0, 3.0])).shape == (2, samples, samples)


def test_factors_of_the_forward_pass_and_centered_outputs_are_read():
    model = MLP(6, 3, width=20, hidden_layers=2, activation="linear", parametrization="ntk").double()
    model = fl.steer.scale_output(model, 0.3)
    x, y = data(9, 6, 3)
    path = theory.deep_linear.from_network(model, x, y, rate=0.01, loss="mean", times=[0.0, 400.0])
    expected, _ = trained(model, x, y, 0.01, "mean", 400)
    assert path.holds
    assert float((path.outputs[-1] - expected).norm() / expected.norm()) < 5e-3
    np.testing.assert_allclose(path.outputs[0], torch.zeros(9, 3), atol=1e-9)
    np.testing.assert_allclose(path.kernel(0.0), fl.ntk(model, x), rtol=1e-7)


def test_the_closed_form_knows_its_assumptions():
    x = 3 * torch.linalg.qr(torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    y = x @ torch.ones(5, dtype=torch.float64)
    model = linear(5, 30, 1, scale=1e-3)
    path = theory.deep_linear.from_network(model, x, y, rate=1e-3, closed_form=True)
    names = {each["name"]: each for each in path.assumptions}
    assert names["inputs are whitened"]["holds"]
    assert names["inputs are whitened"]["value"] == pytest.approx(1)
    assert names["the closed form is near the flow"]["holds"]
    assert names["the closed form is near the flow"]["value"] < 0.02
    assert float(path.loss[-1]) < 0.01 * float(path.loss[0])
    with pytest.raises(fl.FeatlearnError, match="whitened"):
        theory.deep_linear.from_network(model, *data(8, 5, None), closed_form=True)


def test_numbers_of_assumptions_tell_why_a_theory_fails():
    x, y = data(20, 5, None)
    path = theory.relu.from_network(relu_network(5, 8, 1), x, 30 * y, rate=1e-3)
    (gates,) = [each for each in path.assumptions if each["name"] == "gates stay as they are"]
    assert gates["value"] > 0.05
    assert not gates["holds"]
    assert not path.holds
    assert "gates stay as they are: no" in str(path)
    early = theory.early.from_network(relu_network(5, 8, 1), x, y, times=[0.0, 1e3])
    assert not early.holds
    horizon = early.readings["horizon"]
    assert theory.early.from_network(relu_network(5, 8, 1), x, y, times=[0.0, 0.9 * horizon]).holds


def test_the_first_correlations_are_those_of_one_step():
    """The change of the weights after one small step has the correlation that Eq. 6 predicts."""
    model, (x, y) = relu_network(5, 12, 2), data(9, 5, 2)
    path = theory.early.from_network(model, x, y)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    stepped = copy.deepcopy(model)
    (fl.losses.function("sum-half")(stepped(x), y)).backward()
    with torch.no_grad():
        for weight in stepped.parameters():
            weight -= 1e-7 * weight.grad
    measured = fl.neural_features(stepped, x, initial=initial, dtype=torch.float64)
    assert set(path.readings["correlations"]) == {"0", "2"}
    for name, value in path.readings["correlations"].items():
        assert value == pytest.approx(float(measured[name].centered), abs=2e-3)


def test_networks_that_no_theory_describes_are_refused_by_name():
    x, y = data(6, 5, None)
    with_bias = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    with pytest.raises(fl.FeatlearnError, match="bias=False"):
        theory.deep_linear.from_network(with_bias, x, y)
    with pytest.raises(fl.FeatlearnError, match="3 weight layers, expected 2"):
        theory.relu.from_network(linear(5, 4, 3, 1), x, y)
    with pytest.raises(fl.FeatlearnError, match="line"):
        theory.latent.from_network(linear(5, 4, 1), x, y)
    with pytest.raises(fl.FeatlearnError, match="expected a torch"):
        theory.latent.from_network(lambda x: x, x, y)
    with pytest.raises(fl.FeatlearnError, match="one-hot"):
        theory.deep_linear.from_network(linear(5, 4, 3), x, y)
    hidden = theory.deep_linear.from_network(relu_network(5, 9, 1), x, y, times=[0.0, 1.0])
    assert not hidden.assumptions[0]["holds"], "a ReLU network is no product of its weights"


def test_which_theories_hold():
    x, y = data(8, 5, None)
    model = linear(5, 12, 1)
    before = copy.deepcopy(model.state_dict())
    matches = {match.theory: match for match in theory.which(model, x, y)}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert matches["deep_linear"].holds
    assert matches["deep_linear"].error < 0.02
    assert not matches["latent"].holds
    assert "line" in matches["latent"].reason
    assert not matches["relu"].holds
    assert "linear layers with relu" in matches["relu"].reason
    text = str(theory.which(relu_network(5, 60, 1), x, y, steps=20))
    assert "relu: yes" in text
    assert "deep_linear: no" in text


def test_class_labels_are_refused():
    x, y = data(6, 5, None)
    with pytest.raises(fl.FeatlearnError, match="one-hot"):
        theory.which(linear(5, 4, 2), x, (y > 0).long())


def test_reading_leaves_buffers_and_generators_as_they_are():
    model = nn.Sequential(linear(5, 4)[0], nn.BatchNorm1d(4, affine=False), linear(4, 1)[0]).double().train()
    x, y = data(6, 5, None)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    state = torch.get_rng_state()
    path = theory.deep_linear.from_network(model, x, y, times=[0.0])
    assert not path.holds
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def run_of(folder, rate: float, scale: float, steps: int):
    torch.manual_seed(3)
    x, y = data(12, 6, None, seed=4)
    model = linear(6, 40, 1, scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with fl.watch(model, (x, y), out=folder, optimizer=optimizer, loss="mean", budget=None) as watch:
        for _ in range(steps):
            loss = (model(x)[:, 0] - y).square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watch.step(loss=loss)
    return watch.run, model, x, y


def test_optimal_feature_evolution_takes_a_run(tmp_path):
    run, model, x, y = run_of(tmp_path / "run", 0.02, 1.0, 300)
    path = theory.ofe.from_run(run)
    names = {each["name"]: each for each in path.assumptions}
    assert names["the rate fits"]["holds"], names
    assert path.readings["gamma"] >= 0
    measured = path.readings["measured"]
    assert measured["loss"][1][-1] == pytest.approx(float((model(x)[:, 0] - y).square().sum().detach()), rel=1e-4)
    np.testing.assert_allclose(path.outputs[0], run.array("outputs", 0)["f"].reshape(12, 1), atol=1e-6)
    np.testing.assert_allclose(path.kernel(0.0), run.array("kernel", 0)["mean"], rtol=1e-5, atol=1e-6)
    last = float(fl.metrics.alignment(torch.as_tensor(run.array("kernel", 300)["mean"]).double(), y))
    assert float(path.alignment[-1]) == pytest.approx(last, abs=0.1)
    axes = path.overlay(run)
    assert [ax.get_ylabel() for ax in axes] == [ax.get_ylabel() for ax in path.overlay(measured)]
    assert axes[0].lines[1].get_ydata()[-1] == pytest.approx(measured["loss"][1][-1]), "the sum, not the run's mean"
    wrong = theory.ofe.from_run(run, rate=0.2)
    assert not {each["name"]: each for each in wrong.assumptions}["the rate fits"]["holds"]


def test_runs_without_what_the_theory_needs_are_refused(tmp_path):
    x, y = data(6, 5, None)
    model = linear(5, 4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with fl.watch(model, (x, y), out=tmp_path / "adam", optimizer=optimizer, loss="mean", every=1) as watch:
        for _ in range(2):
            loss = (model(x)[:, 0] - y).square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watch.step(loss=loss)
    with pytest.raises(fl.FeatlearnError, match="trained by Adam"):
        theory.ofe.from_run(watch.run)
    assert theory.ofe.from_run(tmp_path / "adam", rate=1e-3).times.tolist() == [0.0, 1.0, 2.0]
