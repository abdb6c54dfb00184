"""The noise of mini-batch gradients: how large a batch is worth its cost."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn import losses
from featlearn.audited_model import AuditedModel, Settings
from featlearn.errors import InputValueError
from featlearn.kernel.execution import checked_by
from featlearn.linalg.estimate import Estimate
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, Readout, read_any_shape
from featlearn.network.raw_outputs import raw_outputs
from featlearn.quantities.ntk import ntk_of
from featlearn.signatures import name_keywords


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientNoise:
    """Noise of the gradients of single samples, estimated from P of them."""

    signal_to_noise: Estimate
    """`signal / noise`, the inverse of the critical batch size."""
    signal: Estimate
    """Squared norm of the mean gradient; its unbiased estimate may be negative."""
    noise: Estimate
    """Trace of the covariance of the gradients of single samples."""
    norms: Tensor
    """Norm of each sample's gradient (P,), known as GraNd."""
    alignment: Tensor
    """Cosine between each sample's gradient and the sum of all others (P,)."""
    errors: Tensor
    """Norm of the derivative of each sample's loss in its outputs (P,), for cross-entropy known as EL2N."""

    @property
    def critical_batch(self) -> Estimate:
        """Batch size at which noise and signal are equal, with an error wide enough for `signal_to_noise` +- 2 errors.

        The error is infinite where the signal is not seen above its own error; pass more samples then.
        """
        ratio, error, samples = float(self.signal_to_noise), float(self.signal_to_noise.stderr), len(self.norms)
        batch = 1 / ratio if ratio > 0 else math.inf
        return Estimate(batch, batch * error / (ratio - 2 * error) if ratio > 2 * error else math.inf, samples)

    def __str__(self) -> str:
        batch, ratio = self.critical_batch, self.signal_to_noise
        if math.isfinite(float(batch.stderr)):
            return f"A batch beyond about {float(batch):.3g} (± {float(batch.stderr):.2g}) gains little."
        highest = float(ratio) + 2 * float(ratio.stderr)
        if highest <= 0:
            return "The gradients of these samples cancel: the network fits them. Pass samples it was not trained on."
        return f"The critical batch is above {1 / highest:.3g}. {len(self.norms)} samples do not bound it from above."


@overload
def gradient_noise(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: losses.Loss,
    by: Literal["network"] = "network",
    optimizer: Optimizer | None = None,
    **settings: Unpack[Settings],
) -> GradientNoise: ...
@overload
def gradient_noise(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: losses.Loss,
    by: Literal["layer", "parameter"],
    optimizer: Optimizer | None = None,
    **settings: Unpack[Settings],
) -> dict[str, GradientNoise]: ...
@name_keywords()
def gradient_noise(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: losses.Loss,
    by: str = "network",
    optimizer: Optimizer | None = None,
    **settings: Unpack[Settings],
) -> GradientNoise | dict[str, GradientNoise]:
    """Estimate the critical batch size: above it, a larger batch hardly improves a step of training.

    A gradient averaged over B samples has squared norm signal + noise / B. At B = noise / signal both parts are equal
    (the "simple noise scale" of McCandlish et al. 2018). Everything follows from one kernel with one backward pass: the
    inner products of the gradients of all pairs of samples. Standard errors are those of the jackknife.

    >>> noise = fl.gradient_noise(model, x, y, loss="cross-entropy")
    >>> print(noise.critical_batch)

    Args:
        model: Module, as for `fl.ntk`. Without a `readout`, outputs may have any shape that the loss takes.
        x: P samples drawn at random, some hundreds, that the network was not trained on for many epochs: gradients of
            samples that it fits cancel.
        y: Targets, as the loss takes them.
        loss: Name of `fl.losses`, module, or function of (outputs, y): a mean or a sum over samples.
        by: `"network"`, or `"layer"` or `"parameter"` for a mapping from names to results.
        optimizer: Measure gradients in the metric of this optimizer's update, as `fl.ntk` does.
        **settings: As for `fl.ntk`, without a `group`.
    """
    losses.function(loss)
    checked_by(by)
    readout, parameters = settings.pop("readout", None), settings.pop("parameters", None)
    outputs = raw_outputs(model, x, readout)
    outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
    slopes = _sample_slopes(loss, outputs, y)
    globs = [parameters] if isinstance(parameters, str) else parameters
    settings["parameters"] = None if globs is None else [f"model.{glob}" for glob in globs]
    audited = AuditedModel(_Losses(unwrapped(model), readout), **settings)
    audited.request.refuse("gradient_noise", "group")
    kernels = ntk_of(audited, x=(x, slopes), by=by, optimizer=optimizer)  # type: ignore[call-overload]
    if isinstance(kernels, Tensor):
        return _noise_of(kernels, slopes)
    return {name.removeprefix("model").removeprefix("."): _noise_of(k, slopes) for name, k in kernels.items()}


class _Losses(nn.Module):
    """One output for each sample, whose gradient is that of the sample's loss."""

    def __init__(self, model: nn.Module, readout: Readout | None) -> None:
        super().__init__()
        self.model, self._readout = model, readout

    def forward(self, x: Inputs, slopes: Tensor) -> Tensor:
        """Return the outputs times the derivatives of the loss, summed over the outputs of each sample."""
        raw: Any = self.model(**x) if isinstance(x, Mapping) else self.model(*(x if isinstance(x, tuple) else (x,)))
        weighted: Tensor = read_any_shape(raw, x, self._readout).to(slopes.dtype) * slopes
        return weighted.reshape(len(slopes), -1).sum(1)


def _sample_slopes(loss: losses.Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the derivative of each sample's loss in its outputs, in the shape of the outputs."""
    samples = len(outputs)
    if samples < 3:
        raise InputValueError(f"x has {samples} samples, expected at least 3, better some hundreds")
    _, slopes = losses.gradient(loss, outputs, y)
    half = samples // 2
    _, alone = losses.gradient(loss, outputs[:half], y[:half])
    together = slopes[:half]
    factor = float((alone * together).sum() / together.square().sum().clamp(min=torch.finfo(slopes.dtype).tiny))
    if float((alone - factor * together).norm()) > 1e-3 * float(alone.norm()):
        raise InputValueError(
            "the loss is not a sum or mean over samples: its derivative for some samples depends on the others; pass "
            "a loss that treats samples separately"
        )
    is_sum = abs(factor - 1) < 1e-3
    return slopes if is_sum else samples * slopes


def _noise_of(kernel: Tensor, slopes: Tensor) -> GradientNoise:
    """Return the statistics of gradients with inner products (P, P)."""
    products = kernel.double()
    squares, overlaps = products.diagonal(), products.sum(1)
    whole, rest = (squares.sum(), overlaps.sum()), (squares.sum() - squares, overlaps.sum() - 2 * overlaps + squares)

    def estimate(statistic: Callable[[int, Tensor, Tensor], Tensor]) -> Estimate:
        return _jackknife(statistic(len(squares), *whole), statistic(len(squares) - 1, *rest))

    others = (rest[1]).clamp(min=0.0).sqrt()
    norms = squares.clamp(min=0.0).sqrt()
    return GradientNoise(
        signal_to_noise=estimate(lambda *sums: _signal(*sums) / _trace(*sums)),
        signal=estimate(_signal),
        noise=estimate(_trace),
        norms=norms,
        alignment=(overlaps - squares) / (norms * others),
        errors=slopes.double().reshape(len(slopes), -1).norm(dim=1),
    )


def _trace(samples: int, squares: Tensor, overlap: Tensor) -> Tensor:
    """Return tr(Sigma) from sum_i |g_i|^2 and |sum_i g_i|^2, unbiased."""
    return (squares - overlap / samples) / (samples - 1)


def _signal(samples: int, squares: Tensor, overlap: Tensor) -> Tensor:
    """Return |E g|^2, the mean product of two samples, unbiased."""
    return (overlap - squares) / (samples * (samples - 1))


def _jackknife(value: Tensor, without: Tensor) -> Estimate:
    """Return a statistic, less its bias, with its standard error, from its values without each of the P samples."""
    samples = len(without)
    spread = (samples - 1) * (without - without.mean()).square().mean()
    return Estimate(float(samples * value - (samples - 1) * without.mean()), float(spread.sqrt()), samples)
