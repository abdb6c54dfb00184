"""A stable learning rate for full-batch gradient descent, from the kernel and the curvature of the loss."""

import torch
from torch import Tensor, nn

from featlearn import losses
from featlearn.dynamics.rate import rate
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.krylov import top_eigenpairs
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, Readout
from featlearn.network.raw_outputs import raw_outputs
from featlearn.quantities.ntk import ntk
from featlearn.quantities.operator import NTKOperator
from featlearn.shapes import checked_number, describe
from featlearn.signatures import name_keywords
from featlearn.steer.output_scale import ScaledOutput

__all__ = ["safe_lr"]

SHARE = 0.25
"""Default fraction of the stability limit, since kernels grow in training."""
LARGEST_DENSE = 2048
"""Largest number of kernel rows for a dense eigenvalue computation."""
SWEEPS = 40
"""Largest number of products with the second derivative of a loss."""


@name_keywords()
def safe_lr(
    model: nn.Module,
    x: Inputs,
    y: Tensor | None = None,
    *,
    loss: losses.Loss,
    readout: Readout | None = None,
    output_scale: float | None = None,
    share: float = SHARE,
) -> float:
    """Compute a learning rate for plain SGD on the whole batch `x`: `share` of the stability limit 2 / (c k).

    k is the largest eigenvalue of the tangent kernel between all samples and outputs of x, c the largest second
    derivative of the loss in the outputs. Their product bounds the largest eigenvalue of the Gauss-Newton part of the
    loss's Hessian, J^T (d2 loss / df2) J; for the squared error it is that eigenvalue. Above 2 / (c k) gradient descent
    on the squared error of the linearized network diverges.

    The rate is for steps on all of x with the current weights, in eval mode. Kernels grow while features are learned;
    the default share, a quarter, allows growth by a factor of 4. With momentum m, multiply the rate by 1 - m. For
    mini-batches, pass a batch as x, and use a smaller share because of the noise. Adam and similar optimizers, whose
    steps do not scale with the gradient, need another rule.

    In a homogeneous network of L weight layers with outputs scaled by a < 1, weights grow until outputs are as large as
    the targets. The kernel then grows by about a^(-2 (L - 1) / L). The share is then multiplied by min(1, 4 a^(2 - 2 /
    L)).

    Args:
        model, x, readout: As for `fl.ntk`; `x` is the batch of one step.
        y: Targets, if `loss` is a function that needs them. The named losses do not.
        loss: Training loss: a name of `fl.losses`, a module, or a function of (outputs, y), or of the outputs alone if
            `y` is None. For `"cross-entropy"` c = 1 / P, twice the largest value of its second derivative; for
            `"bce"` c = 1 / (4 P C), the largest value. For a function, c is taken at the present outputs; c = 1 / P
            if its second derivative vanishes.
        output_scale: a, as above. By default the factor of `fl.steer.scale_output`, or 1. L
            weight layers multiplied by sigma (`fl.steer.scale_init`) have a = sigma^L.
        share: Fraction of the stability limit.
    """
    if not checked_number(share, "share") > 0:
        raise InputValueError(f"share={share!r}, expected a number > 0; 1 is the limit of stability")
    loss_name = losses.name(loss)
    if y is not None and not isinstance(y, Tensor):
        raise InputTypeError(f"y is {type(y).__name__}, expected a tensor of targets, or None")
    f = outputs_of(model, x, readout)
    largest = _largest_eigenvalue(model, x, readout, f.numel())
    if not largest > 0:
        raise InputValueError(
            "the tangent kernel of x is zero: no output depends on the weights, expected an output with a gradient; "
            "check the initial weights (two layers of zeros have no gradient)"
        )
    function = losses.function(loss)
    curvature = (
        loss_curvature(function, f, y) if loss_name is None else named_curvature(loss_name, len(f), f[0].numel())
    )
    return 2 * share * _growth_factor(model, output_scale) / (largest * curvature)


def _largest_eigenvalue(model: nn.Module, x: Inputs, readout: Readout | None, rows: int) -> float:
    """Return the largest eigenvalue of the kernel (P C, P C), or an upper bound if it is too large to form."""
    if rows <= LARGEST_DENSE:
        full = ntk(model, x, outputs="full", readout=readout).double()
        return float(torch.linalg.eigvalsh(full.transpose(1, 2).reshape(rows, rows))[-1])
    pair = NTKOperator(model, x, readout=readout).top(1)
    return float(pair.values[0] + pair.residuals[0])


def named_curvature(loss: losses.LossName, samples: int, outputs: int) -> float:
    """Return an upper bound of the second derivative of a named loss in the outputs."""
    # df/dt = -rate K (prediction(f) - y), and the slope of a sigmoid is at most 1/4
    return rate(1.0, loss, samples, outputs) * (0.25 if loss == "bce" else 1.0)


def outputs_of(model: nn.Module, x: Inputs, readout: Readout | None) -> Tensor:
    """Return outputs on x in eval mode, in the shape of the model or its readout."""
    outputs = raw_outputs(model, x, readout)
    if outputs.dim() not in (1, 2):
        raise InputValueError(f"the readout gives {describe(outputs)}, expected a tensor of shape (P,) or (P, C)")
    return outputs


def loss_curvature(loss: losses.LossFunction, outputs: Tensor, y: Tensor | None) -> float:
    """Return the largest eigenvalue of the second derivative of a loss; 1 / P where it has none above zero."""
    f = outputs.detach().requires_grad_(True)
    with torch.enable_grad():
        value = loss(f) if y is None else loss(f, y)  # type: ignore[call-arg]
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputTypeError(f"the loss gives {got}, expected a tensor with a single number and a gradient")
        (slope,) = torch.autograd.grad(value.reshape(()), f, create_graph=True)
    if not slope.requires_grad:
        return 1.0 / len(outputs)

    def product(block: Tensor) -> Tensor:
        columns = [torch.autograd.grad(slope, f, v.reshape(f.shape).to(f), retain_graph=True)[0] for v in block.mT]
        return torch.stack([column.reshape(-1) for column in columns], 1).to(block)

    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(f.numel(), min(f.numel(), 3), generator=generator, dtype=torch.float64).to(f.device)
    pairs = top_eigenpairs(product, start, 1, torch.finfo(f.dtype).eps ** 0.5, SWEEPS * start.shape[1])
    largest = float(pairs.values[0])
    return largest if largest > 0 else 1.0 / len(outputs)


def _growth_factor(model: nn.Module, output_scale: float | None) -> float:
    """Return the factor of the share that allows for kernel growth."""
    network = unwrapped(model)
    if output_scale is None:
        output_scale = network.factor if isinstance(network, ScaledOutput) else 1.0
    scale = checked_number(output_scale, "output_scale")
    if not scale > 0:
        raise InputValueError(f"output_scale={output_scale!r}, expected a number > 0")
    layers = max(1, sum(p.requires_grad and p.dim() > 1 for p in network.parameters()))
    return float(min(1.0, 4 * scale ** (2 - 2 / layers)))
