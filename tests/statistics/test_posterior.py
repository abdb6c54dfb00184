"""Posteriors against the dense formula in weight space, whose Jacobian takes one backward pass for every output."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

import featlearn as fl
from featlearn.statistics.marginal_likelihood import MarginalLikelihood
from featlearn.statistics.posterior import Posterior
from tests.references.jacobian import dense_jacobian, eval_mode, outputs_of
from tests.zoo.case import Built, Net, default_dtype, parameter

NOISE = 0.3
LOSSES = ("mse", "cross-entropy", "bce")


def mlp() -> Built:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 4), torch.randn(5, 4), None


def tied_weights() -> Built:
    def forward(self: Net, ids: Tensor) -> Tensor:
        return torch.tanh(self.embedding(ids).sum(1)) @ self.embedding.weight.T

    return Net(forward, embedding=nn.Embedding(4, 3)), torch.randint(4, (6, 5)), torch.randint(4, (3, 5)), None


def lstm() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])

    return Net(forward, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)), *gaussian(6, 4), None


def small_gpt() -> Built:
    model = fl.models.GPT(7, context=5, width=8, heads=2, blocks=1)
    return model, torch.randint(7, (5, 5)), torch.randint(7, (3, 5)), fl.readouts.last_token


def adapters() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x) + x @ self.down.T @ self.up.T))

    frozen = nn.Linear(4, 6).requires_grad_(False)
    parts = {"frozen": frozen, "head": nn.Linear(6, 3), "down": parameter(2, 4), "up": parameter(6, 2)}
    return Net(forward, **parts), torch.randn(7, 4), torch.randn(4, 4), None


def batch_norm() -> Built:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    model(torch.randn(20, 4))
    return model, torch.randn(7, 4), torch.randn(4, 4), None


def gaussian(*shapes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shapes[0], 5, 3), torch.randn(shapes[1], 5, 3)


def build(make: Callable[[], Built]) -> Built:
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float64):
        torch.manual_seed(0)
        return make()


def targets(loss: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if loss == "cross-entropy":
        return torch.randint(shape[1], shape[:1], generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values if loss == "mse" else values.sigmoid()


def negative_log_likelihood(loss: str, f: Tensor, y: Tensor, noise: Any = NOISE) -> Tensor:
    if loss == "cross-entropy":
        return functional.cross_entropy(f, y, reduction="sum")
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(f, y, reduction="sum")
    return -torch.distributions.Normal(f, torch.as_tensor(noise, dtype=torch.float64)).log_prob(y).sum()


class Dense:
    """The posterior by matrices over all weights."""

    def __init__(self, built: Built, loss: str, precisions: Callable[[str], float], noise: float = NOISE) -> None:
        model, x, x2, readout = built
        weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.precision = torch.cat([torch.full((w.numel(),), precisions(n)).double() for n, w in weights.items()])
        self.weights = torch.cat([w.flatten() for w in weights.values()])
        jacobian, jacobian2 = (torch.cat(list(dense_jacobian(model, z, readout).values()), -1) for z in (x, x2))
        with eval_mode(model), torch.no_grad():
            f, self.f2 = outputs_of(model, x, readout), outputs_of(model, x2, readout)
        y = targets(loss, f.shape)
        self.rows = jacobian.flatten(0, 1)
        rows2 = jacobian2.flatten(0, 1)

        def value(flat: Tensor) -> Tensor:
            return negative_log_likelihood(loss, flat.reshape(f.shape), y, noise)

        self.hessian = torch.autograd.functional.hessian(value, f.flatten())
        slope = torch.autograd.functional.jacobian(value, f.flatten())
        information = self.rows.T @ self.hessian @ self.rows + self.precision.diag()
        covariance = torch.linalg.inv(information)
        self.covariance = (rows2 @ covariance @ rows2.T).reshape(*self.f2.shape, *self.f2.shape)
        self.refined = self.f2 - (rows2 @ covariance @ self.rows.T @ slope).reshape(self.f2.shape)
        scatter = (self.precision * self.weights.square()).sum()
        volume = torch.logdet(information) - self.precision.log().sum()
        self.evidence = float(-value(f.flatten()) - (scatter + volume) / 2)


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))


def posterior(built: Built, loss: str, **settings: Any) -> Posterior:
    model, x, _, readout = built
    with eval_mode(model), torch.no_grad():
        shape = outputs_of(model, x, readout).shape
    if loss == "mse":
        settings = {"noise": NOISE, **settings}
    return fl.posterior(model, x, targets(loss, shape), loss=loss, readout=readout, **settings)


MODELS = (mlp, tied_weights, lstm, small_gpt, adapters, batch_norm)
losses = pytest.mark.parametrize("loss", LOSSES)
models = pytest.mark.parametrize("make", MODELS)


@losses
@models
def test_a_posterior_is_that_of_the_dense_formula(make: Callable[[], Built], loss: str):
    built = build(make)
    exact = Dense(built, loss, lambda name: 2.0)
    found = posterior(built, loss, prior=2.0)
    joint = found.predict(built[2], joint=True)
    close(joint.covariance, exact.covariance)
    close(joint.mean, exact.f2)
    close(found.predict(built[2]).covariance, torch.einsum("icid->icd", exact.covariance))
    close(found.predict(built[2], refine=True).mean, exact.refined)
    close(found.log_marginal_likelihood, exact.evidence)


@losses
def test_layers_have_precisions_of_their_own(loss: str):
    built = build(adapters)
    exact = Dense(built, loss, lambda name: 3.0 if name.startswith("head") else 0.5)
    found = posterior(built, loss, prior={"h*": 3.0, "": 0.5})
    assert found.prior == {"": 0.5, "head": 3.0}
    close(found.predict(built[2], joint=True).covariance, exact.covariance)
    close(found.log_marginal_likelihood, exact.evidence)


def test_the_jacobian_of_the_reference_is_that_of_torch_func():
    model, x, _, _ = build(mlp)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = jacrev(lambda w: functional_call(model, w, (x,)))(weights)
    for name, jacobian in dense_jacobian(model, x).items():
        close(jacobian, expected[name].flatten(2))


@losses
def test_fitted_values_are_where_the_evidence_in_weight_space_has_no_slope(loss: str):
    """The slope is autograd's, in the logarithms of the precisions and of the noise."""
    built = build(mlp)
    found = posterior(built, loss, prior="fit by layer", **({"noise": "fit"} if loss == "mse" else {}))
    model, x, _, _ = built
    f = model(x).detach()
    y = targets(loss, f.shape)
    dense = Dense(built, loss, lambda name: found.prior[name.partition(".")[0]], found.noise)
    close(found.log_marginal_likelihood, dense.evidence)
    sizes = {name: sum(p.numel() for p in model[int(name)].parameters()) for name in ("0", "2")}

    def evidence(logs: Tensor) -> Tensor:
        precision = torch.cat([logs[k].exp().expand(size) for k, size in enumerate(sizes.values())])
        noise = logs[2].exp() if loss == "mse" else torch.tensor(1.0)
        hessian = dense.hessian * (found.noise / noise).square()
        information = dense.rows.T @ hessian @ dense.rows + precision.diag()
        volume = torch.logdet(information) - precision.log().sum()
        scatter = (precision * dense.weights.square()).sum()
        return -negative_log_likelihood(loss, f, y, noise) - (scatter + volume) / 2

    logs = torch.tensor([found.prior["0"], found.prior["2"], found.noise], dtype=torch.float64).log()
    slope = torch.autograd.functional.jacobian(evidence, logs)
    assert float(slope.abs().max()) < 1e-4
    for k in range(3 if loss == "mse" else 2):
        for step in (-0.2, 0.2):
            other = logs.clone()
            other[k] += step
            assert float(evidence(other)) < found.log_marginal_likelihood


def test_one_precision_for_all_layers_is_fitted():
    built = build(lstm)
    found = posterior(built, "cross-entropy", prior="fit")
    assert isinstance(found.prior, float)
    best = found.log_marginal_likelihood
    for factor in (0.9, 1.1):
        assert posterior(built, "cross-entropy", prior=factor * found.prior).log_marginal_likelihood < best


def test_a_step_of_the_fit_halves_the_largest_distance_to_the_maximum():
    """Over starts up to e^8 away, with kernels of ranks below and above those of the system."""
    generator = torch.Generator().manual_seed(0)
    kernels = {}
    for name, rank in (("a", 3), ("b", 40), ("c", 11)):
        factor = torch.randn(30, rank, generator=generator, dtype=torch.float64)
        kernels[name] = factor @ factor.T
    evidence = MarginalLikelihood(curvatures=kernels, squares={"a": 5.0, "b": 0.1, "c": 70.0}, squared_error=12.0)
    best, noise = evidence.fit(dict.fromkeys("abc", 1.0), 1.0, fit_prior=True, fit_noise=True)
    for _ in range(20):
        logs = 8 * torch.randn(4, generator=generator, dtype=torch.float64)
        start = {key: best[key] * math.exp(log) for key, log in zip("abc", logs, strict=False)}
        fixed, fixed_noise = evidence._stationary(start, noise * math.exp(logs[3]))
        after = [(log + math.log(fixed[key] / best[key])) / 2 for key, log in zip("abc", logs, strict=False)]
        after.append((logs[3] + math.log(fixed_noise / noise)) / 2)
        assert max(map(abs, after)) <= 0.5 * float(logs.abs().max()) + 1e-5


def test_samples_have_the_mean_and_covariance_of_the_posterior():
    built = build(mlp)
    found = posterior(built, "cross-entropy", prior=5.0)
    exact = found.predict(built[2], joint=True)
    draws = found.sample(built[2], 40000, generator=torch.Generator().manual_seed(3))
    assert draws.shape == (40000, 5, 3)
    covariance = exact.covariance.reshape(15, 15)
    deviation = covariance.diagonal().sqrt()
    error = (torch.cov(draws.flatten(1).T) - covariance) / deviation / deviation[:, None]
    assert float(error.abs().max()) < 0.03
    assert float(((draws.mean(0) - exact.mean).flatten() / deviation).abs().max()) < 0.03
    assert torch.equal(found.sample(built[2], 4), found.sample(built[2], 4))


@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_probabilities_are_near_the_average_over_samples(loss: str):
    """MacKay's approximation is far closer than the probabilities at the mean."""
    built = build(mlp)
    found = posterior(built, loss, prior=3.0)
    prediction = found.predict(built[2])
    draws = found.sample(built[2], 20000)
    link = (lambda f: f.softmax(-1)) if loss == "cross-entropy" else torch.sigmoid
    exact = link(draws).mean(0)
    error = float((prediction.probabilities - exact).abs().max())
    assert error < 0.03
    assert error < float((link(prediction.mean) - exact).abs().max())
    assert found.predict(built[2], joint=True).probabilities.shape == (5, 3)
    assert posterior(built, "mse").predict(built[2]).probabilities is None


def test_a_small_budget_predicts_in_parts():
    model, x, _, _ = built = build(mlp)
    x2 = torch.randn(70, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = targets("mse", torch.Size((8, 3)))
    assert 8 * 3 * 24**2 < 16000 < 8 * 24 * 3 * 4 * 70
    found, whole = (fl.posterior(model, x, y, memory=memory) for memory in (16000, None))
    for refine in (False, True):
        one, other = found.predict(x2, refine=refine), whole.predict(x2, refine=refine)
        close(one.covariance, other.covariance)
        close(one.mean, other.mean)
    with pytest.raises(fl.errors.MemoryBudgetError, match=r"the joint covariance of 70 samples takes .* pass fewer"):
        found.predict(x2, joint=True)
    with pytest.raises(
        fl.errors.MemoryBudgetError, match=r"8 samples with 3 outputs takes 3 matrices of 24 x 24, .*KiB"
    ):
        posterior(built, "mse", memory=8000)


def test_float32_models_are_measured_in_double():
    model, x, x2, _ = build(mlp)
    y = targets("mse", torch.Size((8, 3)))
    exact = fl.posterior(model, x, y, noise=1e-3, prior=1e-3).predict(x2).covariance
    single = fl.posterior(model.float(), x.float(), y.float(), noise=1e-3, prior=1e-3).predict(x2.float()).covariance
    close(single, exact, 1e-4)


@losses
def test_variances_are_never_negative(loss: str):
    """At training points, with little noise, repeated samples and saturated outputs."""
    model, x, x2, _ = build(mlp)
    with torch.no_grad():
        model[2].weight.mul_(300)
    x = torch.cat([x, x, x[:1]])
    y = targets(loss, torch.Size((17, 3)))
    found = fl.posterior(model, x, y, loss=loss, prior=1e-2, **({"noise": 1e-4} if loss == "mse" else {}))
    for points in (x, x2):
        prediction = found.predict(points, refine=True)
        assert prediction.mean.isfinite().all()
        assert (prediction.covariance.diagonal(dim1=1, dim2=2) >= 0).all()
        assert found.sample(points, 2).isfinite().all()


def test_a_variance_lost_in_single_precision_is_an_error():
    model, x, _, _ = build(mlp)
    y = targets("mse", torch.Size((8, 3))).float()
    with pytest.raises(fl.FeatlearnError, match=r"rounding.*dtype=torch.float64"):
        fl.posterior(model.float(), x.float(), y, noise=1e-6, prior=1e-6, dtype=torch.float32).predict(x.float())


def test_changed_weights_are_refused():
    model, _, x2, _ = built = build(batch_norm)
    found = posterior(built, "mse")
    found.predict(x2)
    with torch.no_grad():
        model[1].running_mean[0] += 1e-9
    with pytest.raises(fl.FeatlearnError, match=r"1.running_mean changed since the posterior was made"):
        found.predict(x2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"prior": -1.0}, "prior=-1.0, expected a precision > 0"),
    "negative in mapping": ({"prior": {"0": 1.0, "2": -2.0}}, r"prior\['2'\]=-2.0, expected a precision > 0"),
    "unknown layer": ({"prior": {"head": 1.0, "*": 1.0}}, "'head', which matches no layer, expected globs of '0', '2'"),
    "missing layer": ({"prior": {"0": 1.0}}, "no precision for layer '2'"),
    "no name": ({"prior": {0: 1.0}}, "the key 0, expected names or globs"),
    "misspelled": ({"prior": "fit by leyer"}, "did you mean 'fit by layer'"),
    "no number": ({"prior": None}, "prior=None, expected one finite number"),
    "no noise": ({"noise": 0.0}, "noise=0.0, expected a standard deviation > 0"),
    "unknown noise": ({"noise": "fitted"}, "noise='fitted', expected a standard deviation > 0 or 'fit'"),
    "noise of classes": ({"loss": "cross-entropy", "noise": 0.5}, "noise=0.5 has no effect on cross-entropy"),
    "kind of targets": ({"loss": "cross-entropy"}, r"y is float64 of shape \(8, 3\), expected classes|rows \(P, C\)"),
    "shape of targets": ({"y": torch.randn(8, 2)}, r"y has shape \(8, 2\), expected \(8, 3\)"),
    "ignored class": ({"y": torch.tensor([0, -100, 1, 2, 0, 1, 2, 0]), "loss": "cross-entropy"}, "classes from -100"),
    "loss without name": ({"loss": lambda f, y: f.sum()}, "loss is a function without a likelihood"),
    "group": ({"group": "world"}, "group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str):
    model, x, _, _ = build(mlp)
    settings, message = WRONG[name]
    y = settings.get("y", targets("mse", torch.Size((8, 3))))
    with pytest.raises(fl.FeatlearnError, match=message):
        fl.posterior(model, x, y, **{key: value for key, value in settings.items() if key != "y"})


def test_a_precision_without_a_finite_maximum_is_named():
    model, x, _, _ = built = build(mlp)
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.zero_()
    with pytest.raises(fl.FeatlearnError, match="all weights of layer '0' are zero"):
        posterior(built, "mse", prior="fit by layer")
    with torch.no_grad():
        model[2].weight.zero_(), model[0].bias.fill_(1.0)
    with pytest.raises(fl.FeatlearnError, match="no output depends on the weights of layer '0'"):
        posterior(built, "mse", prior="fit by layer")
    with pytest.raises(fl.FeatlearnError, match="outputs equal to the targets"):
        fl.posterior(model, x, model(x).detach(), noise="fit")


@pytest.mark.parametrize("count", [0, 1.5, True])
def test_a_count_that_is_none_is_refused(count: Any):
    built = build(mlp)
    with pytest.raises(fl.FeatlearnError, match="count="):
        posterior(built, "mse").sample(built[2], count)
