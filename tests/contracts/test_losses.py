"""One table of losses: every function that takes a loss accepts every word, and means the module of that word."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.cli import settings
from tests.contracts.public_names import public

P, D, C = 7, 4, 3
mse, mse_sum = nn.MSELoss(), nn.MSELoss(reduction="sum")
MODULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mse,
    "mean-over-outputs": mse,
    "mean": lambda f, y: mse_sum(f, y) / len(y),
    "mean-half": lambda f, y: mse_sum(f, y) / (2 * len(y)),
    "sum-half": lambda f, y: mse_sum(f, y) / 2,
    "cross-entropy": nn.CrossEntropyLoss(),
    "bce": nn.BCEWithLogitsLoss(),
}
"""The value of every word, written with torch's own modules."""

words = pytest.mark.parametrize("word", MODULES)


def inputs() -> Tensor:
    return torch.randn(P, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def targets(word: str) -> Tensor:
    if word in ("cross-entropy", "bce"):
        return torch.eye(C, dtype=torch.float64)[torch.arange(P) % C]
    return torch.randn(P, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network(width: int = 6) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, C)).double()


def outputs() -> Tensor:
    values: Tensor = network()(inputs()).detach()
    return values


def own(word: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The module's own value as a function that has no name."""
    return lambda f, y: MODULES[word](f, y)


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


def check_function(word: str, folder: Path) -> None:
    f, y = outputs(), targets(word)
    close(fl.losses.function(word)(f, y), MODULES[word](f, y))
    module = MODULES[word]
    assert fl.losses.function(module) is module


def check_gradient(word: str, folder: Path) -> None:
    f, y = outputs().requires_grad_(True), targets(word)
    value = MODULES[word](f, y)
    (slope,) = torch.autograd.grad(value, f)
    for loss in (word, own(word)):
        found = fl.losses.gradient(loss, f, y)
        close(found[0], value.detach())
        close(found[1], slope)


def check_name(word: str, folder: Path) -> None:
    named = {"mean-over-outputs": "mse"}.get(word, word)
    assert fl.losses.name(word) == word
    assert fl.losses.name(fl.losses.function(word)) == named
    if isinstance(MODULES[word], nn.Module):
        assert fl.losses.name(MODULES[word]) == named
    assert fl.losses.name(own(word)) is None


def check_rate(word: str, folder: Path) -> None:
    """One small step of gradient descent moves the outputs by -rate K (prediction - y)."""
    f, y = outputs(), targets(word)
    prediction = {"cross-entropy": f.softmax(1), "bce": f.sigmoid()}.get(word, f)
    _, slope = fl.losses.gradient(own(word), f, y)
    close(fl.dynamics.rate(0.3, word, P, C) * (prediction - y), 0.3 * slope)
    with pytest.raises(fl.FeatlearnError, match="has no rate"):
        fl.dynamics.rate(0.3, own(word), P, C)


def check_kernel_descent(word: str, folder: Path) -> None:
    """The words follow the gradient of the module, at the rate of `fl.dynamics.rate`."""
    f, y = outputs(), targets(word)
    for outputs_mode in ("mean", "each", "full"):
        kernel = fl.ntk(network(), inputs(), outputs=outputs_mode)
        for discrete in (False, True):
            times = [1.0, 3.0]
            path = fl.dynamics.kernel_descent(
                kernel, y, times=times, rate=fl.dynamics.rate(0.1, word, P, C), f0=f, discrete=discrete, loss=word
            )
            expected = fl.dynamics.kernel_descent(
                kernel, y, times=times, rate=0.1, f0=f, discrete=discrete, loss=own(word)
            )
            close(path.outputs, expected.outputs, 1e-8)
            close(expected.loss, torch.stack([MODULES[word](row, y) for row in expected.outputs]))


def check_safe_lr(word: str, folder: Path) -> None:
    """The squared errors have the module's curvature; the others the largest that it can have."""
    x, y = inputs(), targets(word)
    rate = fl.steer.safe_lr(network(), x, loss=word)
    largest = torch.autograd.functional.hessian(
        lambda f: own(word)(f.reshape(P, C), y), torch.zeros(P * C, dtype=torch.float64)
    )
    curvature = float(torch.linalg.eigvalsh(largest)[-1])
    flat = fl.ntk(network(), x, outputs="full").transpose(1, 2).reshape(P * C, P * C)
    limit = 2 / (curvature * float(torch.linalg.eigvalsh(flat)[-1]))
    # cross-entropy: 1/P bounds the curvature, which is 1/(3P) for three equal logits
    close(rate, limit / 4 / (3 if word == "cross-entropy" else 1), 1e-6)


def check_ntk_velocity(word: str, folder: Path) -> None:
    """Against a difference of kernels along the module's own gradient step."""
    x, y, step = inputs(), targets(word), 1e-5

    def moved(sign: float) -> Tensor:
        model = network()
        weights = list(model.parameters())
        slopes = torch.autograd.grad(MODULES[word](model(x), y), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight.sub_(sign * step * slope)
        return fl.ntk(model, x)

    close(fl.quantities.ntk_velocity(network(), x, y, loss=word), (moved(1) - moved(-1)) / (2 * step), 1e-6)


def check_feature_speed(word: str, folder: Path) -> None:
    """All scales of one loss give the same ratio, and the ratio is twice the speed relative to the loss."""
    x, y, step = inputs(), targets(word), 1e-5
    model = network()
    weights = list(model.parameters())
    loss = MODULES[word](model(x), y)
    slopes = torch.autograd.grad(loss, weights)

    def jacobian(sign: float) -> Tensor:
        model = network()
        with torch.no_grad():
            for weight, slope in zip(model.parameters(), slopes, strict=True):
                weight.sub_(sign * step * slope)
        rows = model(x).flatten()
        return torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(r, model.parameters(), retain_graph=True)])
                for r in rows
            ]
        )

    speed = ((jacobian(1) - jacobian(-1)) / (2 * step)).norm() / jacobian(0).norm()
    fall = sum(float(slope.square().sum()) for slope in slopes) / float(loss.detach())
    close(fl.quantities.feature_speed(network(), x, y, loss=word), float(speed) / (fall / 2), 1e-5)


def check_readout(word: str, folder: Path) -> None:
    y, f = targets(word), outputs()
    values = fl.readouts.loss(word, "target")(f, {"target": y})
    close(values, torch.stack([MODULES[word](f[i : i + 1], y[i : i + 1]) for i in range(P)]))


def check_watch(word: str, folder: Path) -> None:
    """The run keeps the word, and no word for a loss of one's own."""
    for name, loss in (("word", word), ("own", own(word))):
        with fl.watch(network(), (inputs(), targets(word)), out=folder / name, loss=loss) as watch:
            watch.step()
        assert watch.run.config["loss_convention"] == (word if name == "word" else None)


def check_watch_checkpoints(word: str, folder: Path) -> None:
    states = [(0, network().state_dict()), (1, network().state_dict())]
    run = fl.watch_checkpoints(
        network(), states, probe=(inputs(), targets(word)), out=folder, loss=word, quantities=["richness"]
    )
    assert run.config["loss_convention"] == word


def check_scale_check(word: str, folder: Path, check: Callable[..., Any] = fl.scale_check) -> None:
    size = {fl.scale_check: "sizes", fl.width_check: "widths"}[check]

    def sizes(loss: Any) -> dict[str, Any]:
        result = check(
            network,
            (inputs(), targets(word)),
            **{size: (4, 8)},
            steps=2,
            seeds=1,
            loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        )
        return dict(result.network_sizes)

    expected = sizes(own(word))
    for name, values in sizes(word).items():
        close(values, expected[name])


def check_width_check(word: str, folder: Path) -> None:
    check_scale_check(word, folder, fl.width_check)


def check_attribute(word: str, folder: Path) -> None:
    """A loss needs a name; the module of torch has one."""
    module = MODULES[word] if isinstance(MODULES[word], nn.Module) else word
    result, expected = (
        fl.attribute(network(), (inputs(), targets(word)), inputs()[:3] + 0.1, loss=loss, measure=1)
        for loss in (word, module)
    )
    close(result.scores, expected.scores)


def check_interference(word: str, folder: Path) -> None:
    model, x, y = network(), inputs(), targets(word)
    tasks = [{name: value + 0.1 * i for name, value in model.state_dict().items()} for i in (1, 2)]
    result, expected = (
        fl.interference(model, (tasks[0], x, y), (tasks[1], x + 1, y), loss=loss) for loss in (word, own(word))
    )
    close([result.a.loss, result.a.merged], [expected.a.loss, expected.a.merged])


def check_compare(word: str, folder: Path) -> None:
    before, after, x, y = network(), network(), inputs(), targets(word)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(1.5)
    found = fl.compare(before, after, x, y, loss=word)
    for value, model in zip(found.loss, (before, after), strict=True):
        close(value, float(MODULES[word](model(x), y)))


def check_posterior(word: str, folder: Path) -> None:
    """The curvature is that of the module's sum over samples; noise 1 gives half of the squared error."""
    model, x, y = network(), inputs(), targets(word)
    named = {"cross-entropy": nn.CrossEntropyLoss(reduction="sum"), "bce": nn.BCEWithLogitsLoss(reduction="sum")}
    total = named.get(word, MODULES["sum-half"])
    hessian = torch.autograd.functional.hessian(lambda f: total(f.reshape(P, C), y), outputs().flatten())
    kernel = fl.ntk(model, x, outputs="full").transpose(1, 2).reshape(P * C, P * C) / 2.0
    expected = kernel - kernel @ hessian @ torch.linalg.inv(torch.eye(P * C).double() + kernel @ hessian) @ kernel
    found = fl.posterior(model, x, y, loss=word, prior=2.0).predict(x, joint=True)
    close(found.covariance.reshape(P * C, P * C), expected)


def check_gradient_noise(word: str, folder: Path) -> None:
    x, y = inputs(), targets(word)
    result, expected = (fl.gradient_noise(network(), x, y, loss=loss) for loss in (word, own(word)))
    close(result.norms, expected.norms)
    close(result.signal_to_noise.value, expected.signal_to_noise.value)


CASES: dict[str, Callable[[str, Path], None]] = {
    "attribute": check_attribute,
    "compare": check_compare,
    "dynamics.kernel_descent": check_kernel_descent,
    "dynamics.rate": check_rate,
    "gradient_noise": check_gradient_noise,
    "interference": check_interference,
    "losses.function": check_function,
    "losses.gradient": check_gradient,
    "losses.name": check_name,
    "posterior": check_posterior,
    "quantities.feature_speed": check_feature_speed,
    "quantities.ntk_velocity": check_ntk_velocity,
    "readouts.loss": check_readout,
    "scale_check": check_scale_check,
    "steer.safe_lr": check_safe_lr,
    "watch": check_watch,
    "watch_checkpoints": check_watch_checkpoints,
    "width_check": check_width_check,
}
TAKE_A_CURVE = {"metrics.log_slope"}
"""Functions whose `loss` is a recorded curve."""


def test_every_function_that_takes_a_loss_has_a_case():
    functions = {
        name
        for name, thing in public().items()
        if inspect.isfunction(thing) and "loss" in inspect.signature(thing).parameters
    }
    assert functions - TAKE_A_CURVE == CASES.keys()


@words
@pytest.mark.parametrize("name", CASES)
def test_a_word_means_the_value_of_its_module(name: str, word: str, tmp_path: Path):
    CASES[name](word, tmp_path / "run")


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_word_is_corrected(name: str, tmp_path: Path):
    x, y = inputs(), targets("mse")
    arguments: dict[str, Any] = {
        "model": network(),
        "x": x,
        "y": y,
        "K": x @ x.T,
        "times": [1.0],
        "lr": 0.1,
        "key": "target",
        "probe": (x, y),
        "data": (x, y),
        "make_model": network,
        "make": network,
        "sizes": (4, 8),
        "source": network(),
        "train": (x, y),
        "test": x,
        "task_a": (network(), x, y),
        "task_b": (network(), x, y),
        "widths": (4, 8),
        "before": network(),
        "after": network(),
        "checkpoints": [(0, network().state_dict())],
        "out": tmp_path / "run",
    }
    function = public()[name]
    given = {key: arguments[key] for key in inspect.signature(function).parameters if key in arguments}
    if name == "losses.gradient":
        given["outputs"] = outputs()
    with pytest.raises(fl.FeatlearnError, match=r"loss='cros-entropy', expected 'mse'.*did you mean 'cross-entropy'"):
        function(**given, loss="cros-entropy")
    with pytest.raises(fl.FeatlearnError, match="loss is int, expected one of 'mse'"):
        function(**given, loss=3)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ce", "cross-entropy"),
        ("CE", "cross-entropy"),
        ("xent", "cross-entropy"),
        ("nll", "cross-entropy"),
        ("L2", "mse"),
        ("squared", "mse"),
        ("bec", "bce"),
    ],
)
def test_other_names_of_a_loss_are_refused_with_ours(word: str, name: str):
    with pytest.raises(fl.FeatlearnError, match=f"loss='{word}'.*did you mean '{name}'"):
        fl.losses.function(word)  # type: ignore[arg-type]


def test_options_of_a_module_make_it_a_function_of_its_own():
    assert fl.losses.name(nn.CrossEntropyLoss(label_smoothing=0.1)) is None
    assert fl.losses.name(nn.CrossEntropyLoss(weight=torch.ones(C))) is None
    assert fl.losses.name(nn.BCEWithLogitsLoss(pos_weight=torch.ones(C))) is None
    assert fl.losses.name(mse_sum) is None
    assert fl.losses.name(nn.functional.cross_entropy) == "cross-entropy"


def test_classes_are_targets_of_cross_entropy_and_of_no_other():
    f, labels = outputs(), torch.arange(P) % C
    close(fl.losses.function("cross-entropy")(f, labels), nn.CrossEntropyLoss()(f, labels))
    tokens, classes = f.reshape(P, 1, C).expand(P, 2, C), labels[:, None].expand(P, 2)
    close(fl.losses.function("cross-entropy")(tokens, classes), nn.CrossEntropyLoss()(tokens.mT, classes))
    for word in MODULES.keys() - {"cross-entropy"}:
        with pytest.raises(fl.FeatlearnError, match=r"y has shape \(7,\), expected \(7, 3\).*one-hot"):
            fl.losses.function(word)(f, labels)


def test_outputs_in_one_column_do_not_broadcast():
    f, y = outputs()[:, :1], targets("mse")[:, 0]
    close(fl.losses.function("mse")(f, y), mse(f[:, 0], y))
    with pytest.raises(fl.FeatlearnError, match=r"y has shape \(7, 1\), expected \(7,\)"):
        fl.losses.function("mse")(f[:, 0], y[:, None])


def test_the_command_line_knows_the_same_words():
    assert get_args(settings.LossName) == get_args(fl.losses.LossName)
