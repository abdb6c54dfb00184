"""What is recorded at one step: numbers under their names, and arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from featlearn import metrics
from featlearn.linearization.two_states import LEAST
from featlearn.monitoring.numbers import Names
from featlearn.monitoring.pictures import picture_arrays
from featlearn.monitoring.probe_data import ProbeData, decays, has_labels, is_binary, is_classification
from featlearn.monitoring.step_measurement import MANY_OUTPUTS, StepMeasurement
from featlearn.network.checks import trainable_parameters
from featlearn.quantities.feature_change import LAST
from featlearn.quantities.layer_pairs import pair_alignment

LARGE = 2**20
"""Number of outputs above which they are recorded at the first and the last measurement only."""


@dataclass
class Record:
    """Numbers and arrays of one measurement."""

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> key -> numbers."""

    def add(self, other: "Record") -> None:
        """Merge another record into this one."""
        self.scalars |= other.scalars
        self.arrays |= other.arrays


@dataclass
class RecordContext:
    """Position of a measurement in the run."""

    names: Names
    end: bool
    """Whether it is the first or the last, at which large arrays are recorded."""
    last: bool
    """Whether it is the last."""
    previous: tuple[int, Tensor] | None = None
    """Step and kernel of the previous measurement."""


Read = Callable[[StepMeasurement, RecordContext], Record]


def probe(view: StepMeasurement, context: RecordContext) -> Record:
    """Loss and accuracy on the probe."""
    record = Record(_fit("probe", view.watched.probe, view.outputs, view.targets))
    if context.end or view.outputs.numel() <= LARGE:
        record.arrays["outputs"] = _arrays(f=view.outputs)
    if view.targets is not None and view.baseline is None:
        record.arrays["targets"] = _arrays(y=view.targets)
    return record


def _fit(name: str, data: ProbeData, outputs: Tensor, targets: Tensor | None) -> dict[str, float]:
    if targets is None:
        return {}
    f = outputs.double()
    found = {f"{name}/loss": float((f - targets).square().sum(1).mean())}
    if is_binary(targets):
        found[f"{name}/binary_cross_entropy"] = float(binary_cross_entropy_with_logits(f, targets))
    if is_classification(targets):
        labels = targets.argmax(1)
        found[f"{name}/accuracy"] = float((f.argmax(1) == labels).double().mean())
        if has_labels(data.y, f.shape[1]):
            found[f"{name}/cross_entropy"] = float(cross_entropy(f, labels))
    return found


def kernel(view: StepMeasurement, context: RecordContext) -> Record:
    """The tangent kernel: norm, rank, distance from the start, kernel-task alignment, share of each layer."""
    whole, y = view.kernel.double(), view.targets
    spectrum = metrics.spectrum(whole, y)
    found = {
        "ntk/norm": float(whole.norm()),
        "ntk/trace": float(whole.trace()),
        "ntk/effective_rank": float(metrics.effective_rank(whole)),
    }
    record = Record(found, {"spectrum": {"eigenvalues": spectrum.eigenvalues}})
    record.arrays["kernel"] = _arrays(mean=view.kernel)
    if context.end:
        each = view.kernel_each if len(view.kernel_each) > 1 else None
        record.arrays["kernel"] |= _arrays(each=each, full=view.kernel_full)
    first = whole if view.baseline is None else view.baseline.kernel
    if first is not None:
        found["ntk/distance"] = float(metrics.kernel_distance(whole, first))
        found["ntk/centered_distance"] = float(metrics.kernel_distance(whole, first, centered=True))
    if context.previous is not None and context.previous[0] < view.step:
        found["ntk/velocity"] = float(metrics.kernel_distance(whole, context.previous[1])) / (
            view.step - context.previous[0]
        )
    square = float((whole * whole).sum())
    layers = {context.names[name]: each.mean(0).double() for name, each in view.layer_kernels.items()}
    for name, part in layers.items():
        found[f"ntk/layers/{name}/share"] = float((part * whole).sum()) / square if square else math.nan
    if y is not None:
        assert spectrum.task_power is not None
        record.arrays["spectrum"]["task_power"] = spectrum.task_power
        found["ntk/alignment"] = float(metrics.alignment(whole, y))
        found["ntk/centered_alignment"] = float(metrics.centered_alignment(whole, y))
        for name, part in layers.items():
            found[f"ntk/layers/{name}/alignment"] = float(metrics.alignment(part, y))
        if 1 < y.shape[1] <= MANY_OUTPUTS:
            matrix = metrics.specialization(view.kernel_each, y)
            found["ntk/specialization"] = float(matrix.diagonal().mean())
            record.arrays["specialization"] = {"ksm": matrix}
    return record


def gap(view: StepMeasurement, context: RecordContext) -> Record:
    """The linearization gap since the start: of the outputs and through the link, on the probe and the test points."""
    if view.baseline is None or not view.watched.initial or view.watched.probe.samples < LEAST:
        return Record()
    gaps = {"link": view.gap, "probe": view.gap.plain}
    if view.test_gap is not None:
        gaps |= {"link_test": view.test_gap, "test": view.test_gap.plain}
    if view.unshrunk_gap is not None:
        gaps["unshrunk"] = view.unshrunk_gap
    scalars = {f"gap/{name}": one.value for name, one in gaps.items()}
    scalars |= {f"gap/{name}_error": one.error for name, one in gaps.items()}
    scalars["gap/rounding"] = view.gap.relative_rounding
    scalars["gap/link_ops"] = float(len(view.gap.division.link))
    scalars["gap/merged_weights"] = float(len(view.gap.division.merged))
    scalars["gap/change"] = float(view.gap.change.norm()) / math.sqrt(len(view.gap.change))
    return Record(scalars)


def moved(view: StepMeasurement, context: RecordContext) -> Record:
    """How much what enters each layer changed since the start, and how much buffers alone changed it."""
    if view.baseline is None or not view.watched.initial or view.watched.probe.samples < LEAST:
        return Record()
    changes = dict(view.feature_changes)
    last = changes.pop(LAST)
    scalars = {
        "features/moved": float(last),
        "features/moved_error": float(last.relative.stderr),
        "features/cka": last.cka,
    }
    for layer, change in changes.items():
        scalars[f"features/{context.names[layer]}/moved"] = float(change)
        scalars[f"features/{context.names[layer]}/cka"] = change.cka
    for layer in view.constant_inputs:
        scalars[f"features/{context.names[layer]}/constant"] = 1.0
    if view.statistics_change is not None:
        by_statistics, by_weights = view.statistics_change
        scalars |= {
            "statistics/moved": float(by_statistics),
            "statistics/moved_error": float(by_statistics.relative.stderr),
            "features/moved_by_weights": float(by_weights),
            "features/moved_by_weights_error": float(by_weights.relative.stderr),
        }
    return Record(scalars)


def richness(view: StepMeasurement, context: RecordContext) -> Record:
    """Low-rank richness of what enters the last layer (Nam et al. 2024)."""
    if view.last_features is None or view.watched.probe.samples < 2:
        return Record()
    return Record({"richness/low_rank": float(metrics.low_rank_richness(view.last_features, view.outputs))})


def convergence(view: StepMeasurement, context: RecordContext) -> Record:
    """Cosine of W^T W and -W^T dL/dW for every weight matrix that decays (arXiv 2507.05644)."""
    if not decays(view.watched.optimizer) or view.loss_gradients is None:
        return Record()
    found = {}
    for name, gradient in view.loss_gradients.items():
        weight = view.watched.model.get_parameter(name).detach()
        if weight.dim() > 1 and weight.is_floating_point():
            cosine = metrics.features_at_convergence(weight, gradient.to(weight.device))
            found[f"convergence/{context.names[name.rpartition('.')[0]]}"] = float(cosine)
    return Record(found)


def features(view: StepMeasurement, context: RecordContext) -> Record:
    """Neural feature correlations of every layer (Beaglehole et al. 2024)."""
    names = ["uncentered", "weight_change"]
    if view.baseline is not None and view.watched.initial:
        names = ["uncentered", "centered", "double_centered", "ptk_centered", "centered_share", "weight_change"]
    found = {}
    for layer, values in view.features.items():
        for name in names:
            # At the first measurement the weights have not moved, and there is no baseline.
            value = 0.0 if name == "weight_change" and view.baseline is None else getattr(values, name)
            found[f"features/{context.names[layer]}/{name}"] = float(value)
    for name in ("uncentered", "centered"):
        if name in names:
            found[f"features/mean/{name}"] = view.features.mean(name)
    return Record(found)


def layers(view: StepMeasurement, context: RecordContext) -> Record:
    """Alignment and balance of layers that follow each other (Xu & Ziyin 2024, Atanasov et al. 2022)."""
    found = {}
    for names, pair in view.pairs.items():
        key = "layers/" + "--".join(context.names[name] for name in names)
        aligned = pair_alignment(pair, "fro")
        found[f"{key}/alignment"], found[f"{key}/random"] = aligned.value, aligned.random
        found[f"{key}/balance_drift"] = _drift(view, names)
    return Record(found)


def _drift(view: StepMeasurement, names: tuple[str, str]) -> float:
    """|balance - balance at the start| / (|W|^2 / rate), W the first of the two at the start."""
    if view.baseline is None:
        return 0.0
    first, size = view.baseline.balances.get(names), view.baseline.weights.get(names, 0.0)
    now = view.balances[names]
    return float((now - first).norm()) / size if first is not None and first.shape == now.shape and size else math.nan


def weights(view: StepMeasurement, context: RecordContext) -> Record:
    """Norms of the weights and distances from their initial values, by layer and in total."""
    own: dict[str, list[Tensor]] = {}
    for name, parameter in trainable_parameters(view.model).items():
        now = _in_double(parameter)
        start = view.watched.initial.get(name, None if view.watched.initial or view.baseline is not None else parameter)
        begun = torch.full_like(now, math.nan) if start is None else _in_double(start.to(now.device))
        own.setdefault(name.rpartition(".")[0], []).append(
            torch.stack([now.norm(), (now - begun).norm(), begun.norm()])
        )
    totals = {name: torch.stack(parts).square().sum(0).cpu() for name, parts in own.items()}
    found: dict[str, float] = {}
    for name, (norm, gone, size) in totals.items():
        found |= _moved(f"weights/{context.names[name]}", norm, gone, size)
    return Record(found | _moved("weights", *torch.stack([*totals.values()]).sum(0)))


def _in_double(weight: Tensor) -> Tensor:
    """Real numbers in float64: two for each complex one."""
    real = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    return real.detach().double()


def _moved(name: str, norm: Tensor, gone: Tensor, size: Tensor) -> dict[str, float]:
    """|W| and |W - W0| / |W0| from their squares; nan if W0 = 0."""
    return {
        f"{name}/norm": math.sqrt(norm),
        f"{name}/distance": math.sqrt(gone / size) if float(size) > 0 else math.nan,
    }


def test(view: StepMeasurement, context: RecordContext) -> Record:
    """Fit of the test probe; at the first and the last measurement also its kernels."""
    data, f, y = view.watched.test, view.test_outputs, view.test_targets
    if data is None or f is None:
        return Record()
    record = Record(_fit("test", data, f, y))
    if context.end:
        kernel, (cross, whole) = view.test_kernel, view.cross_kernels or (None, None)
        if y is not None and kernel is not None:
            record.scalars["ntk/test/alignment"] = float(metrics.alignment(kernel, y))
            record.scalars["ntk/test/centered_alignment"] = float(metrics.centered_alignment(kernel, y))
        record.arrays["test"] = _arrays(cross=cross, cross_full=whole, kernel=kernel, f=f, y=y)
    elif f.numel() <= LARGE:
        record.arrays["test"] = _arrays(f=f)
    return record


def optimizer(view: StepMeasurement, context: RecordContext) -> Record:
    """The kernel of the update that the optimizer makes (Atanasov et al. 2022, Eq. 91)."""
    kernel = view.optimizer_kernel
    if kernel is None:
        return Record()
    found = {"ntk/optimizer/norm": float(kernel.double().norm())}
    if view.targets is not None:
        found["ntk/optimizer/alignment"] = float(metrics.alignment(kernel, view.targets))
    record = Record(found)
    if context.last:
        cross, whole = view.optimizer_cross_kernels or (None, None)
        full = view.optimizer_kernel_full
        record.arrays["optimizer_kernel"] = _arrays(mean=kernel, full=full, cross=cross, cross_full=whole)
    return record


def pictures(view: StepMeasurement, context: RecordContext) -> Record:
    """Samples to show, and what the network is most sensitive to: at the first and the last measurement."""
    arrays = picture_arrays(view.probe_batch, first=view.baseline is None) if context.end else {}
    return Record(arrays={"pictures": arrays} if arrays else {})


BUILT_IN: Mapping[str, Read] = {
    "gap": gap,
    "moved": moved,
    "richness": richness,
    "weights": weights,
    "kernel": kernel,
    "features": features,
    "layers": layers,
    "convergence": convergence,
    "test": test,
    "optimizer": optimizer,
    "pictures": pictures,
}
"""Name -> quantity, in the order of measurement."""


def _arrays(**given: Tensor | None) -> dict[str, Any]:
    """The tensors that are not None, as float32 arrays."""
    return {key: tensor.detach().float().numpy() for key, tensor in given.items() if tensor is not None}
