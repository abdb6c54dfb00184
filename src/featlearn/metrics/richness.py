"""Richness from a single forward or backward pass, as a complement to the linearization gap."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_tensor, deviations, ratio, rounding, scaled


def low_rank_richness(features: Tensor, outputs: Tensor) -> Tensor:
    """Compute 1 - CKA of last-layer features with the projector on the span of the outputs (Nam et al. 2024, D_LR).

    0 if the features contain only the learned outputs, with equal weight (rich; neural collapse is the case of one-hot
    outputs). Near 1 if they contain much more (lazy). No labels are needed.

    Args:
        features: (P, N) or (P, ...), inputs of the last layer, with the sample axis first; flattened.
        outputs: (P, C) or (P,), outputs of the network.

    Both are centered over samples. nan if either is constant.
    """
    phi, f = checked_tensor(features, "features"), checked_tensor(outputs, "outputs")
    if phi.dim() < 2 or f.dim() not in (1, 2) or len(phi) != len(f) or len(f) < 2:
        raise InputValueError(
            f"features have shape {tuple(phi.shape)} and outputs {tuple(f.shape)}, expected (P, N) and (P, C) for the "
            "same P >= 2 samples"
        )
    precision = max(rounding(features), rounding(outputs))
    phi = deviations(scaled(phi.flatten(1), (0, 1))[0], (0,))
    f = deviations(scaled(f.reshape(len(f), -1).to(phi.device), (0, 1))[0], (0,))
    basis, sizes, _ = torch.linalg.svd(f, full_matrices=False)
    spanned = sizes > len(f) * precision * sizes.max()
    inside = (basis[:, spanned].T @ phi).square().sum()  # tr of U^T K U, K = phi phi^T
    gram = phi.T @ phi if phi.shape[1] < len(phi) else phi @ phi.T
    return 1 - ratio(inside, gram.norm() * spanned.sum().double().sqrt())


def features_at_convergence(weight: Tensor, gradient: Tensor) -> Tensor:
    """Compute the cosine of W^T W and -W^T dL/dW: 1 once training with weight decay has converged (arXiv 2507.05644).

    At a stationary point of L + decay / 2 |W|^2, W = -dL/dW / decay: the weights depend on the data only. A lazily
    trained layer keeps its initial weights, and the cosine is small.

    Args:
        weight: (outputs, inputs, ...), flattened after its first axis.
        gradient: dL/dW of the loss without decay, of the same shape.
    """
    w, g = checked_tensor(weight, "weight"), checked_tensor(gradient, "gradient")
    if w.dim() < 2 or w.shape != g.shape:
        raise InputValueError(
            f"weight has shape {tuple(w.shape)} and gradient {tuple(g.shape)}, expected equal shapes of a matrix"
        )
    w, g = (scaled(t.flatten(1), (0, 1))[0] for t in (w, g.to(w.device)))
    # Inner products of W^T W and W^T G through the smaller Gram matrices.
    left, right, mixed = w @ w.T, g @ g.T, w @ g.T
    return ratio(-(left * mixed).sum(), left.norm() * (left * right).sum().clamp_min(0).sqrt())
