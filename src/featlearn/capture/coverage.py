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


def audited(snapshot: Snapshot, generator: torch.Generator, *, coupling: bool = True) -> Audit:
    """Check every reading against autograd, and every sample against smaller batches; raise if samples are coupled.

    Without `coupling` only the readings are checked.
    """
    outputs, names = snapshot.outputs, list(snapshot.access)
    direction = _gaussian(1, outputs.shape[1], generator=generator).to(outputs)
    weights = _gaussian(snapshot.count, generator=generator).to(outputs)
    padded = torch.cat([weights, weights.new_zeros(len(outputs) - snapshot.count)])  # the copy of a single sample
    expected = _expected(snapshot, names, outputs, padded[:, None] * direction)
    readable = [name for name in names if snapshot.access[name].refusal is None]
    failed = _failing(snapshot, readable, direction, weights, expected)
    snapshot.distrust(failed)
    pairs = [(g.detach(), snapshot.parameters[name].detach()) for name, g in expected.items() if g is not None]
    terms = [float((g * p).norm()) for g, p in pairs]
    rounding = math.hypot(*(term for term in terms if math.isfinite(term)), 0.0)
    largest = max((float(g.abs().max()) for g, _ in pairs if g.numel()), default=0.0)
    del expected, pairs
    for drawn in draws(snapshot.count, generator, thorough=True) if coupling else ():
        _refuse_coupled_gradients(snapshot, drawn, direction, weights, rounding)
    return Audit(failed, rounding, largest)


def disputed(snapshot: Snapshot, names: list[str], generator: torch.Generator) -> dict[str, str]:
    """Which of these parameters have readings that do not agree with autograd on this chunk, and why."""
    outputs = snapshot.outputs
    direction = _gaussian(1, outputs.shape[1], generator=generator).to(outputs)
    weights = _gaussian(len(outputs), generator=generator).to(outputs)
    weights[snapshot.count :] = 0.0  # the copy of a single sample
    expected = _expected(snapshot, names, outputs, weights[:, None] * direction)
    return _failing(snapshot, names, direction, weights[: snapshot.count], expected)


def _expected(snapshot: Snapshot, names: list[str], outputs: Tensor, cotangent: Tensor) -> dict[str, Tensor | None]:
    """Autograd's own gradients."""
    gradients = backward([outputs], [snapshot.parameters[name] for name in names], [cotangent]) if names else ()
    return dict(zip(names, gradients, strict=True))


def _failing(
    snapshot: Snapshot, names: list[str], direction: Tensor, weights: Tensor, expected: Mapping[str, Tensor | None]
) -> dict[str, str]:
    """Parameters whose rules fail or disagree with autograd, with the reason."""
    failed: dict[str, str] = {}
    try:
        checks = _compared(snapshot, names, direction, weights, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # Some rule fails, perhaps the user's: find it, one parameter at a time.
        checks = []
        for name in names:
            try:
                checks += _compared(snapshot, [name], direction, weights, expected)
            except Exception as error:
                failed[name] = f"the rules for {_nodes(snapshot, name)} fail: {type(error).__name__}: {error}"
    for name in _differing(checks, snapshot):
        failed[name] = f"the rules for {_nodes(snapshot, name)} disagree with autograd"
    return failed


def _refuse_coupled_gradients(
    snapshot: Snapshot, drawn: Tensor, direction: Tensor, weights: Tensor, rounding: float
) -> None:
    """The same samples in another batch must have the same outputs and the same gradients."""
    again = snapshot.probe.outputs(snapshot.indices[drawn])
    refuse_difference(snapshot, again.detach(), drawn, rounding)
    names = list(snapshot.access)
    if not again.requires_grad or not names:
        return
    chosen = weights[drawn.to(weights.device)]
    expected = _expected(snapshot, names, again, chosen[:, None] * direction)
    counted = torch.zeros_like(weights).index_add(0, drawn.to(weights.device), chosen)
    checks = _compared(snapshot, names, direction, counted, expected)
    # Another batch takes other code paths, whose rounding shows where the terms of a gradient cancel.
    for name in _differing(checks, snapshot, cancelling=64.0):
        doubt = (
            "" if again.dtype == torch.float64 else ". If they do not, rounding is amplified: try dtype=torch.float64"
        )
        raise CoupledSamplesError(
            f"the gradient of {name} for a sample depends on the other samples of its batch, though the outputs do "
            f"not; expected samples that do not influence each other, in a backward pass as in a forward pass{doubt}"
        )


Check = tuple[str, float, float]
"""A parameter, by how much sum_i w_i g_i differs from what autograd gives, and how large its terms are."""


def _compared(
    snapshot: Snapshot, names: list[str], direction: Tensor, weights: Tensor, expected: Mapping[str, Tensor | None]
) -> list[Check]:
    checks = []
    for name, gradients in snapshot.each_gradient(names, direction):
        total, size = _weighted_sum(gradients, weights)
        reference = _flat(expected[name], total)
        length = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
        if math.isfinite(length):  # otherwise the kernel will not be finite either, and is refused for that
            difference = float(torch.linalg.vector_norm(total - reference, dtype=torch.float64))
            checks.append((name, difference, size + length))
    return checks


def _differing(checks: list[Check], snapshot: Snapshot, cancelling: float = 2.0) -> Iterator[str]:
    """Parameters that do not agree.

    `cancelling`: units of rounding, of the whole gradient, that may be left where the terms of one parameter cancel.
    """
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


def _weighted_sum(gradients: Gradients, weights: Tensor) -> tuple[Tensor, float]:
    """sum_i w_i g_i, and a bound of its size before anything cancels."""
    if isinstance(gradients, Dense):
        terms = weights.to(gradients.gradient)[:, None] * gradients.gradient[:, 0]
        return terms.sum(0), float(torch.linalg.vector_norm(terms, dim=1, dtype=torch.float64).sum())
    parts, size = [], 0.0
    for part in gradients.parts:
        grads = part.grads * weights.to(part.grads)[:, None, None, None]
        lengths = torch.linalg.vector_norm(grads[0], dim=-1, dtype=torch.float64)
        if not part.indexed:
            lengths = lengths * torch.linalg.vector_norm(part.rows, dim=-1, dtype=torch.float64)
        size += float(lengths.sum())
        # Samples become positions of one sample: their sum.
        parts.append(replace(part, rows=part.rows.flatten(0, 1)[None], grads=grads.flatten(1, 2)[:, None]))
    return as_dense(replace(gradients, parts=tuple(parts))).gradient[0, 0], size


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.detach().flatten().to(like)
