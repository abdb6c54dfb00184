"""Random inputs with random labels (Shan & Bordelon 2021b, Fig. 6)."""

from typing import Literal

import torch

from featlearn.data.draws import checked_count, checked_generator, standard_normal
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError

__all__ = ["random_labels"]


def random_labels(
    samples: int,
    dimension: int,
    *,
    inputs: Literal["gaussian", "orthonormal"] = "gaussian",
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """Draw inputs of length about 1 and independent targets, -1 or +1 with probability 1/2.

    See Shan & Bordelon 2021b, App. E.4, Fig. 6.

    Args:
        samples: P; 100 in the paper.
        dimension: d; 1000 in the paper.
        inputs: ``"gaussian"``, N(0, I / d). The paper prints N(0, 1 / sqrt(d) I), read here as the standard deviation:
            as a variance it would make |x|^2 = sqrt(d). Or ``"orthonormal"``, x . x' = 0 and |x| = 1 exactly, as the
            theory `fl.theory.relu` assumes (needs P <= d), uniform over rotations.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x and y.

    Returns:
        `x` (P, d), `y` (P,), and `covariance` I / d, of one sample, for both kinds. There is no target function.
    """
    rows, columns = checked_count(samples, "samples"), checked_count(dimension, "dimension")
    if inputs not in ("gaussian", "orthonormal") or (inputs == "orthonormal" and rows > columns):
        raise InputValueError(
            f"inputs={inputs!r} with samples={rows} and dimension={columns}, expected 'gaussian', or 'orthonormal' and "
            "samples <= dimension"
        )
    generator = checked_generator(generator)
    x = standard_normal(rows, columns, generator=generator)
    if inputs == "orthonormal":
        q, r = torch.linalg.qr(x.mT)
        x = (q * r.diagonal().sign()).mT.contiguous()  # the signs make the rotation uniform
    else:
        x = x / columns**0.5
    y = 2 * torch.randint(2, (rows,), generator=generator, device=generator.device).to(x) - 1
    covariance = torch.eye(columns, dtype=torch.float64, device=x.device) / columns
    return Regression(x.to(dtype), y.to(dtype), covariance=covariance)
