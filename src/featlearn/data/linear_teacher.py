"""Targets of a linear teacher: the task of linear networks.

See Shan & Bordelon 2021a, 2021b and Atanasov et al. 2022.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featlearn.data.draws import (
    checked_count,
    checked_generator,
    checked_nonnegative,
    checked_spectrum,
    standard_normal,
)
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite

__all__ = ["LinearTeacher", "linear_teacher"]


@dataclass(frozen=True, eq=False)
class LinearTeacher:
    """x -> beta . x, for every row of beta.

    Attributes:
        weights: beta, shape (d,) or (C, d), float64.
    """

    weights: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., d) to (...) or (..., C), differentiably."""
        return x @ self.weights.to(x).mT if self.weights.dim() == 2 else x @ self.weights.to(x)


def linear_teacher(
    samples: int,
    dimension: int,
    outputs: int | None = None,
    *,
    inputs: Literal["gaussian", "sphere"] = "gaussian",
    weights: Tensor | None = None,
    spectrum: Tensor | None = None,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """Draw inputs and y = beta . x, with beta a random unit vector.

    The task of Shan & Bordelon 2021a, Fig. 3 and 4B; 2021b, Fig. 4; Atanasov et al. 2022, Fig. 3, C.2 and E.1.

    Args:
        samples: P.
        dimension: d.
        outputs: C > 1 for targets (P, C), each with a separate direction; None for a single target, (P,).
        inputs: ``"gaussian"``, N(0, diag(spectrum)); or ``"sphere"``, uniform on the unit sphere (Shan & Bordelon
            2021b, Fig. 4D). For inputs with an identity sample second moment, as in Atanasov et al. 2022, use
            ``fl.steer.whiten(task.x)``.
        weights: beta, (d,) or (C, d), not normalized; by default N(0, I) rows divided by their length, drawn after the
            inputs. ``weights=task.target.weights`` draws more samples of the same task.
        spectrum: Variances of the coordinates, (d,), ones by default.
        noise: Standard deviation of Gaussian noise on the targets, drawn last.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x and y.

    Returns:
        `x` (P, d), `y` (P,) or (P, C), and the exact `target`, `egop` = beta beta^T (its sum over targets) and
            `covariance`: diag(spectrum), or I / d on the sphere.
    """
    rows, columns = checked_count(samples, "samples"), checked_count(dimension, "dimension")
    if inputs not in ("gaussian", "sphere") or (inputs == "sphere" and spectrum is not None):
        raise InputValueError(f"inputs={inputs!r}, expected 'gaussian', or 'sphere' and no spectrum")
    if outputs is not None and checked_count(outputs, "outputs") == 1:
        raise InputValueError("outputs=1, expected None for a single target, (P,), or more than 1 for (P, C)")
    deviation = checked_nonnegative(noise, "noise")
    generator = checked_generator(generator)
    variances = checked_spectrum(spectrum, columns).to(generator.device)
    x = standard_normal(rows, columns, generator=generator)
    x = x / x.norm(dim=1, keepdim=True) if inputs == "sphere" else x * variances.sqrt()
    target = LinearTeacher(_directions(weights, outputs, columns, generator))
    clean = target(x)
    y = clean + deviation * standard_normal(*clean.shape, generator=generator) if deviation else clean
    betas = target.weights.reshape(-1, columns)
    covariance = torch.diag(variances / columns if inputs == "sphere" else variances)
    return Regression(x.to(dtype), y.to(dtype), target, betas.mT @ betas, covariance)


def _directions(weights: Tensor | None, outputs: int | None, dimension: int, generator: torch.Generator) -> Tensor:
    if weights is None:
        shape = (dimension,) if outputs is None else (outputs, dimension)
        drawn = standard_normal(*shape, generator=generator)
        unit: Tensor = drawn / drawn.norm(dim=-1, keepdim=True)
        return unit
    teacher = checked_finite(weights, "weights").to(generator.device)
    single = teacher.shape == (dimension,)
    multiple = teacher.dim() == 2 and teacher.shape[1] == dimension and len(teacher) > 1
    if not (single or multiple) or (outputs is not None and teacher.shape != (outputs, dimension)):
        expected = f"(d,) = ({dimension},) or (C, d) with C > 1" if outputs is None else f"({outputs}, {dimension})"
        raise InputValueError(f"weights have shape {tuple(teacher.shape)}, expected {expected}")
    return teacher
