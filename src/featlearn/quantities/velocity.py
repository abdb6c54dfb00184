"""Derivatives of the tangent kernel under gradient flow.

dK/dt = J' J^T + J J'^T with J' the derivative of J along the weights' velocity. J' is the Jacobian of another network:
the one whose outputs are J v, the outputs' velocity under a fixed velocity v of the weights. So the kernel of the two
networks side by side holds everything, and is measured like any other.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.errors import InputValueError
from featlearn.losses import Loss, gradient
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.network.inputs import Inputs, Readout, call_model, read_output
from featlearn.network.state import Inventory
from featlearn.quantities.ntk import ntk
from featlearn.quantities.second_derivatives import inner_product, refuse_hidden_changes
from featlearn.shapes import checked_tensor
from featlearn.signatures import name_keywords


@name_keywords()
def ntk_velocity(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: Loss = "sum-half",
    outputs: str = "mean",
    **settings: Unpack[Settings],
) -> Tensor:
    """Compute dK/dt of the tangent kernel under gradient flow on (x, y) with learning rate 1.

    See Shan & Bordelon 2021a, Sec. 2.2. An exact derivative, by automatic differentiation of second order.

    Where activations have kinks (ReLU) a kernel also jumps whenever a gate switches, and no derivative contains the
    jumps. Over one large step of a ReLU network the measured change can differ from this by more than its size.

    Args:
        model, x: As for `fl.ntk`.
        y: Targets of shape (P,) or (P, C), as the outputs; for cross-entropy classes (P,), one-hot rows or
            probabilities.
        loss: Loss whose gradient the weights follow: a name of `fl.losses`, a module, or a function of (outputs, y).
        outputs: `"mean"` or `"sum"` for (P, P), `"each"` for (C, P, P), `"full"` for (P, P, C, C).
        **settings: As for `fl.ntk`, in the model's own precision and without a `group`.

    Raises:
        UnsupportedModelError: If gradients change with the weights in a way that autograd does not see: behind
            `detach`, a straight-through estimator, or a surrogate backward pass.
    """
    return ntk_velocity_of(AuditedModel(model, **settings), y, x=x, loss=loss, outputs=outputs)


def ntk_velocity_of(
    audited: AuditedModel,
    y: Tensor,
    *,
    x: Inputs | None = None,
    loss: Loss = "sum-half",
    outputs: str = "mean",
) -> Tensor:
    """Compute dK/dt under gradient flow: see `fl.quantities.ntk_velocity`."""
    if outputs not in ("mean", "sum", "each", "full"):
        raise InputValueError(f"outputs={outputs!r}, expected 'mean', 'sum', 'each' or 'full'")
    x = audited.paired(audited.inputs(x))
    velocity, _ = _weight_velocity(audited, x, y, loss)
    moving = _Moving(audited.model, audited.request.readout, velocity)
    names = [f"model.{name}" for name in velocity]
    both = ntk(moving, {"x": x}, outputs="full", parameters=names, memory=audited.request.memory)
    refuse_hidden_changes(audited, x)
    classes = both.shape[-1] // 2
    half = both[:, :, classes:, :classes]  # J' J^T, outputs (c, c')
    full = half + half.permute(1, 0, 3, 2)
    if outputs == "full":
        return full
    each = torch.einsum("pqcc->cpq", full)
    return each.contiguous() if outputs == "each" else each.sum(0) / (classes if outputs == "mean" else 1)


@name_keywords()
def feature_speed(
    model: nn.Module, x: Inputs, y: Tensor, *, loss: Loss = "sum-half", **settings: Unpack[Settings]
) -> float:
    """Compute how much faster the features grad f change than the error |f - y|, each relative to its size.

    See Atanasov et al. 2022, Eq. 86 to 89.

    The ratio is |dJ/dt| / |J| divided by -d log |f - y| / dt under the gradient flow of |f - y|^2 / 2, with norms over
    all samples and outputs: |J'| |f - y|^2 / (|J| |J^T (f - y)|^2), which no learning rate enters. At 1, features
    change by their own size while the error falls by a factor of e. Far below 1 the network is lazy (after Chizat); at
    1 and above it learns features while it fits. On 50 digits, two layers of torch's default initialization have 0.8
    at width 100 and 0.03 at width 4000. For an L-homogeneous network with outputs near zero it grows as sigma^-L with
    the scale of its initialization, and in proportion to a divisor of the output. The result is nan where the loss has
    no gradient. Models are rejected as by `fl.quantities.ntk_velocity`.

    Erratum: this is the right-hand side of Eq. 88. The left-hand side divides by |dL/dt| / L, the rate of the loss and
    not of the error, and is half of it: Eq. 87 is the speed of L = |f - y|^2 / 2, Eq. 88 puts |f - y|^2 for L.

    Args:
        model, x: As for `fl.ntk`.
        y: Targets, as for `fl.quantities.ntk_velocity`.
        loss: Training loss. All squared errors give the same number. For another loss L, the error is sqrt(L).
        **settings: As for `fl.quantities.ntk_velocity`.
    """
    return feature_speed_of(AuditedModel(model, **settings), y, x=x, loss=loss)


def feature_speed_of(audited: AuditedModel, y: Tensor, *, x: Inputs | None = None, loss: Loss = "sum-half") -> float:
    """Compute how much faster features change than the error: see `fl.quantities.feature_speed`."""
    x = audited.paired(audited.inputs(x))
    velocity, error = _weight_velocity(audited, x, y, loss)
    moving = _Moving(audited.model, audited.request.readout, velocity)
    names = [f"model.{name}" for name in velocity]
    kernels = ntk(moving, {"x": x}, outputs="each", parameters=names, memory=audited.request.memory)
    sizes = kernels.diagonal(dim1=1, dim2=2).sum(1).double()
    refuse_hidden_changes(audited, x)
    classes = len(sizes) // 2
    slope = sum(float(inner_product(v, v)) for v in velocity.values())
    if slope == 0.0 or float(sizes[:classes].sum()) == 0.0:
        return float("nan")
    growth = (sizes[classes:].sum() / sizes[:classes].sum()).sqrt()
    return float(growth) * 2 * error / slope


def _weight_velocity(audited: AuditedModel, x: Inputs, y: Any, loss: Loss) -> tuple[dict[str, Tensor], float]:
    """Return dtheta/dt = -grad loss by parameter, and the value of the loss."""
    audited.request.refuse("ntk_velocity and feature_speed", "group")
    dtype = audited.request.dtype
    if dtype is not None and Inventory(audited.model).needs_copy(dtype):
        raise InputValueError(
            f"dtype={dtype}, expected the model's own precision for ntk_velocity and feature_speed; convert the model "
            "itself, model.double(), and measure that"
        )
    with audited.measuring([x]) as measurement:
        (batch,) = measurement.batches
        outputs = measurement.outputs(batch)
        checked_tensor(y, "y")
        value, slope = gradient(loss, outputs, y.to(outputs.dtype) if y.is_floating_point() else y)
        return measurement.pulled_back(batch, -slope), float(value)


class _Moving(nn.Module):
    """A network beside the velocity of its outputs: (P, 2C), f and J v."""

    def __init__(self, model: nn.Module, readout: Readout | None, velocity: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self._readout, self._velocity = readout, velocity

    def forward(self, x: Inputs) -> Tensor:
        """Return (f, J v) for the inputs of the model."""
        # J v is the derivative of w^T J v with respect to w. Forward mode gives it in one pass, but lacks many ops.
        named = dict(self.model.named_parameters())
        names = list(self._velocity)
        with ElementaryOps():
            f = self._read(call_model(self.model, x), x)
        w = torch.zeros_like(f, requires_grad=True)
        pulled = torch.autograd.grad(f, [named[n] for n in names], w, create_graph=True, allow_unused=True)
        terms = [inner_product(g, self._velocity[n]) for n, g in zip(names, pulled, strict=True) if g is not None]
        (moved,) = torch.autograd.grad(torch.stack(terms).sum(), w, create_graph=True)
        return torch.cat([f, moved], 1)

    def _read(self, raw: Any, x: Inputs) -> Tensor:
        outputs: Tensor = read_output(raw, x, self._readout)
        return outputs[:, None] if outputs.dim() == 1 else outputs
