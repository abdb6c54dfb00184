"""The assumption that gates and weighted features of different samples are uncorrelated.

See Shan & Bordelon 2021b, App. D.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, ratio


class Ansatz(NamedTuple):
    """How well Shan & Bordelon 2021b, Eq. 59 holds in a network."""

    measured: Tensor
    """Q = sum_i D_i^mu V_i phi_i^nu, (..., P, P)"""
    predicted: Tensor
    """f_nu / 2 off the diagonal, f_mu on it, (..., P, P)"""
    slope: Tensor
    """Of the measured Q_mu nu on f_nu, mu != nu, least squares through 0; 1/2 is expected."""
    correlation: Tensor
    """Pearson, of the same numbers; nan where either is constant."""


def ansatz(D: Tensor, V: Tensor, phi: Tensor) -> Ansatz:
    """sum_i D_i^mu V_i phi_i^nu against f_nu / 2, for gates D and features phi (P, M) and readout V (M,).

    See Shan & Bordelon 2021b, Eq. 59.

    V may be (C, M), as in nn.Linear; then every result has C first. D is 1 where a unit is on at a sample, 0 where off.
    Holds best for orthogonal samples; at the sizes of Shan & Bordelon 2021b the slope is 0.48 to 0.50 early and 0.41 to
    0.45 late. One sample has no pair: nan.
    """
    gates, features, readout = (checked_finite(value, name) for value, name in ((D, "D"), (phi, "phi"), (V, "V")))
    if gates.dim() != 2 or features.shape != gates.shape or readout.dim() not in (1, 2):
        raise InputValueError(
            f"D has shape {tuple(gates.shape)}, V {tuple(readout.shape)} and phi {tuple(features.shape)}, expected "
            "(P, M), (M,) or (C, M), and (P, M)"
        )
    if readout.shape[-1] != gates.shape[1]:
        raise InputValueError(f"V has shape {tuple(readout.shape)}, expected {gates.shape[1]} units as D and phi have")
    readout, features = readout.to(gates.device), features.to(gates.device)
    measured = gates @ (readout[..., None, :] * features).mT
    outputs = readout @ features.T  # (..., P)
    apart = ~torch.eye(len(gates), dtype=torch.bool, device=gates.device)
    pairs, values = measured[..., apart], outputs[..., None, :].expand_as(measured)[..., apart]
    slope = ratio((pairs * values).sum(-1), values.square().sum(-1))
    pairs, values = pairs - pairs.mean(-1, keepdim=True), values - values.mean(-1, keepdim=True)
    correlation = ratio((pairs * values).sum(-1), pairs.norm(dim=-1) * values.norm(dim=-1))
    return Ansatz(measured, expected_overlaps(outputs), slope, correlation)


def expected_overlaps(outputs: Tensor) -> Tensor:
    """f_nu / 2 for mu != nu, f_nu for mu = nu: (..., P, P)."""
    eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return outputs[..., None, :] * (1 + eye) / 2
