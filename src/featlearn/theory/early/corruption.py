"""What random eigenvectors leave of the neural feature correlation (Beaglehole et al. 2024, Sec. 2.2, Fig. 1)."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, ratio
from featlearn.theory.arguments import checked_rows


def annealed_corruption(W: Tensor, spectrum: Tensor) -> Tensor:
    """rho(W^T W, W^T Q W) for Q with a given spectrum and random eigenvectors, averaged before the ratio is taken.

    `W` (k, d) is the weight of the layer, `spectrum` (k,) the eigenvalues of its PTK covariance K (k, k), as
    ``torch.linalg.eigvalsh(K)`` gives them; Q = O diag(spectrum) O^T with O uniform over rotations (Haar). This is the
    "corrupted AGOP" of Beaglehole et al. 2024, Fig. 1, which shows that the correlation of NFM and AGOP needs the
    eigenvectors of K.

    With M = W W^T, p1 = sum of the eigenvalues and p2 = sum of their squares, E[Q_ij Q_lm] is
    alpha d_ij d_lm + beta (d_il d_jm + d_im d_jl) with alpha k + beta (k^2 + k) = p2, alpha k^2 + 2 beta k = p1^2, and

        rho ~ (p1 / k) |M| / sqrt((alpha + beta) |M|^2 + beta (Tr M)^2).

    Close for mild spectra (0.9659 against 0.9676 sampled), too low where a few eigenvalues dominate (0.5376 against
    0.62): there draw Q and average. Neither the scale of W nor that of the spectrum matters. nan where W or the
    spectrum vanishes. Not in the paper, which draws one Q.
    """
    weight = checked_rows(W, "W")
    values = checked_finite(spectrum, "spectrum").to(weight.device)
    k = len(weight)
    if values.shape != (k,):
        raise InputValueError(
            f"spectrum has shape {tuple(values.shape)} and W {tuple(weight.shape)}, expected (k,) = ({k},): the "
            "eigenvalues of the (k, k) covariance of the PTK, not of the (n, n) kernel"
        )
    gram = weight @ weight.T
    first, second = values.sum(), values.square().sum()
    size = torch.linalg.matrix_norm(gram)
    # k = 1 has one number for Q, which beta, 0 / 0 there, does not describe
    beta = (second - first**2 / k) / ((k + 2) * (k - 1)) if k > 1 else torch.zeros_like(first)
    alpha = first**2 / k**2 - 2 * beta / k
    return ratio(first / k * size, ((alpha + beta) * size**2 + beta * gram.trace() ** 2).sqrt())
