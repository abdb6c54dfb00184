"""Kernel-task alignment from sketched gradients, in time and memory linear in the samples."""

from collections.abc import Iterator

import torch
from torch import Tensor

from featlearn.contraction.tensor_sketch import Sketch
from featlearn.errors import InputValueError
from featlearn.gradients.directions import output_directions
from featlearn.kernel.sketched_kernel import SketchedFeatures, checked_sketch
from featlearn.kernel.sweep import Sweeps
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.sampling import student
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning.plan import KernelCall, ProgressLine
from featlearn.planning.sketch_plan import plan_sketch


def sketched_alignment(sweeps: Sweeps, targets: Tensor, task: float, sketch: Sketch, *, centered: bool) -> Estimate:
    """tr(Y^T K Y) / (|K|_F |Y Y^T|_F) for targets (P, d), centered where asked, with `task` = |Y Y^T|_F.

    |K|_F^2 is the mean of <K_r, K_s> over pairs of different repeats, which has no bias; the square of one repeat has
    the noise of all P^2 entries in it. The error is that of the jackknife over repeats, widened by Student's t.
    """
    checked_sketch(sketch, "mean", verify=False)
    if sketch.repeats < 3:
        raise InputValueError(
            f"Sketch has repeats={sketch.repeats}, expected at least 3 for an alignment: its error is seen by leaving "
            "one of them out"
        )
    features = _features(sweeps, sketch)
    if centered:
        whole = float(torch.linalg.vector_norm(features))
        features -= features.mean(1, keepdim=True)
        if float(torch.linalg.vector_norm(features)) <= 100 * torch.finfo(features.dtype).eps * whole:
            return Estimate(float("nan"), float("nan"), 1)
    overlaps = torch.stack([(one.T @ targets.to(one)).double().square().sum() for one in features]).cpu()
    products = _products(features, 2**24).cpu()
    value, error = jackknifed(overlaps, products)
    return Estimate(value / task, error / task, sketch.repeats, sketch.repeats - 1.0)


def jackknifed(overlaps: Tensor, products: Tensor) -> tuple[float, float]:
    """overlap / norm from (R,) overlaps and (R, R) inner products of kernels, and its error.

    Of the products only those of different repeats count.
    """
    repeats = len(overlaps)
    value = _ratio(overlaps, products)
    others = [[s for s in range(repeats) if s != r] for r in range(repeats)]
    without = torch.stack([_ratio(overlaps[kept], products[kept][:, kept]) for kept in others])
    variance = (repeats - 1) / repeats * (without - without.mean()).square().sum()
    return float(value), float(variance.sqrt()) * student(repeats - 1)


def _ratio(overlaps: Tensor, products: Tensor) -> Tensor:
    count = len(overlaps)
    square = (products.sum() - products.trace()) / (count * (count - 1))
    return overlaps.mean() / square.sqrt() if square > 0 else torch.full_like(square, torch.nan)


def _features(sweeps: Sweeps, sketch: Sketch) -> Tensor:
    """(repeats, P, k), whose products estimate the sum over outputs: alignment knows no scale."""
    measurement, samples = sweeps.measurement, sweeps.stream.samples
    call = KernelCall(
        directions=output_directions("sum", measurement.classes),
        rates=sweeps.rates,
        memory=sweeps.audited.request.memory,
    )
    plan = plan_sketch(measurement, call, sketch, samples=(samples, samples), forming=False)

    def chunks() -> Iterator[tuple[ModelWithInputs, int, int, slice]]:
        for batch, places in sweeps.batches(plan.chunk):
            yield batch, 0, len(places), slice(int(places[0]), int(places[-1]) + 1)

    with ProgressLine("sketched alignment", plan.passes) as progress:
        made = SketchedFeatures(measurement, plan, call, sketch)
        features = made.sketched(chunks(), samples, progress)[""]
    measurement.refuse_no_gradient()
    return features


def _products(features: Tensor, numbers: int) -> Tensor:
    """(R, R): <K_r, K_s> = |F_r^T F_s|_F^2 for r < s, symmetric, 0 on the diagonal; so many numbers at a time."""
    repeats, _, k = features.shape
    found = torch.zeros(repeats, repeats, dtype=torch.float64, device=features.device)
    step = max(1, numbers // k)
    for r in range(repeats):
        for s in range(r):
            for begin in range(0, k, step):
                block = features[r][:, begin : begin + step].T @ features[s]
                found[r, s] += block.double().square().sum()
            found[s, r] = found[r, s]
    return found
