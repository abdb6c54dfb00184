"""An audit of every reading: per-sample gradients, weighted and summed, against autograd's own gradient.

The weights differ from sample to sample, so a gradient that is complete but ascribed to the wrong samples is found as
well as a use that was missed or a rule that is wrong. A parameter whose readings fail goes to the fallback.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.capture.graph import backward
from featlearn.capture.snapshot import Snapshot
from featlearn.linalg.factors import Dense, Gradients, as_dense


def disputed(snapshot: Snapshot, generator: torch.Generator) -> dict[str, str]:
    """Parameters whose readings do not agree with autograd, with the reason."""
    names = [name for name, access in snapshot.access.items() if access.refusal is None]
    if not names:
        return {}
    outputs = snapshot.outputs
    direction = torch.randn(1, outputs.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    weights = torch.randn(len(outputs), 1, generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    if snapshot.count == 1:
        weights[1:] = 0.0  # the copy of a single sample
    expected = backward([outputs], [snapshot.parameters[name] for name in names], [weights * direction])
    found, failed = _readings(snapshot, names, direction)
    checks = []
    for name, gradient in zip(names, expected, strict=True):
        if name in found and gradient is not None:
            total, size = _weighted_sum(found[name], weights)
            reference = _flat(gradient, total)
            checks.append((name, float((total - reference).norm()), size + float(reference.norm())))
    slack = min(0.1, 1e4 * snapshot.precision)
    # Gradients that vanish but for rounding (a bias in front of a mean that is taken away) may disagree in all digits.
    floor = snapshot.precision * sum(size for _, _, size in checks if math.isfinite(size))
    for name, difference, size in checks:
        if not difference <= slack * size + floor:
            failed[name] = f"the rules for {_nodes(snapshot, name)} disagree with autograd"
    return failed


def _nodes(snapshot: Snapshot, name: str) -> str:
    return ", ".join(sorted(set(snapshot.access[name].uses.nodes)))


def _readings(snapshot: Snapshot, names: list[str], direction: Tensor) -> tuple[dict[str, Gradients], dict[str, str]]:
    """What the rules give, and those that fail, found one by one when all together fail."""
    try:
        return snapshot.gradients(names, direction), {}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if len(names) == 1:
            reason = f"the rules for {_nodes(snapshot, names[0])} fail: {type(error).__name__}: {error}"
            return {}, {names[0]: reason}
    found: dict[str, Gradients] = {}
    failed: dict[str, str] = {}
    for name in names:
        one, none = _readings(snapshot, [name], direction)
        found |= one
        failed |= none
    return found, failed


def _weighted_sum(gradients: Gradients, weights: Tensor) -> tuple[Tensor, float]:
    """sum_i w_i g_i, and a bound of its size before anything cancels."""
    weights = weights[: gradients.samples, 0]
    if isinstance(gradients, Dense):
        terms = weights.to(gradients.gradient)[:, None] * gradients.gradient[:, 0]
        return terms.sum(0), float(terms.norm(dim=1).sum())
    parts, size = [], 0.0
    for part in gradients.parts:
        grads = part.grads * weights.to(part.grads)[:, None, None, None]
        lengths = grads[0].norm(dim=-1)
        size += float((lengths if part.indexed else lengths * part.rows.norm(dim=-1)).sum())
        # Samples become positions of one sample: their sum.
        parts.append(replace(part, rows=part.rows.flatten(0, 1)[None], grads=grads.flatten(1, 2)[:, None]))
    return as_dense(replace(gradients, parts=tuple(parts))).gradient[0, 0], size


def _flat(gradient: Tensor, like: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().flatten().to(like)
