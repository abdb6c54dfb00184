"""The early correlation of a wide quadratic network by free probability (Beaglehole et al. 2024, App. E, corrected)."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.early.symmetric import checked_data_matrices
from featlearn.theory.early.words import WordTraces


def free_probability(A: Tensor, B: Tensor, moments: Tensor) -> WordTraces:
    """tr(A R A R B R), tr(A R A R), tr(A R B R A R B R) for R free from A and B, with tr = Tr / d.

    See Beaglehole et al. 2024, Eq. 10 to 13, 16 to 18, 20, 22 to 26.

    The prediction of the early C-NFC of f = a^T (W x)^2 where width, input dimension and samples are large together:
    `.correlation`. `A` = (X^T L X)^2 and `B` = X^T X, both (d, d), come from `data_matrices`; `moments` (4,) or longer
    are r_m = tr R^m of R = W^T diag(a^2) W from `quadratic_moments` (or `sampled_quadratic_moments(...).value`). The
    traces are divided by the **input dimension** d; `exact_word_traces` gives them undivided, at finite size.

    Assumes that R is free from the data and that one network is like the average (Assumptions 5 to 7). Good to about
    0.01 for isotropic data at width = dimension = 512 and better at 1024; for spiked data single traces are off by 5 to
    26 percent there and the correlation much less. A single network scatters: the fourth moment varies by tens of
    percent even at 1024.

    Never above 1 for positive A and B and the moments of one positive measure.

    Errata: the last term of Eq. 26 is printed tr[Ab]^2 tr[B^2] r2^2, which vanishes identically (Ab is the centered A);
    it must be tr[B]^2 tr[Ab^2] r2^2. The printed formula gives correlations above 1. Eq. 17 has misprinted words in its
    first three terms and tr(R)^3 for tr(R^3) in its last; the trace is printed with 1/n. Eq. 18, Eq. 20 and the lemmas
    (10) to (13) are right.
    """
    first, second = checked_data_matrices(A, B)
    r = checked_finite(moments, "moments")
    if r.dim() != 1 or len(r) < 4:
        raise InputValueError(
            f"moments have shape {tuple(r.shape)}, expected (4,): tr R to tr R^4 from quadratic_moments(width, d, 4)"
        )
    return _traces(first, second, *r[:4].tolist())


def _traces(A: Tensor, B: Tensor, r1: float, r2: float, r3: float, r4: float) -> WordTraces:
    """Named as in the paper: a, b the traces of A and B, A and B centered from there on."""
    d = len(A)
    a, b = float(A.trace()) / d, float(B.trace()) / d
    identity = torch.eye(d, dtype=A.dtype, device=A.device)
    A, B = A - a * identity, B - b * identity
    both = A @ B
    aa, bb, ab = (float((left * right).sum()) / d for left, right in ((A, A), (B, B), (A, B)))
    # tr A^2 B, tr A B^2 and tr A B A B
    aab, abb, abab = (float((left * right).sum()) / d for left, right in ((A, both), (both, B), (both, both.T)))
    numerator = a**2 * b * r3 + 2 * a * r1 * r2 * ab + b * r1 * r2 * aa + r1**3 * aab
    den1 = aa * r1**2 + a**2 * r2
    den2 = (
        r1**4 * abab
        + 2 * r1**2 * (r2 - r1**2) * ab**2
        + 2 * r1**2 * r2 * (b * aab + a * abb)
        + 4 * a * b * r1 * r3 * ab
        + a**2 * b**2 * r4
        + (a**2 * bb + b**2 * aa) * r2**2
    )
    return WordTraces(numerator, den1, den2)
