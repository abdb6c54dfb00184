"""What changed between two states of a network, in one call."""

import glob
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featlearn import losses
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, UnsupportedModelError
from featlearn.metrics import centered_alignment, kernel_distance
from featlearn.network.checks import unwrapped
from featlearn.network.copies import network_at, refuse_shared_memory
from featlearn.network.inputs import Inputs, Readout
from featlearn.palette import BLUE
from featlearn.quantities.representation import representation_kernels
from featlearn.session import Session
from featlearn.shapes import checked_tensor
from featlearn.signatures import name_keywords
from featlearn.steer.safe_lr import outputs_of

State = nn.Module | Mapping[str, Tensor]
ROWS = 8
"""Layers in the printed text, at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What changed between two states of a network, on one batch."""

    gap: float
    """Share of the change of the outputs that a linear model around the first state misses; 0 lazy, near 1 rich. It is
    what `fl.linearization_gap` returns."""
    turning: float
    """Rotation of the centered tangent kernel, 1 - cosine, as `fl.metrics.kernel_distance(..., centered=True)`."""
    growth: float
    """Norm of the tangent kernel in the second state, relative to the first."""
    alignment: tuple[float, float] | None
    """Kernel-task alignment before and after, as `fl.metrics.centered_alignment`; None without targets."""
    loss: tuple[float, float] | None
    """Loss before and after; None where no loss was passed."""
    representations: dict[str, float]
    """Layer -> similarity of its outputs in the two states (linear CKA): 1 is the same up to rotation and scale. nan
    where the outputs have no sample axis: layers called for one sample at a time, or for those that a mask picks."""
    layers: dict[str, float]
    """Layer -> its part of the gap; the parts add up to it."""

    def __str__(self) -> str:
        lines = [f"A linear model around the first state misses {self.gap:.0%} of what the network learned."]
        if math.isnan(self.gap):
            lines = ["The outputs did not change by more than rounding."]
        lines.append(f"Tangent kernel:  rotated by {self.turning:.2f} (1 - cosine), norm times {self.growth:.3g}.")
        for name, pair in (("Alignment:", self.alignment), ("Loss:", self.loss)):
            if pair is not None:
                lines.append(f"{name:<17}{pair[0]:.3g} before, {pair[1]:.3g} after.")
        names = self._layer_names
        width = max(map(len, [*names, "layer"]))
        lines.append(f"{'layer':<{width}}  part of the gap  similarity of outputs (CKA)")
        for name in names[:ROWS]:
            part, similarity = self.layers.get(name, math.nan), self.representations.get(name, math.nan)
            lines.append(f"{name:<{width}}  {part:15.2f}  {similarity:27.2f}")
        if len(names) > ROWS:
            lines.append(f"and {len(names) - ROWS} layers with smaller parts: .layers, .representations")
        return "\n".join(lines)

    @property
    def _layer_names(self) -> list[str]:
        """All layers; of more than fit, those with the largest parts come first."""
        names = list(dict.fromkeys([*self.layers, *self.representations]))
        if len(names) <= ROWS:
            return names
        return sorted(names, key=lambda name: -abs(self.layers.get(name, 0.0)))

    def figure(self) -> Any:
        """Draw each layer's part of the gap and the similarity of its outputs; return a matplotlib figure."""
        from matplotlib.figure import Figure

        names = list(dict.fromkeys([*self.layers, *self.representations]))
        figure = Figure(figsize=(6.75, 1.2 + 0.22 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, values, title in (
            (left, self.layers, f"part of the gap, {self.gap:.2f} in all"),
            (right, self.representations, "similarity of outputs (CKA)"),
        ):
            axes.barh(names, [values.get(name, math.nan) for name in names], color=BLUE)
            axes.set_title(title, fontsize=8)
            axes.tick_params(labelsize=8)
        right.set_xlim(0, 1)
        left.invert_yaxis()
        return figure


@name_keywords()
def compare(
    before: State,
    after: State,
    x: Inputs,
    y: Tensor | None = None,
    *,
    model: nn.Module | None = None,
    readout: Readout | None = None,
    loss: losses.Loss | None = None,
) -> Comparison:
    """Compare two states of a network: how much it learned between them, where, and in which direction.

    >>> comparison = fl.compare(torch.load("step0.pt"), torch.load("step500.pt"), x, y, model=model)
    >>> print(comparison)
    >>> comparison.gap, comparison.layers

    Args:
        before: Module, or state dict, of the first state.
        after: Module, or state dict, of the second state.
        x: Batch with the sample axis first, at least 2 samples.
        y: Targets (P,) or (P, C), or class labels (P,), for the alignment and the loss.
        model: Module of the same architecture, for state dicts. Its own weights do not matter.
        readout: Map from the model's output to (P,) or (P, C), as for `fl.ntk`.
        loss: Name of `fl.losses`, module, or function of (outputs, y), to be stated for both states.

    Returns:
        A `Comparison`; `print` shows it in at most 15 lines, and `.figure()` draws it.
    """
    if loss is not None:
        losses.function(loss)
        if y is None:
            raise InputValueError("loss=... without y, expected targets; pass y, or leave loss= out")
    first, last = _network(before, "before", model, after), _network(after, "after", model, before)
    if before is after or isinstance(before, Mapping) or isinstance(after, Mapping):
        refuse_shared_memory(_tensors(before), _tensors(after), "before", "after")
    initial = {name: value.clone() for name, value in unwrapped(first).state_dict().items()}
    sessions = [Session(network, x, readout=readout) for network in (first, last)]
    kernels = [session.ntk() for session in sessions]
    representations = [_representations(network, x) for network in (first, last)]
    targets = None if y is None else _targets(y)
    aligned = None if targets is None else [float(centered_alignment(kernel, targets)) for kernel in kernels]
    values = None
    if loss is not None and y is not None:
        values = [float(losses.gradient(loss, outputs_of(network, x, readout), y)[0]) for network in (first, last)]
    norms = [float(kernel.double().norm()) for kernel in kernels]
    return Comparison(
        gap=sessions[1].linearization_gap(initial),
        turning=float(kernel_distance(*kernels, centered=True)),
        growth=norms[1] / norms[0] if norms[0] else math.nan,
        alignment=None if aligned is None else (aligned[0], aligned[1]),
        loss=None if values is None else (values[0], values[1]),
        representations={
            name: _similarity(kernel, representations[1][name])
            for name, kernel in representations[0].items()
            if name in representations[1]
        },
        layers=sessions[1].linearization_gap(initial, by="layer"),
    )


def _representations(network: nn.Module, x: Inputs) -> dict[str, Tensor | None]:
    """Return layer -> Gram matrix of its outputs, None for layers whose outputs have no sample axis."""
    try:
        return {**representation_kernels(network, x, of="output")}
    except UnsupportedModelError:  # of one layer or more
        kernels: dict[str, Tensor | None] = {}
    for name, part in network.named_modules():
        if any(True for _ in part.parameters(recurse=False)):
            try:
                kernels |= representation_kernels(network, x, of="output", layers=[glob.escape(name)])
            except FeatlearnError:
                kernels[name] = None
    return kernels


def _similarity(first: Tensor | None, last: Tensor | None) -> float:
    if first is None or last is None:
        return math.nan
    return 1 - float(kernel_distance(first, last, centered=True))


def _network(state: Any, name: str, model: nn.Module | None, other: Any) -> nn.Module:
    """Return the module of a state: itself, or a copy of the model that holds the state dict."""
    if isinstance(state, nn.Module):
        return state
    if not isinstance(state, Mapping):
        raise InputTypeError(
            f"{name} is {type(state).__name__}, expected a torch.nn.Module or a state dict; load a file first: "
            "torch.load(path)"
        )
    architecture = model if model is not None else other
    if not isinstance(architecture, nn.Module):
        raise InputTypeError(f"{name} is a state dict, expected also a module of that architecture; pass model=...")
    return network_at(architecture, {key: value.clone() for key, value in state.items()})


def _tensors(state: State) -> Iterable[Any]:
    return state.parameters() if isinstance(state, nn.Module) else state.values()


def _targets(y: Tensor) -> Tensor:
    """Return targets in double; class labels become one-hot rows less their mean over classes."""
    targets = checked_tensor(y, "y")
    labels = y.dim() == 1 and not y.is_floating_point() and int(y.min()) >= 0 and int(y.max()) >= 2
    if not labels:
        return targets
    rows = nn.functional.one_hot(y.long()).double()
    return rows - 1 / rows.shape[1]
