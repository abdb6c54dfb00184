"""Sizes over the width, one panel a layer."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.reporting.figures import style
from featlearn.widths.scaling import LayerScaling, WidthCheck
from featlearn.widths.schemes import MATRICES

COLUMNS = 4
DRAWN = {
    "activation": ("activation", "#0072B2", "o"),
    "change": ("its change", "#D55E00", "s"),
    "effect": ("first update", "#009E73", "^"),
}
"""Sizes of a layer -> label, color (Okabe and Ito), marker."""
NETWORK = {
    "output": ("output", "#0072B2", "o"),
    "output_change": ("its change", "#D55E00", "s"),
    "kernel_motion": ("kernel motion", "#CC79A7", "D"),
}
WRONG = "#C00000"


def draw(check: WidthCheck) -> Any:
    """A panel for each layer with a matrix, and one for the network; returns the figure."""
    import matplotlib.pyplot as plt
    import matplotlib.style

    shown = [one for one in check.layers.values() if one.kind in MATRICES]
    rows = math.ceil((len(shown) + 1) / COLUMNS)
    columns = math.ceil((len(shown) + 1) / rows)
    with matplotlib.style.context(style()):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(max(1.75 * columns, 3.25), 0.75 + 1.75 * rows),
            squeeze=False,
            sharex=True,
            layout="constrained",
        )
        panels = list(axes.flat)
        for ax, layer in zip(panels, shown, strict=False):
            _draw(ax, check, layer.sizes, layer.exponents, DRAWN)
            _title(ax, check, layer)
        _draw(panels[len(shown)], check, check.sizes, check.network, NETWORK)
        panels[len(shown)].set_title("network", loc="left")
        for ax in panels[len(shown) + 1 :]:
            ax.remove()
        for number, ax in enumerate(panels[: len(shown) + 1]):
            if number + columns > len(shown):
                ax.set_xlabel("width")
                ax.tick_params(labelbottom=True)
        found = len(check.problems)
        said = f"{found} problem{'s' * (found != 1)}" if found else "no problems"
        figure.suptitle(f"{check.scheme}, {check.phase.value} phase, {said}", x=0.01, ha="left")
    return figure


def _draw(
    ax: Any,
    check: WidthCheck,
    sizes: Mapping[str, Tensor],
    powers: Mapping[str, Estimate],
    drawn: Mapping[str, tuple[str, str, str]],
) -> None:
    """Seeds as points, and the fitted line with its power in the legend."""
    from matplotlib.ticker import NullFormatter, NullLocator

    widths = torch.tensor(check.widths, dtype=torch.float64)
    for key, (label, color, marker) in drawn.items():
        values, power = sizes[key].double(), float(powers[key])
        known = (values > 0) & torch.isfinite(values)
        if not bool(known.any()) or math.isnan(power):
            continue
        at = widths[:, None].expand_as(values)[known]
        ax.plot(at, values[known], marker, color=color, markersize=2.5, alpha=0.7)
        middle = (values[known].log() - power * at.log()).mean()
        ax.plot(widths, (middle + power * widths.log()).exp(), color=color, linewidth=1, label=f"{label} {power:+.2f}")
    ax.set(xscale="log", yscale="log", xticks=check.widths)
    ax.set_xticklabels([str(width) for width in check.widths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_formatter(NullFormatter())
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.55)  # room for the legend
    ax.legend(loc="upper left", fontsize=5.5, frameon=False, handlelength=1, borderaxespad=0.1, labelspacing=0.2)


def _title(ax: Any, check: WidthCheck, layer: LayerScaling) -> None:
    """The layer, and in red what is off."""
    name = layer.name if len(layer.name) <= 19 else f"…{layer.name[-18:]}"
    wrong = [one for one in check.problems if one.layer == layer.name]
    said = f"\n{wrong[0].quantity} {float(wrong[0].power):+.1f}" if wrong else ""
    ax.set_title(
        f"{name} ({layer.kind}){said}".replace("$", r"\$"), loc="left", fontsize=6.5, color=WRONG if wrong else "black"
    )
