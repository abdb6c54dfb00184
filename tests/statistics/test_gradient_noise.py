"""Gradient noise against the gradients of single samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import featlearn as fl
from featlearn.statistics.gradient_noise import GradientNoise, _noise_of

P, D, C = 11, 5, 3


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, C)).double()
        model(torch.randn(30, D).double())
    return model


def batch(samples: int = P) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(C, (samples,), generator=generator)


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> dict[str, Tensor]:
    """Name -> (P, entries), one backward pass for each sample."""
    model = copy.deepcopy(model).eval()
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for k in range(len(x)):
        model.zero_grad()
        loss(model(x[k : k + 1]), y[k : k + 1]).backward()
        for name, parameter in model.named_parameters():
            rows[name].append(parameter.grad.flatten().clone())
    return {name: torch.stack(row) for name, row in rows.items()}


def check(noise: GradientNoise, gradients: Tensor) -> None:
    """Unbiased estimates from pairs of samples and from deviations."""
    samples = len(gradients)
    pairs = [gradients[i] @ gradients[j] for i in range(samples) for j in range(samples) if i != j]
    signal = float(torch.stack(pairs).mean())
    trace = float(gradients.var(0).sum())
    close(noise.signal.value, signal)
    close(noise.noise.value, trace)
    close(noise.norms, gradients.norm(dim=1))
    others = gradients.sum(0) - gradients
    close(noise.alignment, functional.cosine_similarity(gradients, others, dim=1))

    def ratio(rows: Tensor) -> Tensor:
        return ((rows.sum(0).square().sum() - rows.square().sum()) / (len(rows) * (len(rows) - 1))) / rows.var(0).sum()

    without = torch.stack([ratio(gradients[torch.arange(samples) != k]) for k in range(samples)])
    close(noise.signal_to_noise.value, samples * ratio(gradients) - (samples - 1) * without.mean())
    close(
        noise.signal_to_noise.stderr,
        (samples - 1) / samples**0.5 * without.std(correction=0) * (samples / (samples - 1)) ** 0.5,
    )


def close(a: Any, b: Any) -> None:
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


LOSSES = {
    "cross-entropy": functional.cross_entropy,
    "mse": lambda f, y: functional.mse_loss(f, functional.one_hot(y, C).double()),
    "sum-half": lambda f, y: functional.mse_loss(f, functional.one_hot(y, C).double(), reduction="sum") / 2,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_noise_is_that_of_single_gradients(loss: str):
    model, (x, y) = network(), batch()
    gradients = sample_gradients(model, x, y, LOSSES[loss])
    targets = y if loss == "cross-entropy" else functional.one_hot(y, C).double()
    check(fl.gradient_noise(model, x, targets, loss=loss), torch.cat(list(gradients.values()), 1))
    layers = fl.gradient_noise(model, x, targets, loss=loss, by="layer")
    assert layers.keys() == {"0", "1", "4"}
    for name, noise in layers.items():
        check(noise, torch.cat([gradients[f"{name}.weight"], gradients[f"{name}.bias"]], 1))
    check(
        fl.gradient_noise(model, x, targets, loss=loss, parameters="4.*"),
        torch.cat([gradients["4.weight"], gradients["4.bias"]], 1),
    )
    check(
        fl.gradient_noise(model, x, targets, loss=LOSSES[loss] if loss == "cross-entropy" else loss, by="parameter")[
            "0.bias"
        ],
        gradients["0.bias"],
    )


def test_gradients_are_those_of_torch_func():
    model, (x, y) = network(), batch()
    frozen = copy.deepcopy(model).eval()
    weights = {name: p.detach() for name, p in frozen.named_parameters()}
    buffers = dict(frozen.named_buffers())

    def value(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(frozen, {**weights, **buffers}, (x[None],)), y[None])

    rows = vmap(grad(value), (None, 0, 0))(weights, x, y)
    noise = fl.gradient_noise(model, x, y, loss="cross-entropy")
    close(noise.norms, torch.cat([row.flatten(1) for row in rows.values()], 1).norm(dim=1))
    close(noise.errors, (frozen(x).softmax(1) - functional.one_hot(y, C)).norm(dim=1))


def test_the_metric_is_that_of_the_optimizer():
    model, (x, y) = network(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    functional.cross_entropy(model.eval()(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scaled = []
    for (name, row), parameter in zip(
        sample_gradients(model, x, y, functional.cross_entropy).items(), model.parameters(), strict=True
    ):
        assert name
        rate = 0.01 / ((optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999)).sqrt() + 1e-8)
        scaled.append(row * rate.flatten().sqrt())
    check(fl.gradient_noise(model, x, y, loss="cross-entropy", optimizer=optimizer), torch.cat(scaled, 1))


def test_outputs_may_have_positions():
    model = fl.models.GPT(7, context=5, width=8, heads=2, blocks=1, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(1))

    def mean(f: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(f.flatten(0, 1), y.flatten())

    gradients = sample_gradients(model, ids, ids.roll(-1, 1), mean)
    check(fl.gradient_noise(model, ids, ids.roll(-1, 1), loss="cross-entropy"), torch.cat(list(gradients.values()), 1))


def test_intervals_hold_the_truth():
    """Of a population of 600 samples, drawn with replacement; where noise and signal are near, and far apart."""
    x, y = batch(600)
    model = network()
    gradients = torch.cat(list(sample_gradients(model, x, y, functional.cross_entropy).values()), 1)
    for mean in (1.0, 3.0):
        population = gradients + (mean - 1) * gradients.mean(0)
        center = population.mean(0)
        truth = float((population - center).square().sum(1).mean() / center.square().sum())
        kernel = population @ population.T
        generator = torch.Generator().manual_seed(2)
        held, bounded = 0, 0
        for _ in range(200):
            drawn = torch.randint(600, (150,), generator=generator)
            noise = _noise_of(kernel[drawn][:, drawn], population[drawn])
            batch_size, ratio = noise.critical_batch, noise.signal_to_noise
            assert (
                abs(float(batch_size) - truth) <= 2 * batch_size.stderr
                or abs(float(ratio) - 1 / truth) > 1.9 * ratio.stderr
            )
            held += abs(float(ratio) - 1 / truth) <= 2 * ratio.stderr
            bounded += batch_size.stderr < float("inf")
        assert held >= 186
        assert (bounded > 180) == (mean == 3.0)


def test_the_text_says_what_is_known():
    model, (x, y) = network(), batch(60)
    assert str(fl.gradient_noise(model, x, y, loss="cross-entropy")).startswith(
        ("A batch beyond about", "The critical")
    )
    rows = torch.randn(20, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unknown = _noise_of(rows @ rows.T, rows)
    assert unknown.critical_batch.stderr == float("inf")
    assert "20 samples do not bound it from above" in str(unknown)
    cancelling = torch.eye(20).double() - 1 / 20
    assert "gradients of these samples cancel" in str(_noise_of(cancelling, cancelling))


def test_what_has_no_noise_is_refused():
    model, (x, y) = network(), batch()
    with pytest.raises(fl.FeatlearnError, match="x has 2 samples, expected at least 3"):
        fl.gradient_noise(model, x[:2], y[:2], loss="cross-entropy")
    with pytest.raises(fl.FeatlearnError, match="not a sum or mean over samples"):
        fl.gradient_noise(model, x, y, loss=lambda f, y: (f.logsumexp(0) - f.mean(0)).sum())
    with pytest.raises(fl.FeatlearnError, match=r"y is int64 of shape \(5,\), expected classes"):
        fl.gradient_noise(model, x, y[:5], loss="cross-entropy")
    with pytest.raises(fl.FeatlearnError, match="by='layers'"):
        fl.gradient_noise(model, x, y, loss="cross-entropy", by="layers")  # type: ignore[call-overload]
    with pytest.raises(fl.FeatlearnError, match=r"not finite, at least for samples 0, 1, 2, 3, 4 and \d+ more"):
        fl.gradient_noise(model, x * torch.nan, y, loss="cross-entropy")
