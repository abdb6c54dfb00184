"""Figure of sizes over the width, with a panel per use of a matrix."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn import palette
from featlearn.linalg.estimate import Estimate
from featlearn.reporting.figures import style
from featlearn.widths.scaling import UseScaling, WidthCheck
from featlearn.widths.schemes import MATRICES

COLUMNS = 4
DRAWN = {
    "activation": ("activation", palette.BLUE, "o"),
    "change": ("its change", palette.ORANGE, "s"),
    "effect": ("first update", palette.GREEN, "^"),
}
"""Sizes of a use -> label, color, marker."""
NETWORK = {
    "output": ("output", palette.BLUE, "o"),
    "output_change": ("its change", palette.ORANGE, "s"),
    "kernel_motion": ("kernel motion", palette.PINK, "D"),
}
WRONG = "#C00000"


def draw(check: WidthCheck) -> Any:
    """Draw a panel per use of a matrix, and a panel of the network; return the figure."""
    import matplotlib.pyplot as plt
    import matplotlib.style

    matrices = [use for use in check.uses.values() if use.kind in MATRICES]
    rows = math.ceil((len(matrices) + 1) / COLUMNS)
    columns = math.ceil((len(matrices) + 1) / rows)
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
        for ax, use in zip(panels, matrices, strict=False):
            _draw(ax, check, use.sizes, use.exponents, DRAWN)
            _title(ax, check, use)
        _draw(panels[len(matrices)], check, check.network_sizes, check.network, NETWORK)
        panels[len(matrices)].set_title("network", loc="left")
        for ax in panels[len(matrices) + 1 :]:
            ax.remove()
        for number, ax in enumerate(panels[: len(matrices) + 1]):
            if number + columns > len(matrices):
                ax.set_xlabel(check.along)
                ax.tick_params(labelbottom=True)
        problem_count = len(check.problems)
        problem_text = f"{problem_count} problem{'s' * (problem_count != 1)}" if problem_count else "no problems"
        figure.suptitle(f"{check.scheme}, {check.phase!s}, {problem_text}", x=0.01, ha="left")
    return figure


def _draw(
    ax: Any,
    check: WidthCheck,
    sizes: Mapping[str, Tensor],
    powers: Mapping[str, Estimate],
    drawn: Mapping[str, tuple[str, str, str]],
) -> None:
    """Draw seeds as points, and fitted lines with their powers in the legend."""
    from matplotlib.ticker import NullFormatter, NullLocator

    widths = torch.tensor(check.sizes, dtype=torch.float64)
    for key, (label, color, marker) in drawn.items():
        values, power = sizes[key].double(), float(powers[key])
        defined = (values > 0) & torch.isfinite(values)
        if not bool(defined.any()) or math.isnan(power):
            continue
        widths_of_values = widths[:, None].expand_as(values)[defined]
        ax.plot(widths_of_values, values[defined], marker, color=color, markersize=2.5, alpha=0.7)
        middle = (values[defined].log() - power * widths_of_values.log()).mean()
        ax.plot(widths, (middle + power * widths.log()).exp(), color=color, linewidth=1, label=f"{label} {power:+.2f}")
    ax.set(xscale="log", yscale="log", xticks=check.sizes)
    ax.set_xticklabels([str(width) for width in check.sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_formatter(NullFormatter())
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.55)  # room for the legend
    ax.legend(loc="upper left", fontsize=5.5, frameon=False, handlelength=1, borderaxespad=0.1, labelspacing=0.2)


def _title(ax: Any, check: WidthCheck, use: UseScaling) -> None:
    """Set the title: the parameter, and its first problem in red."""
    name = use.name.removesuffix(".weight")
    name = name if len(name) <= 19 else f"…{name[-18:]}"
    problems = [problem for problem in check.problems if use.parameter == problem.parameter]
    text = f"\n{problems[0].quantity} {float(problems[0].power):+.1f}" if problems else ""
    ax.set_title(
        f"{name} ({use.kind}){text}".replace("$", r"\$"),
        loc="left",
        fontsize=6.5,
        color=WRONG if problems else "black",
    )
