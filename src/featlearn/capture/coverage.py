"""An audit of every reading: per-sample gradients, weighted and summed, against autograd's own gradient.

The weights differ from sample to sample, so a gradient that is complete but ascribed to the wrong samples is found as
well as a use that was missed or a rule that is wrong. A parameter whose readings fail goes to the fallback. The same
comparison in batches that hold only some of the samples finds samples that influence each other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.capture.coupling import draws, refuse_difference
from featlearn.capture.graph import backward
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import CoupledSamplesError
from featlearn.linalg.factors import Dense, Factor, Gradients, as_dense
from featlearn.linalg.windows import Windows


@dataclass(frozen=True)
class Audit:
    """What the audit of a pilot found."""

    distrusted: Mapping[str, str]
    """Parameters whose readings do not agree with autograd, with the reason."""
    rounding: float
    """How large the terms are that outputs are made of: they may cancel, their rounding does not."""
    largest: float
    """The largest entry of a gradient."""
    vanishing: bool
    """Whether all of some parameter's gradients are zero, so that nothing was seen of its readings."""


def audited(snapshot: Snapshot, generator: torch.Generator, *, coupling: bool = True) -> Audit:
    """Check every reading against autograd, and every sample against smaller batches; raise if samples are coupled.

    Without `coupling` only the readings are checked.
    """
    outputs, names = snapshot.outputs, list(snapshot.access)
    direction = _gaussian(1, outputs.shape[1], generator=generator).to(outputs)
    weights = _gaussian(snapshot.count, generator=generator).to(outputs)
    batches = draws(snapshot.count, generator, thorough=True) if coupling else []
    if batches and names and (found := _at_once(snapshot, names, direction, weights, batches)):
        return found
    padded = torch.cat([weights, weights.new_zeros(len(outputs) - snapshot.count)])  # the copy of a single sample
    expected = _expected(snapshot, names, outputs, padded[:, None] * direction)
    readable = [name for name in names if snapshot.access[name].refusal is None]
    failed = _failing(snapshot, readable, direction, weights, expected)
    snapshot.distrust(failed)
    rounding, largest = _sizes(snapshot, expected)
    del expected
    for drawn in batches:
        _refuse_coupled_gradients(snapshot, drawn, direction, weights, rounding)
    return Audit(failed, rounding, max(largest.values(), default=0.0), 0.0 in largest.values())


def _sizes(snapshot: Snapshot, expected: Mapping[str, Tensor | None]) -> tuple[float, dict[str, float]]:
    """How large the terms of the outputs are, and the largest entry of every gradient."""
    grads = {name: g.detach() for name, g in expected.items() if g is not None and g.numel()}
    terms = _numbers([(g * snapshot.parameters[name].detach()).norm() for name, g in grads.items()])
    rounding = math.hypot(*(term for term in terms if math.isfinite(term)), 0.0)
    return rounding, dict(zip(grads, _numbers([g.abs().max() for g in grads.values()]), strict=True))


def _numbers(found: Sequence[Tensor]) -> list[float]:
    """Single numbers, fetched together: on a GPU each would be waited for."""
    if not found:
        return []
    values: list[float] = torch.stack([one.detach().double().to(found[0].device) for one in found]).tolist()
    return values


def _at_once(
    snapshot: Snapshot, names: list[str], direction: Tensor, weights: Tensor, batches: Sequence[Tensor]
) -> Audit | None:
    """Readings and coupling in one: per-sample gradients of the whole batch against autograd's in smaller batches.

    Where all agree, both hold, for the price of the smaller batches. None where anything does not: then the longer way
    tells a reading that is wrong from samples that influence each other.
    """
    outputs = [snapshot.probe.outputs(snapshot.indices[drawn]) for drawn in batches]
    if not all(again.requires_grad and again.shape[1:] == snapshot.outputs.shape[1:] for again in outputs):
        return None
    expected, counted = [], []
    for drawn, again in zip(batches, outputs, strict=True):
        chosen = weights[drawn.to(weights.device)]
        expected.append(_expected(snapshot, names, again, chosen[:, None] * direction))
        counted.append(torch.zeros_like(weights).index_add(0, drawn.to(weights.device), chosen))
    sizes = [_sizes(snapshot, found) for found in expected]
    rounding = math.hypot(*(size for size, _ in sizes))
    largest = {name: max(found.get(name, 0.0) for _, found in sizes) for _, found in sizes for name in found}
    for drawn, again in zip(batches, outputs, strict=True):
        refuse_difference(snapshot, again.detach(), drawn, rounding)
    try:
        terms: list[list[tuple[str, Tensor, Tensor, Tensor]]] = [[] for _ in batches]
        for name, gradients in snapshot.each_gradient(names, direction):
            for number, found in enumerate(expected):
                terms[number].append((name, *_compared_one(gradients, counted[number], found[name])))
        checks = [_checks(one) for one in terms]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a rule fails, perhaps the user's
        return None
    if any(True for one in checks for _ in _differing(one, snapshot)):
        return None
    return Audit({}, rounding, max(largest.values(), default=0.0), 0.0 in largest.values())


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
    found = snapshot.each_gradient(names, direction)
    return _checks([(name, *_compared_one(gradients, weights, expected[name])) for name, gradients in found])


def _compared_one(gradients: Gradients, weights: Tensor, expected: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The difference, how large the terms are, and how large autograd's gradient is."""
    total, size = _weighted_sum(gradients, weights)
    reference = _flat(expected, total)
    difference, length = (torch.linalg.vector_norm(one, dtype=torch.float64) for one in (total - reference, reference))
    return difference, size, length


def _checks(terms: Sequence[tuple[str, Tensor, Tensor, Tensor]]) -> list[Check]:
    values = _numbers([value for _, *three in terms for value in three])
    found = []
    for number, (name, *_) in enumerate(terms):
        difference, size, length = values[3 * number : 3 * number + 3]
        if math.isfinite(length):  # otherwise the kernel will not be finite either, and is refused for that
            found.append((name, difference, size + length))
    return found


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


def _weighted_sum(gradients: Gradients, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i w_i g_i, and a bound of its size before anything cancels."""
    if not bool(weights.all()):
        counted = weights.nonzero().flatten()
        gradients, weights = gradients.take(counted), weights[counted]
    if isinstance(gradients, Dense):
        terms = weights.to(gradients.gradient)[:, None] * gradients.gradient[:, 0]
        return terms.sum(0), torch.linalg.vector_norm(terms, dim=1, dtype=torch.float64).sum()
    size = torch.zeros((), dtype=torch.float64, device=gradients.parts[0].grads.device)
    for part in gradients.parts:
        lengths = torch.linalg.vector_norm(part.grads[0], dim=-1, dtype=torch.float64)
        if isinstance(part.held, Windows):
            lengths = lengths * part.held.lengths()
        elif not part.indexed:
            lengths = lengths * torch.linalg.vector_norm(part.rows, dim=-1, dtype=torch.float64)
        size = size + (lengths.sum((1, 2)) * weights.abs().to(lengths)).sum()
    weighted = replace(gradients, parts=tuple(_weighted(part, weights) for part in gradients.parts))
    return as_dense(weighted).gradient[:, 0].sum(0), size


def _weighted(part: Factor, weights: Tensor) -> Factor:
    """The samples times their weights; rows that are written out become positions of one sample: their sum."""
    grads = part.grads * weights.to(part.grads)[:, None, None, None]
    if isinstance(part.held, Windows):
        return replace(part, grads=grads)
    return replace(part, held=part.rows.flatten(0, 1)[None], grads=grads.flatten(1, 2)[:, None])


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.detach().flatten().to(like)
