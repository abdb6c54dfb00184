"""Kernel-task alignment of more samples than a kernel could be formed for, with its standard error."""

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.agreement import same_arguments, same_tensors
from featlearn.errors import InputTypeError, InputValueError
from featlearn.kernel.jacobian_products import inner_products
from featlearn.kernel.sweep import Sweeps
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.nystrom import norm, normalized_overlap, survey_columns
from featlearn.planning.plan import ProgressLine
from featlearn.quantities.columns import KernelColumns
from featlearn.quantities.operator import NTKOperator, column_count, same_draws, source
from featlearn.quantities.sketched_alignment import sketched_alignment
from featlearn.shapes import REMAINDER, checked_finite, deviations, refuse_labels, scaled
from featlearn.signatures import name_keywords

# Targets with at most this many distinct rows are those of classes.
CLASSES = 64


@name_keywords()
def estimate_alignment(
    model: nn.Module,
    data: Any,
    y: Tensor | None = None,
    *,
    centered: bool = False,
    vectors: int | None = None,
    generator: torch.Generator | None = None,
    sketch: Sketch | None = None,
    **settings: Unpack[Settings],
) -> Estimate:
    """Kernel-task alignment A = y^T K y / (|K|_F |y|^2) without the kernel, in time linear in P.

    See Shan & Bordelon 2021a, Eq. 4, Shan & Bordelon 2021b, Eq. 3.

    Equal to `fl.metrics.alignment(fl.ntk(model, x), y)` up to its standard error: K is the mean over outputs, and for y
    (P, d) the task kernel is Y Y^T. The norm comes from the exact columns of a few samples (see
    `fl.NTKOperator.frobenius`), the numerator |J^T y|^2 from backward passes, exactly: one sweep for one output and one
    target; for C outputs C sweeps, whatever the number of target columns, where targets have few distinct rows
    (classes, centered or not). Where it would take more than 2 C sweeps (several columns of real numbers) the columns
    of the kernel give the numerator too. The error of the ratio is that to first order, of both together.

    Two standard errors hold the truth in about 95 of 100 draws: the error is widened by Student's t for its degrees of
    freedom, `.freedom`. Measured with 64 vectors and 2200 samples it was 94 to 99 of 100, raw and centered, for
    Gaussian inputs, sizes of samples that are lognormal with sigma 1.2 and 2, five outliers 30 times larger, several
    outputs and handwritten digits. Where `.freedom` is below 4 a `featlearn.errors.HeavyTailWarning` says that
    too few draws carry the error for it to be trusted; take more vectors.

    Args:
        model: as for `fl.ntk`.
        data: A batch as for `fl.ntk`, a pair (inputs, targets), or a `DataLoader` that does not shuffle, which is never
            held in memory.
        y: Targets (P,) or (P, d). None takes those of the pair or of a loader of (inputs, targets); integer labels of a
            loader, for a network with several outputs, are read as classes and made one-hot.
        centered: whether K and y are centered, as in `fl.metrics.centered_alignment`: H K H with H = I - 1 1^T / P. The
            means of the rows of K are exact, by one product for each output.
        vectors: how many samples give columns, 64 by default and at least 4; all of them (the exact value, standard
            error 0) where P is at most 2048 or `vectors`.
        generator: draws them; without one they are the same at every call.
        sketch: `fl.Sketch(k=4096, repeats=4)` takes numerator and norm from sketched gradients instead, in one pass
            over the samples, for networks whose columns take too long; three repeats at least.
        **settings: As for `fl.NTKOperator`; all ranks of a `group` get the same estimate.

    Returns:
        An estimate whose `samples` are the columns that its error rests on; nan where K or y vanishes.
    """
    if y is None and isinstance(data, tuple | list) and len(data) == 2:
        data, y = data  # a pair; a batch of two inputs comes with y
    audited = AuditedModel(model, **settings)
    return estimate_alignment_of(
        audited, y, x=data, centered=centered, vectors=vectors, generator=generator, sketch=sketch
    )


def estimate_alignment_of(
    audited: AuditedModel,
    y: Tensor | None = None,
    *,
    x: Any = None,
    centered: bool = False,
    vectors: int | None = None,
    generator: torch.Generator | None = None,
    sketch: Sketch | None = None,
) -> Estimate:
    """Estimate the kernel-task alignment without the kernel: see `fl.estimate_alignment`."""
    data = audited.inputs(x)
    with audited.request.group.together() as block:
        if y is None and not isinstance(data, torch.utils.data.DataLoader):
            raise InputTypeError(
                "y is None and data is a batch, expected targets; pass y, or data=(inputs, targets) or a loader of "
                "such pairs"
            )
        if sketch is not None and audited.request.group.given:
            raise InputValueError("sketch= with group=, expected one of them: sketches are not divided among ranks")
        drawing = source(generator)
        block.expect(same_arguments({"centered": centered, "vectors": vectors}), same_draws(drawing))
    operator = NTKOperator.of(audited, data, None)
    with operator.ranks.together() as block:
        targets = _targets(y, operator)
        block.expect(same_tensors("the targets", {"y": targets}, "give all ranks what one of them has"))
        count = column_count(None if sketch is not None else vectors, operator.samples, 1)
    targets = scaled(deviations(targets, (0,)) if centered else targets, (0, 1))[0].to(operator.device)
    task = float((targets.T @ targets).norm())  # |Y Y^T|_F
    if task == 0.0:
        return Estimate(float("nan"), float("nan"), 1)
    if sketch is not None:
        if vectors is not None or generator is not None:
            raise InputValueError(
                "sketch= with vectors= or generator=, expected one of them; fl.Sketch has a generator"
            )
        with operator.sweeps() as sweeps:
            return sketched_alignment(sweeps, targets, task, sketch, centered=centered)
    with operator.sweeps() as sweeps:
        if count == operator.samples:
            return _exact(sweeps, targets, task, centered)
        means = operator.row_means(sweeps) if centered else None
        columns = KernelColumns(sweeps, "mean", means)
        if means is not None and _vanishes(columns.diagonal, means, operator.dtype):
            return Estimate(float("nan"), float("nan"), 1)
        few = _in_few_vectors(targets, sweeps)
        if few is None:
            found = survey_columns(columns, count, drawing, targets)
            ratio = normalized_overlap(found, "the alignment")
            return replace(ratio, value=float(ratio) / task, stderr=float(ratio.stderr) / task)
        size = norm(survey_columns(columns, count, drawing), "the alignment")
        if not float(size) > 0.0:
            return Estimate(float("nan"), float("nan"), 1)
        value = _overlap(sweeps, *few) / (float(size) * task)
        return replace(size, value=value, stderr=value * float(size.stderr) / float(size))


def _targets(y: Any, operator: NTKOperator) -> Tensor:
    """(P, d) in double."""
    given = operator.targets if y is None else y
    if given is None:
        raise InputTypeError("y is None and the loader gives inputs alone, expected targets; pass y")
    samples, outputs = operator.samples, operator.outputs
    labels = isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point()
    if y is None and labels and outputs > 1:
        if int(given.min()) < 0 or int(given.max()) >= outputs:
            raise InputValueError(
                f"the loader's labels run from {int(given.min())} to {int(given.max())}, expected classes from 0 to "
                f"C - 1 = {outputs - 1}; pass y"
            )
        given = functional.one_hot(given.long(), outputs)
    targets = checked_finite(given, "y")
    if targets.dim() not in (1, 2) or len(targets) != samples:
        raise InputValueError(
            f"y has shape {tuple(targets.shape)}, expected (P,) = ({samples},) or (P, C) = ({samples}, C)"
        )
    refuse_labels(given, "y")
    return targets if targets.dim() == 2 else targets[:, None]


def _exact(sweeps: Sweeps, targets: Tensor, task: float, centered: bool) -> Estimate:
    """From all columns."""
    everything = torch.arange(sweeps.stream.samples, device="cpu")
    columns, before, after = KernelColumns(sweeps, "mean"), [0.0], [0.0]

    def totals(rows: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        before.append(_largest(rows))
        return (rows.sum(1),)

    def terms(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        after.append(_largest(rows))
        return rows.square().sum(), (targets * (rows @ targets[places.to(targets.device)])).sum()

    if centered:
        (sums,) = columns.sums(everything, totals)
        columns = KernelColumns(sweeps, "mean", sums / len(sums))
    square, overlap = map(float, columns.sums(everything, terms))
    raw, left = sweeps.ranks.largest([max(before), max(after)])
    if left <= REMAINDER * raw:  # a constant kernel is zero when centered, but for rounding
        return Estimate(float("nan"), float("nan"), 1)
    return Estimate(overlap / (square**0.5 * task), 0.0, 1)


def _largest(rows: Tensor) -> float:
    return float(rows.abs().max()) if rows.numel() else 0.0


def _vanishes(diagonal: Tensor, means: Tensor, dtype: torch.dtype) -> bool:
    """Whether a centered kernel is what rounding leaves of a constant one."""
    return float(diagonal.abs().max()) <= 100 * torch.finfo(dtype).eps * float(means.abs().max())


def _in_few_vectors(targets: Tensor, sweeps: Sweeps) -> tuple[Tensor, Tensor] | None:
    """V (P, r) and M (r, r) with Y Y^T = V M V^T where V takes at most two sweeps for each output; None where none do.

    Targets with few distinct rows (classes, centered or not) are made of the indicators of those rows, which take one
    sweep together.
    """
    if targets.shape[1] > 1:
        rows, member = targets.unique(dim=0, return_inverse=True)
        weights = rows @ rows.T
        diagonal = torch.equal(weights, weights.diagonal().diag())
        if len(rows) <= CLASSES and (diagonal or sweeps.block(len(rows)) == len(rows)):
            return functional.one_hot(member, len(rows)).to(targets), weights
    if int((targets != 0).sum()) > 2 * len(targets):
        return None
    return targets, torch.eye(targets.shape[1], dtype=targets.dtype, device=targets.device)


def _overlap(sweeps: Sweeps, vectors: Tensor, weights: Tensor) -> float:
    """tr(V M V^T K) for the mean over outputs, by backward passes: sum over c of M_rs <J_c^T v_r, J_c^T v_s> / C."""
    classes, count = sweeps.measurement.classes, vectors.shape[1]
    linked = not torch.equal(weights, weights.diagonal().diag())
    held = count if linked else 1  # vectors of parameters for each output
    step = max(1, sweeps.block(classes * held) // held)
    every = torch.eye(classes, dtype=sweeps.measurement.dtype, device=vectors.device)
    size = sweeps.chunk(3.0, 2 * step * held)
    passes = sum(-(-int((v != 0).sum()) // size) for v in vectors.T)
    total = 0.0
    with ProgressLine("overlap with the task", passes * -(-classes // step)) as progress:
        for directions in every.split(step):
            before: list[tuple[int, dict[str, Tensor]]] = []
            for r in weights.diagonal().nonzero().flatten().tolist():
                v = vectors[:, r, None].to(every) * directions[:, None, :]
                pulled = sweeps.pulled_back(v, progress)
                total += float(weights[r, r]) * _inner(pulled, pulled)
                for s, other in before:
                    total += 2 * float(weights[r, s]) * _inner(pulled, other)
                if linked:
                    before.append((r, pulled))
    return total / classes


def _inner(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float(inner_products(u, b[name]).sum()) for name, u in a.items())
