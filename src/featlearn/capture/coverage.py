"""An audit of every reading: per-sample gradients, weighted and summed, against autograd's own gradient.

The weights differ from sample to sample, so a gradient that is complete but ascribed to the wrong samples is found as
well as a use that was missed or a rule that is wrong. A parameter whose readings fail goes to the fallback. The same
comparison in batches that hold only some of the samples finds samples that influence each other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.capture.coupling import draws, refuse_difference
from featlearn.capture.graph import backward
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import CoupledSamplesError
from featlearn.linalg.factors import Dense, Gradients, as_dense


@dataclass(frozen=True)
class Audit:
    """What the audit of a pilot found."""

    distrusted: Mapping[str, str]
    """Parameters whose readings do not agree with autograd, with the reason."""
    rounding: float
    """How large the terms are that outputs are made of: they may cancel, their rounding does not."""
    largest: float
    """The largest entry of a gradient."""


def audited(snapshot: Snapshot, generator: torch.Generator) -> Audit:
    """Check every reading against autograd, and every sample against smaller batches; raise if samples are coupled."""
    outputs, names = snapshot.outputs, list(snapshot.access)
    direction = _gaussian(1, outputs.shape[1], generator=generator).to(outputs)
    weights = _gaussian(snapshot.count, generator=generator).to(outputs)
    padded = torch.cat([weights, weights.new_zeros(len(outputs) - snapshot.count)])  # the copy of a single sample
    parameters = [snapshot.parameters[name] for name in names]
    gradients = backward([outputs], parameters, [padded[:, None] * direction]) if names else ()
    expected = dict(zip(names, gradients, strict=True))
    readable = [name for name in names if snapshot.access[name].refusal is None]
    found, failed = _agreeing(snapshot, readable, direction, weights, expected)
    snapshot.distrust(failed)
    terms = [
        float((g.detach() * p.detach()).norm())
        for g, p in zip(expected.values(), parameters, strict=True)
        if g is not None
    ]
    rounding = math.hypot(*(term for term in terms if math.isfinite(term)), 0.0)
    found |= snapshot.gradients([name for name in names if name not in found], direction)
    for drawn in draws(snapshot.count, generator, thorough=True):
        _refuse_coupled_gradients(snapshot, drawn, direction, weights, found, rounding)
    largest = max((float(g.detach().abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
    return Audit(failed, rounding, largest)


def disputed(snapshot: Snapshot, names: list[str], generator: torch.Generator) -> dict[str, str]:
    """Which of these parameters have readings that do not agree with autograd on this chunk, and why."""
    outputs = snapshot.outputs
    direction = _gaussian(1, outputs.shape[1], generator=generator).to(outputs)
    weights = _gaussian(len(outputs), generator=generator).to(outputs)
    weights[snapshot.count :] = 0.0  # the copy of a single sample
    gradients = backward([outputs], [snapshot.parameters[name] for name in names], [weights[:, None] * direction])
    expected = dict(zip(names, gradients, strict=True))
    return _agreeing(snapshot, names, direction, weights[: snapshot.count], expected)[1]


def _agreeing(
    snapshot: Snapshot, names: list[str], direction: Tensor, weights: Tensor, expected: Mapping[str, Tensor | None]
) -> tuple[dict[str, Gradients], dict[str, str]]:
    """Readings that agree with autograd, and the reasons against the others."""
    found, failed = _readings(snapshot, names, direction)
    for name in list(_differing(found, weights, expected, snapshot)):
        failed[name] = f"the rules for {_nodes(snapshot, name)} disagree with autograd"
        del found[name]
    return found, failed


def _refuse_coupled_gradients(
    snapshot: Snapshot, drawn: Tensor, direction: Tensor, weights: Tensor, found: Mapping[str, Gradients],
    rounding: float,
) -> None:  # fmt: skip
    """The same samples in another batch must have the same outputs and the same gradients."""
    again = snapshot.probe.outputs(snapshot.indices[drawn])
    refuse_difference(snapshot, again.detach(), drawn, rounding)
    names = list(found)
    if not again.requires_grad or not names:
        return
    chosen = weights[drawn.to(weights.device)]
    gradients = backward([again], [snapshot.parameters[name] for name in names], [chosen[:, None] * direction])
    counted = torch.zeros_like(weights).index_add(0, drawn.to(weights.device), chosen)
    expected = dict(zip(names, gradients, strict=True))
    # Another batch takes other code paths, whose rounding shows where the terms of a gradient cancel.
    for name in _differing(found, counted, expected, snapshot, cancelling=64.0):
        doubt = (
            "" if again.dtype == torch.float64 else ". If they do not, rounding is amplified: pass dtype=torch.float64"
        )
        raise CoupledSamplesError(
            f"the gradient of {name} for a sample depends on the other samples of its batch, though the outputs do "
            f"not; expected samples that do not influence each other, in a backward pass as in a forward pass{doubt}"
        )


def _differing(
    found: Mapping[str, Gradients], weights: Tensor, expected: Mapping[str, Tensor | None], snapshot: Snapshot,
    cancelling: float = 2.0,
) -> Iterator[str]:  # fmt: skip
    """Parameters for which sum_i w_i g_i is not what autograd gives.

    `cancelling`: units of rounding, of the whole gradient, that may be left where the terms of one parameter cancel.
    """
    checks = []
    for name, gradients in found.items():
        total, size = _weighted_sum(gradients, weights)
        reference = _flat(expected[name], total)
        if not math.isfinite(float(reference.norm())):
            continue  # the kernel will not be finite either, and is refused for that
        difference = float((total.double() - reference.double()).norm())
        checks.append((name, difference, size + float(reference.double().norm())))
    whole = sum(size for _, _, size in checks if math.isfinite(size))
    for name, difference, size in checks:
        # Half of the digits. Gradients that vanish but for rounding (a bias in front of a mean that is taken away) may
        # disagree in all digits.
        precision = snapshot.precision_of(name)
        if not difference <= min(0.05, precision**0.5) * size + min(0.02, cancelling * precision) * whole:
            yield name


def _gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


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
    if isinstance(gradients, Dense):
        terms = weights.to(gradients.gradient)[:, None] * gradients.gradient[:, 0]
        return terms.sum(0), float(terms.double().norm(dim=1).sum())
    parts, size = [], 0.0
    for part in gradients.parts:
        grads = part.grads * weights.to(part.grads)[:, None, None, None]
        lengths = grads[0].double().norm(dim=-1)
        size += float((lengths if part.indexed else lengths * part.rows.double().norm(dim=-1)).sum())
        # Samples become positions of one sample: their sum.
        parts.append(replace(part, rows=part.rows.flatten(0, 1)[None], grads=grads.flatten(1, 2)[:, None]))
    return as_dense(replace(gradients, parts=tuple(parts))).gradient[0, 0], size


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.detach().flatten().to(like)
