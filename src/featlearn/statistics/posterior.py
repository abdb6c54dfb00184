"""The posterior of a linearized network: exact error bars for any module, from its tangent kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from featlearn import losses
from featlearn.audited_model import AuditedModel, Settings
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, did_you_mean
from featlearn.network.inputs import Inputs, batch_size
from featlearn.planning.memory import readable_bytes
from featlearn.quantities.operator import source
from featlearn.shapes import checked_number
from featlearn.signatures import name_keywords
from featlearn.statistics.flat_kernels import FlatKernels, positive_part, rows_of, transposed_product
from featlearn.statistics.likelihood import Likelihood, likelihood_kind, likelihood_of, probabilities
from featlearn.statistics.marginal_likelihood import MarginalLikelihood

TOGETHER = 32
"""Test samples whose kernel among themselves is measured at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """Predictions for P2 samples with their uncertainty, in float64."""

    mean: Tensor
    """Outputs (P2, C)."""
    covariance: Tensor
    """Covariance of the outputs, without noise: (P2, C, C), or (P2, C, P2, C) with `joint=True`."""
    probabilities: Tensor | None
    """Class probabilities (P2, C) by MacKay's probit approximation; None for squared errors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Posterior:
    """Laplace posterior of a network's linearization. Made by `fl.posterior`."""

    prior: float | dict[str, float]
    """Precision of the weights, or one for each layer."""
    noise: float
    """Standard deviation of the noise in the targets; 1 where the loss is no squared error."""
    log_marginal_likelihood: float
    """Log-probability of the targets by Laplace's method, as in MacKay (1992): weights have the prior mean 0."""
    _kernels: FlatKernels
    _precisions: dict[str, float]
    _x: Inputs
    _likelihood: Likelihood
    _factor: Tensor
    """Cholesky factor of S = I + L^T K L / noise^2."""
    _state: dict[str, Tensor]
    """Copy of the weights and buffers."""

    def __repr__(self) -> str:
        samples, outputs = self._likelihood.outputs.shape
        return (
            f"Posterior({samples} samples, {outputs} outputs, prior={self.prior}, noise={self.noise:.4g}, "
            f"log_marginal_likelihood={self.log_marginal_likelihood:.6g})"
        )

    @name_keywords()
    def predict(self, x2: Inputs, *, joint: bool = False, refine: bool = False) -> Prediction:
        """Predict other samples, with error bars.

        Args:
            x2: P2 samples, as the model takes them.
            joint: Return the covariance between all samples, (P2, C, P2, C).
            refine: Move the mean by one Gauss-Newton step toward the training targets, for weights ~ N(now, 1 / prior).
                Without it, the mean is what the model returns.
        """
        self._refuse_changed_weights()
        mean = self._kernels.outputs(x2)
        samples, outputs = mean.shape
        whitened_slope = self._likelihood.whitened_slope.reshape(-1, 1)
        step = torch.linalg.solve_triangular(self._factor, whitened_slope, upper=False) / self.noise
        size = self._samples_at_once(samples, outputs, joint)
        blocks = []
        for begin in range(0, samples, size):
            rows = slice(begin, begin + size)
            part = rows_of(x2, rows)
            explained = self._explained(part)
            if refine:
                mean[rows] += (explained.mT @ step).reshape(-1, outputs)
            blocks.append(self._joint(part, explained) if joint else self._separate(part, explained))
        covariance = torch.cat(blocks)
        if joint:
            covariance = covariance.reshape(samples, outputs, samples, outputs)
        separate = torch.einsum("icid->icd", covariance) if joint else covariance
        return Prediction(
            mean=mean, covariance=covariance, probabilities=probabilities(self._likelihood.kind, mean, separate)
        )

    @name_keywords()
    def sample(self, x2: Inputs, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw functions from the posterior, and return their outputs for P2 samples, (count, P2, C).

        Args:
            x2: P2 samples, as the model takes them.
            count: Number of functions.
            generator: Source of random numbers; without one, draws are the same at every call.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputValueError(f"count={count!r}, expected a number of functions, an integer >= 1")
        drawing = source(generator)
        prediction = self.predict(x2, joint=True)
        mean, size = prediction.mean, prediction.mean.numel()
        values, vectors = positive_part(prediction.covariance.reshape(size, size))
        noise = torch.randn(count, size, generator=drawing, device=drawing.device, dtype=torch.float64).to(mean.device)
        return mean + (noise * values.sqrt() @ vectors.mT).reshape(count, *mean.shape)

    def _explained(self, x2: Inputs) -> Tensor:
        """Return the columns (P C, P2 C) whose squares are what the data take off the prior variance."""
        cross = self._kernels.weighted(self._precisions, x2, self._x)
        whitened = transposed_product(self._likelihood.curvature_root, cross.mT) / self.noise
        explained: Tensor = torch.linalg.solve_triangular(self._factor, whitened, upper=False)
        return explained

    def _joint(self, x2: Inputs, explained: Tensor) -> Tensor:
        """Return the covariance (P2 C, P2 C)."""
        return _without_rounding(self._kernels.weighted(self._precisions, x2), explained.mT @ explained)

    def _separate(self, x2: Inputs, explained: Tensor) -> Tensor:
        """Return the covariance of each sample, (P2, C, C)."""
        outputs = self._likelihood.outputs.shape[1]
        samples = explained.shape[1] // outputs
        before = []
        for begin in range(0, samples, TOGETHER):
            part = rows_of(x2, slice(begin, begin + TOGETHER))
            kernel = self._kernels.weighted(self._precisions, part)
            among = len(kernel) // outputs
            before.append(torch.einsum("icid->icd", kernel.reshape(among, outputs, among, outputs)).clone())
        columns = explained.reshape(-1, samples, outputs).transpose(0, 1)
        return _without_rounding(torch.cat(before), columns.mT @ columns)

    def _samples_at_once(self, samples: int, outputs: int, joint: bool) -> int:
        """Return how many test samples fit into memory; all of them for a joint covariance, or an error."""
        budget, keys, rows = self._kernels.byte_budget(), len(self._precisions), len(self._factor)
        if joint:
            needed = 8 * samples * outputs * ((keys + 3) * samples * outputs + (keys + 3) * rows)
            if needed > budget:
                raise MemoryBudgetError(
                    f"the joint covariance of {samples:,} samples takes {readable_bytes(needed)}, expected at most "
                    f"{readable_bytes(budget)}; pass fewer samples, joint=False, or a larger memory="
                )
            return samples
        return max(1, min(samples, budget // (8 * rows * outputs * (keys + 3))))

    def _refuse_changed_weights(self) -> None:
        state = self._kernels.state()
        changed = [name for name, value in self._state.items() if not torch.equal(value, state[name])]
        if changed:
            raise InputValueError(
                f"{changed[0]} changed since the posterior was made, expected the same weights; call fl.posterior "
                "again, or load the earlier weights"
            )


@name_keywords()
def posterior(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: losses.Loss = "mse",
    noise: float | str = 1.0,
    prior: float | str | Mapping[str, float] = 1.0,
    **settings: Unpack[Settings],
) -> Posterior:
    """Compute error bars for a trained network: the exact Laplace posterior of its linearization.

    The network is replaced by its linearization at the present weights, with the prior weights ~ N(now, 1 / prior). The
    posterior of that model is exact for squared errors. For other losses the likelihood is replaced by its second-order
    approximation at the present outputs. Works for any module that `fl.ntk` measures. The cost is that of one kernel
    with `outputs="full"` and the Cholesky factor of a (P C, P C) matrix, of 8 (P C)^2 bytes; a fit takes about 20.

    >>> posterior = fl.posterior(model, x, y, loss="cross-entropy", prior="fit by layer")
    >>> prediction = posterior.predict(x_test)
    >>> prediction.probabilities, prediction.covariance  # (P2, C), (P2, C, C)

    Args:
        model: Module, as for `fl.ntk`.
        x: P training samples.
        y: Targets as for the loss: (P, C) numbers, or classes (P,) for cross-entropy.
        loss: Name of `fl.losses`, which says the likelihood: every squared error stands for Gaussian noise,
            `"cross-entropy"` for classes, `"bce"` for independent labels.
        noise: Standard deviation of the noise of targets, for squared errors; `"fit"` maximizes the marginal
            likelihood.
        prior: Precision of the weights (an L2 penalty of prior / 2 |w|^2 on the summed loss); a mapping from layer, or
            glob of layers, to precision; `"fit"` or `"fit by layer"` to maximize the marginal likelihood.
        **settings: As for `fl.ntk`, without a `group`. `dtype` is `torch.float64` unless `torch.float32` is passed:
            posterior variances are small differences.

    Returns:
        A `Posterior`, with `.predict(x2)`, `.sample(x2, count)`, `.log_marginal_likelihood`, `.prior` and `.noise`. It
        holds a matrix (P C, P C), a copy of the weights, and the model itself, whose weights must not change.
    """
    kind = likelihood_kind(loss)
    deviation = _checked_noise(noise, kind)
    by_layer = isinstance(prior, Mapping) or prior == "fit by layer"
    settings["dtype"] = settings.get("dtype") or torch.float64
    audited = AuditedModel(model, **settings)
    audited.request.refuse("posterior", "group")
    batch_size(x)
    kernels = FlatKernels(audited, "layer" if by_layer else "network")
    squares = kernels.squares()
    precisions = _initial_precisions(prior, list(squares))
    likelihood = likelihood_of(loss, kernels.outputs(x), y)
    _refuse_too_many_samples(kernels, likelihood, len(squares) + 2 + isinstance(noise, str) + isinstance(prior, str))
    state = {name: value.clone() for name, value in kernels.state().items()}
    evidence = MarginalLikelihood(
        curvatures={key: _curvature(likelihood, kernel) for key, kernel in kernels.matrices(x)},
        squares=squares,
        squared_error=likelihood.squared_error if kind == "mse" else None,
    )
    precisions, variance = evidence.fit(
        precisions, deviation**2, fit_prior=isinstance(prior, str), fit_noise=isinstance(noise, str)
    )
    factor = evidence.factor(precisions, variance)
    return Posterior(
        prior=dict(precisions) if by_layer else precisions[""],
        noise=variance**0.5,
        log_marginal_likelihood=likelihood.log_probability(variance) + evidence.log_volume(factor, precisions),
        _kernels=kernels,
        _precisions=precisions,
        _x=x,
        _likelihood=likelihood,
        _factor=factor,
        _state=state,
    )


def _curvature(likelihood: Likelihood, kernel: Tensor) -> Tensor:
    """Return L^T K L (P C, P C)."""
    if likelihood.kind == "mse":  # L is the identity
        return kernel
    root = likelihood.curvature_root
    return transposed_product(root, transposed_product(root, kernel).mT.contiguous())


def _without_rounding(before: Tensor, explained: Tensor) -> Tensor:
    """Return the difference of covariances (..., n, n), positive; raise an error if rounding has made it negative."""
    covariance = before - explained
    values, vectors = positive_part(covariance, float(before.diagonal(dim1=-2, dim2=-1).max()))
    return (vectors * values[..., None, :]) @ vectors.mT


def _checked_noise(noise: Any, kind: str) -> float:
    """Return the standard deviation of the noise, or the value where a fit begins."""
    if isinstance(noise, str) and noise != "fit":
        raise InputValueError(f"noise={noise!r}, expected a standard deviation > 0 or 'fit'")
    deviation = 1.0 if noise == "fit" else checked_number(noise, "noise")
    if not deviation > 0:
        raise InputValueError(f"noise={noise!r}, expected a standard deviation > 0 or 'fit'")
    if kind != "mse" and noise != 1.0:
        raise InputValueError(f"noise={noise!r} has no effect on {kind}, expected none; leave noise= out")
    return deviation


def _initial_precisions(prior: Any, keys: list[str]) -> dict[str, float]:
    """Return the precision of each key; 1 where it is to be fitted."""
    if isinstance(prior, str):
        if prior not in ("fit", "fit by layer"):
            hint = did_you_mean(prior, ("fit", "fit by layer"))
            raise InputValueError(f"prior={prior!r}, expected a precision, a mapping, 'fit' or 'fit by layer'{hint}")
        return dict.fromkeys(keys, 1.0)
    if not isinstance(prior, Mapping):
        return dict.fromkeys(keys, _checked_precision(prior, "prior"))
    for name in prior:
        if not isinstance(name, str):
            raise InputTypeError(f"prior has the key {name!r}, expected names or globs of layers")
        if not any(fnmatchcase(key, name) for key in keys):
            hint = did_you_mean(name, keys) or f", expected globs of {', '.join(map(repr, keys))}"
            raise InputValueError(f"prior has the key {name!r}, which matches no layer{hint}")
    precisions = {}
    for key in keys:
        names = [key] if key in prior else [name for name in prior if fnmatchcase(key, name)]
        if not names:
            raise InputValueError(f"prior has no precision for layer {key!r}, expected one for each layer; add '*'")
        precisions[key] = _checked_precision(prior[names[0]], f"prior[{names[0]!r}]")
    return precisions


def _checked_precision(value: Any, name: str) -> float:
    precision = checked_number(value, name)
    if not precision > 0:
        raise InputValueError(f"{name}={value!r}, expected a precision > 0")
    return precision


def _refuse_too_many_samples(kernels: FlatKernels, likelihood: Likelihood, matrices: int) -> None:
    """Raise an error before anything large is allocated."""
    samples, outputs = likelihood.outputs.shape
    budget, rows = kernels.byte_budget(), samples * outputs
    needed = 8 * matrices * rows**2
    if needed > budget:
        fitting = int((budget / (8 * matrices)) ** 0.5) // outputs
        raise MemoryBudgetError(
            f"the posterior of {samples:,} samples with {outputs} outputs takes {matrices} matrices of {rows:,} x "
            f"{rows:,}, {readable_bytes(needed)}, expected at most {readable_bytes(budget)}; pass {fitting:,} samples "
            "or fewer, or raise memory=. Precisions fitted on fewer samples can be passed as prior="
        )
