"""The kernel of a two-layer linear network, split into its parts (Shan & Bordelon 2021a, Sec. 5)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_numbers, checked_rows


@dataclass(frozen=True)
class TwoLayerFinalKernel:
    """The NTK of r(x) = V^T W x / N as a sum of three parts, each (P, P)."""

    task: Tensor
    """y y^T / |V|^2 with y = V^T W X / N, the outputs: after training the targets."""
    remainder: Tensor
    """X W_p^T W_p X / N^2, what of W is orthogonal to V: V^T W_p = 0."""
    isotropic: Tensor
    """|V|^2 X X^T / N^2"""
    readout_norm: Tensor
    """|V|^2"""

    @property
    def kernel(self) -> Tensor:
        """The whole NTK (Eq. 12, 13)."""
        return self.task + self.remainder + self.isotropic

    @property
    def approximation(self) -> Tensor:
        """Without the remainder (Eq. 14): right for small initial weights only, 0.3 % off at 0.05, 58 % at 1."""
        return self.task + self.isotropic

    def feature_rate(self, kernel_scale: Any) -> Tensor:
        """The OFE feature rate gamma of Eq. 14, alpha_K / |V|^4, for K0 = alpha_K X X^T / N^2 (`initial_kernel_scale`).

        Erratum: the print has alpha_K^2 / |V|^4, and alpha_K^-2 before K0.
        """
        return checked_numbers(kernel_scale, "kernel_scale", above=0.0) / self.readout_norm.square()


def two_layer_final_kernel(V: Tensor, W: Tensor, X: Tensor) -> TwoLayerFinalKernel:
    """Return the NTK of r(x) = V^T W x / N, V (N,) or (1, N), W (N, D), on X (P, D), in its three parts.

    See Shan & Bordelon 2021a, Eq. 11 to 14.

    Exact for any weights, with y the outputs they give. From small weights |V|^2 ends at N |s| for the teacher s:
    K = |s| / N X [s s^T / |s|^2 + 1] X^T, as in `final_ntk`, and the remainder vanishes. V = 0 has no such parts: nan.

    Erratum: Eq. 12 has x W W^T x' for x^T W^T W x'.
    """
    readout, first, rows = checked_finite(V, "V"), checked_finite(W, "W"), checked_rows(X)
    readout = readout[0] if readout.dim() == 2 and len(readout) == 1 else readout
    if first.dim() != 2 or readout.shape != first.shape[:1] or first.shape[1] != rows.shape[1]:
        raise InputValueError(
            f"V has shape {tuple(readout.shape)}, W {tuple(first.shape)} and X {tuple(rows.shape)}, expected (N,), "
            "(N, D) and (P, D)"
        )
    readout, rows, width = readout.to(first.device), rows.to(first.device), len(readout)
    size = readout.square().sum()
    outputs = rows @ (first.T @ readout) / width
    orthogonal = rows @ (first - torch.outer(readout, readout @ first) / size).T
    return TwoLayerFinalKernel(
        task=torch.outer(outputs, outputs) / size,
        remainder=orthogonal @ orthogonal.T / width**2,
        isotropic=size * (rows @ rows.T) / width**2,
        readout_norm=size,
    )


def initial_kernel_scale(N: Any, weight_variance: Any, readout_variance: Any) -> Tensor:
    """alpha_K = N (sigma_w^2 + sigma_v^2) of K0 = alpha_K X X^T / N^2, on average over the weights.

    See Shan & Bordelon 2021a, below Eq. 14.

    Entries of W are N(0, sigma_w^2), of V N(0, sigma_v^2). One network is near its average for few samples, P much
    below N: 8 % off at N = 1000 and P = 20, 39 % at N = 200 and P = 400.
    """
    variances = checked_numbers(weight_variance, "weight_variance", least=0.0) + checked_numbers(
        readout_variance, "readout_variance", least=0.0
    )
    return checked_numbers(N, "N", above=0.0) * variances
