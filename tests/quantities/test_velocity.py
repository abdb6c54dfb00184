"""How fast a kernel moves, against differences of kernels along small steps, and scaling laws."""

import copy
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import featlearn as fl
from featlearn.errors import UnsupportedModelError
from featlearn.network.elementary_ops import ElementaryOps
from tests.references.jacobian import dense_jacobian


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Fused attention has no forward derivative: the other way must be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.table(ids))[:, None].chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, x, x, need_weights=False)[0].mean(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), drawn(5, 4)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)),
        drawn(5, 2, 4),
    ),
    "normalized": lambda: (
        nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
        drawn(5, 4),
    ),
    "grouped": lambda: (
        nn.Sequential(
            nn.Conv1d(2, 4, 2),
            nn.GroupNorm(2, 4),
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.RMSNorm(12),
            nn.Linear(12, 3),
        ),
        drawn(5, 2, 4),
    ),
    "attention": lambda: (Attention(), torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))),
    "multi-head": lambda: (Heads(), drawn(5, 4, 4)),
    "one output": lambda: (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)), drawn(5, 4)),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum-half": lambda f, y: 0.5 * (f - y).square().sum(),
    "mean-over-outputs": nn.MSELoss(),
    "cross-entropy": nn.CrossEntropyLoss(),
}


def built(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = MODELS[name]()
    model = model.double().eval()
    return model, x, drawn(5) if name == "one output" else nn.functional.one_hot(torch.arange(5) % 3, 3).double()


def difference(model: nn.Module, x: Tensor, y: Tensor, loss: str, outputs: str, step: float = 1e-5) -> Tensor:
    """(K(theta + h v) - K(theta - h v)) / 2h for v = -grad loss."""

    def moved(sign: float) -> Tensor:
        twin = copy.deepcopy(model)
        LOSSES[loss](twin(x), y).backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= sign * step * parameter.grad
        return fl.ntk(twin, x, outputs=outputs)

    return (moved(1.0) - moved(-1.0)) / (2 * step)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_the_velocity_is_the_limit_of_differences(name: str, loss: str):
    model, x, y = built(name)
    if loss == "cross-entropy" and name == "one output":
        pytest.skip("one output has no classes")
    for outputs in ("mean", "each", "full"):
        velocity = fl.quantities.ntk_velocity(model, x, y, loss=loss, outputs=outputs)
        expected = difference(model, x, y, loss, outputs)
        assert velocity.shape == expected.shape
        assert float((velocity - expected).abs().max()) < 1e-6 * float(expected.abs().max())


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Spike(torch.autograd.Function):
    """A step with the derivative of something smooth."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + x.square())


class Hidden(nn.Module):
    """Gradients that change with the weights in a way that autograd does not see, or that it sees."""

    def __init__(self, between: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6, bias), nn.Linear(6, 5), nn.Linear(5, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.between(self.first(x)))))


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda h: torch.tanh(h) * h.detach(),
    "no_grad": lambda h: torch.tanh(h) * h.data.sigmoid(),
    "straight through": lambda h: Rounded.apply(3 * h),
    "surrogate": lambda h: Spike.apply(h),
}
SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a shift that cancels": lambda h: (h - h.amax(1, keepdim=True).detach()).softmax(1),
    "kinks": torch.relu,
    "single precision inside": lambda h: torch.relu(h.float()).to(h.dtype),
}


def hidden(between: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Hidden(between)
    nn.init.zeros_(model.first.bias)
    x, y = drawn(5, 4), drawn(5, 3)
    x[0] = 0.0  # at a kink
    return model.double(), x, y


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_change_that_autograd_does_not_see_is_refused(name: str, precision: torch.dtype):
    model, x, y = hidden(HIDDEN[name])
    model, x = model.to(precision), x.to(precision)
    before = copy.deepcopy(model.state_dict())
    for function in (fl.quantities.ntk_velocity, fl.quantities.feature_speed):
        with pytest.raises(UnsupportedModelError, match="in a way that autograd does not see"):
            function(model, x, y)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SEEN)
def test_a_change_that_autograd_sees_is_measured(name: str, precision: torch.dtype):
    model, x, y = hidden(SEEN[name])
    velocity = fl.quantities.ntk_velocity(model.to(precision), x.to(precision), y).double()
    if name != "a shift that cancels":  # kernels jump at the first sample
        x, y = x[1:], y[1:]
        velocity, model.between = fl.quantities.ntk_velocity(model, x.to(precision), y).double(), torch.relu
    expected = difference(model.double(), x, y, "sum-half", "mean")
    torch.testing.assert_close(velocity, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


class Spectral(nn.Module):
    """Complex weights between a Fourier transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.randn(3, 3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(torch.tanh(self.lift(x)), dim=1)
        mixed = torch.fft.irfft(torch.einsum("pkc,kcd->pkd", modes, self.weight), n=x.shape[1], dim=1)
        return self.head(torch.tanh(mixed).mean(1))


def test_complex_weights_move_in_both_of_their_parts():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Spectral().double()
    model.weight.data = model.weight.data.to(torch.complex128)
    x, y = drawn(5, 4, 2), drawn(5, 2)
    velocity, expected = fl.quantities.ntk_velocity(model, x, y), difference(model, x, y, "sum-half", "mean")
    assert float((velocity - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    jacobians, step = [], 1e-6
    residual = (model(x) - y).detach()
    gradients = torch.autograd.grad(model(x), list(model.parameters()), residual)
    for sign in (1, -1):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= sign * step * gradient
        jacobians.append(torch.cat(list(dense_jacobian(twin, x).values()), -1))
    growth = (jacobians[0] - jacobians[1]).norm() / (2 * step) / jacobians[0].norm()
    slope = sum(float(g.abs().square().sum()) for g in gradients)
    speed = float(growth * residual.square().sum()) / slope
    assert fl.quantities.feature_speed(model, x, y) == pytest.approx(speed, rel=1e-4)


def test_conventions_scale_the_velocity():
    """P = 5 and C = 3: no two conventions agree."""
    model, x, y = built("mlp")
    one = fl.quantities.ntk_velocity(model, x, y)
    for loss, factor in (("mean", 2 / 5), ("mean-half", 1 / 5), ("mean-over-outputs", 2 / 15)):
        np.testing.assert_allclose(fl.quantities.ntk_velocity(model, x, y, loss=loss), factor * one, rtol=1e-10)


def test_a_linear_model_keeps_its_kernel():
    model = nn.Linear(4, 3).double()
    x, y = drawn(5, 4), drawn(5, 3)
    assert float(fl.quantities.ntk_velocity(model, x, y).abs().max()) < 1e-12
    assert fl.quantities.feature_speed(model, x, y) < 1e-12


def homogeneous(layers: int, sigma: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [4, *[20] * (layers - 1), 2]
        parts: list[nn.Module] = []
        for n, m in itertools.pairwise(sizes):
            parts += [nn.Linear(n, m, bias=False), nn.ReLU()]
        model = nn.Sequential(*parts[:-1]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= sigma
    return model


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_features_speed_up_as_the_initialization_shrinks(layers: int):
    """002 Eq. 89: sigma^-L for L weight layers."""
    x, y = drawn(6, 4), drawn(6, 2)
    speeds = [fl.quantities.feature_speed(homogeneous(layers, sigma), x, y) for sigma in (1e-2, 1e-3)]
    assert math.log10(speeds[0] / speeds[1]) == pytest.approx(-layers, abs=1e-3)


def test_features_speed_up_with_the_divisor_of_a_centered_output():
    """001 Sec. 4.2: g = (f - f0) / gamma."""
    model, x, y = homogeneous(3, 1.0), drawn(6, 4), drawn(6, 2)
    speeds = [fl.quantities.feature_speed(Divided(model, gamma), x, y) for gamma in (1.0, 10.0)]
    assert speeds[1] / speeds[0] == pytest.approx(10.0, rel=1e-9)


class Divided(nn.Module):
    def __init__(self, model: nn.Module, gamma: float) -> None:
        super().__init__()
        self.model, self.frozen, self.gamma = model, copy.deepcopy(model).requires_grad_(False), gamma

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x) - self.frozen(x)) / self.gamma


def test_the_speed_is_that_of_its_definition():
    model, x, y = built("mlp")
    residual = model(x).detach() - y
    parameters = list(model.parameters())
    v = torch.autograd.grad(model(x), parameters, residual)
    rows, hessians = [], []
    for scalar in model(x).flatten():
        gradient = torch.autograd.grad(scalar, parameters, create_graph=True)
        rows.append(torch.cat([g.detach().flatten() for g in gradient]))
        product = sum((g * u).sum() for g, u in zip(gradient, v, strict=True))
        second = torch.autograd.grad(product, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(second, parameters, strict=True)
        hessians.append(torch.cat([torch.zeros_like(p).flatten() if h is None else h.flatten() for h, p in pairs]))
    slope = sum(u.square().sum() for u in v)
    expected = torch.stack(hessians).norm() / torch.stack(rows).norm() * residual.square().sum() / slope
    assert fl.quantities.feature_speed(model, x, y) == pytest.approx(float(expected), rel=1e-10)


def test_the_speed_is_the_rate_of_the_features_by_that_of_the_error():
    """|dJ/dt| / |J| against -d log |f - y| / dt, both by a small step of descent; the loss falls twice as fast."""
    model, x, y = built("mlp")
    twin, step = copy.deepcopy(model), 1e-6
    LOSSES["sum-half"](twin(x), y).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= step * parameter.grad
    before, after = (torch.cat(list(dense_jacobian(m, x).values()), -1) for m in (model, twin))
    features = float((after - before).norm() / before.norm()) / step
    error = -math.log(float((twin(x) - y).detach().norm() / (model(x) - y).detach().norm())) / step
    assert fl.quantities.feature_speed(model, x, y) == pytest.approx(features / error, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(3, 5).tril() > 0},
        {"attn_mask": drawn(3, 5)},
        {"enable_gqa": True},
    ],
)
def test_attention_taken_apart_is_attention(options: dict):
    heads = 2 if "enable_gqa" in options else 4
    q, k, v = drawn(2, 4, 3, 6), drawn(2, heads, 5, 6, seed=1), drawn(2, heads, 5, 7, seed=2)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    with ElementaryOps():
        found = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm((3, 4)),
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.GroupNorm(3, 6),
        nn.GroupNorm(2, 6, affine=False),
        nn.BatchNorm1d(6).eval(),
        nn.BatchNorm1d(6),
        nn.RMSNorm(4),
        nn.RMSNorm(4, eps=0.1),
        weight_norm(nn.Linear(4, 3)),
        weight_norm(nn.Linear(4, 3), dim=1),
        weight_norm(nn.Linear(4, 3), dim=None),
    ],
)
def test_normalizations_taken_apart_are_the_same(layer: nn.Module):
    layer = copy.deepcopy(layer).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    x = drawn(5, 6, 4) if not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) == 1 else drawn(5, 3, 4)
    expected = copy.deepcopy(layer)(x)
    with ElementaryOps():
        found = layer(x)
    torch.testing.assert_close(found, expected)


def test_wrong_targets_are_refused():
    model, x, _ = built("mlp")
    with pytest.raises(fl.FeatlearnError, match=r"y has shape \(5,\), expected \(5, 3\) as the outputs"):
        fl.quantities.ntk_velocity(model, x, torch.ones(5))
    with pytest.raises(fl.FeatlearnError, match="outputs='total', expected"):
        fl.quantities.ntk_velocity(model, x, torch.ones(5, 3), outputs="total")
    with pytest.raises(fl.FeatlearnError, match=r"y of shape \(5, 3\) has 15 entries that are nan"):
        fl.quantities.ntk_velocity(model, x, torch.full((5, 3), math.nan))
    with pytest.raises(fl.FeatlearnError, match=r"loss='sum_half', expected 'mse', .*did you mean 'sum-half'"):
        fl.quantities.ntk_velocity(model, x, torch.ones(5, 3), loss="sum_half")
    with pytest.raises(fl.FeatlearnError, match="miss the sum 1 by up to 2, expected one-hot"):
        fl.quantities.ntk_velocity(model, x, torch.ones(5, 3), loss="cross-entropy")
    single, x, _ = built("one output")
    with pytest.raises(fl.FeatlearnError, match=r"integers from 0 to 4.*one-hot.*y.double\(\)"):
        fl.quantities.feature_speed(single, x, torch.arange(5))


def test_a_session_of_another_precision_is_refused():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    session = fl.Session(model, x, dtype=torch.float64)
    for measure in (session.ntk_velocity, session.feature_speed):
        with pytest.raises(fl.FeatlearnError, match=r"dtype=torch.float64, expected the model's own precision"):
            measure(torch.ones(5, 3))
    assert fl.Session(model, x, dtype=torch.float32).ntk_velocity(torch.ones(5, 3)).dtype == torch.float32


def test_the_speed_of_features_is_near_one_for_a_narrow_network_and_far_below_for_a_wide_one():
    digits = fl.data.digits()
    x, y = digits.x[:50], digits.one_hot(centered=True)[:50]
    speeds = []
    for width in (100, 4000):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        speeds.append(fl.quantities.feature_speed(model, x, y))
    assert 0.6 < speeds[0] < 1.1  # 0.85
    assert 0.02 < speeds[1] < 0.035  # 0.026, as 1 / width
