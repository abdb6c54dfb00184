"""What a width check found: powers of the width, the scheme, the phase, and which layer is off."""

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.theory.phases import Phase
from featlearn.widths.schemes import WORDS

PHASES = {
    Phase.LEARNING: "features are learned at infinite width: the steps move them by as much as their own size",
    Phase.KERNEL: "at infinite width no features are learned: the outputs move and the features stay, a kernel machine",
    Phase.FROZEN: "at infinite width nothing is learned: steps move the outputs less and less",
    Phase.UNSTABLE: "at these rates there is no infinite-width limit: steps move the network further and further",
}
COLUMNS = {
    "activation": "activation",
    "change": "change",
    "effect": "effect",
    "weight": "weight",
    "update": "update",
    "kernel_motion": "kernel",
}
"""Exponents of a layer that are printed -> heads."""


@dataclass(frozen=True)
class Problem:
    """A parameter that does not follow the scheme."""

    parameter: str
    """its name; the module of an attention, "all" where rates are off together"""
    layer: str
    quantity: str
    """"initial scale", "multiplier", "learning rate", "attention scale" or "all learning rates\""""
    power: Estimate
    """the power of the width by which it is too large; negative where it is too small"""
    advice: str

    def __str__(self) -> str:
        value = float(self.power)
        word = "too large" if value > 0 else "too small"
        power = signed(self.power)
        return f"{self.parameter}: {self.quantity} is {word}, by the power {power} of the width; {self.advice}"


@dataclass(frozen=True)
class LayerScaling:
    """How one layer scales with the width."""

    name: str
    kind: str
    """"input", "hidden", "output", "vector" or "finite", by which sides of its weight grow with the width"""
    parameter: str
    """its weight"""
    exponents: Mapping[str, Estimate]
    """Powers of the width: `activation` at the start and its `change` (root mean squares of what the layer gives),
    `weight` and `update` (spectral norms, at the start and of the whole update), `kernel_motion` (relative, of the Gram
    matrix of what it gives), `effect` (what the first update moves, along the gradient), `gain` and `rate`, which the
    scheme fixes. nan where sizes are zero."""
    expected: Mapping[str, float]
    """`gain` and `rate` of the scheme"""
    sizes: Mapping[str, Tensor]
    """what the powers are fitted to, (widths, seeds)"""
    others: Mapping[str, Estimate]
    """rates of its further parameters, biases for example"""
    tied: bool = False


@dataclass(frozen=True)
class WidthCheck:
    """How a network scales with its width; `str()` says it in words, `plot()` draws it."""

    scheme: str
    """"standard", "ntk", "mean_field", "mup" or "other\""""
    nearest: str
    """the scheme that powers are compared with; that of `scheme`, unless most layers deviate from it"""
    phase: Phase
    """of `theory.phases`: learning, kernel, frozen or unstable"""
    layers: Mapping[str, LayerScaling]
    attention: Mapping[str, Mapping[str, Estimate]]
    """powers of `scale`, `logits` and their `change`, and of the size of a `head`, by module"""
    network: Mapping[str, Estimate]
    """powers of `output`, `output_change` and `kernel_motion` (relative, of the tangent kernel)"""
    sizes: Mapping[str, Tensor]
    """what the powers of the network are fitted to, (widths, seeds)"""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    """known cases, and what could not be told"""
    widths: tuple[int, ...]
    seeds: int
    steps: int
    update: str
    """"proportional" to the gradient, or "normalized\""""

    def __str__(self) -> str:
        near = f"; the nearest is {self.nearest}" if self.scheme == "other" else ""
        head = f"scheme: {self.scheme}, {WORDS[self.scheme]}{near}"
        lines = [head, f"phase: {self.phase.value}: {PHASES[self.phase]}"]
        lines += [f"problems: {len(self.problems) or 'none'}", *(f"  - {line}" for line in _group_lines(self.problems))]
        lines += ["powers of the width, with standard errors:", *_table(self.layers)]
        told = ", ".join(f"{name.replace('_', ' ')} {signed(one)}" for name, one in self.network.items())
        lines.append(f"  network: {told}")
        for name, one in self.attention.items():
            lines.append(
                f"  attention {name}: scale {signed(one['scale'])}, logits {signed(one['logits'])}, "
                f"their change {signed(one['change'])}"
            )
        lines += [f"note: {note}" for note in self.notes]
        shown = ", ".join(map(str, self.widths))
        lines.append(
            f"({shown}; {self.seeds} seed{'s' * (self.seeds != 1)}, {self.steps} steps, updates {self.update})"
        )
        return "\n".join(_wrap(line) for line in lines)

    def plot(self) -> Any:
        """Sizes over the width, one panel a layer, with fitted lines and their powers; returns the figure."""
        from featlearn.widths.size_figure import draw

        return draw(self)

    def to_json(self) -> str:
        """One JSON document; nan becomes null."""
        return json.dumps(self.entries, indent=1, allow_nan=False)

    @property
    def entries(self) -> dict[str, Any]:
        """What `to_json` writes."""
        layers = {
            name: {
                "kind": one.kind,
                "parameter": one.parameter,
                "exponents": _plain(one.exponents),
                "expected": {key: _number(value) for key, value in one.expected.items()},
                "others": _plain(one.others),
                "tied": one.tied,
            }
            for name, one in self.layers.items()
        }
        problems = [
            {
                "parameter": one.parameter,
                "layer": one.layer,
                "quantity": one.quantity,
                "power": float(one.power),
                "stderr": _number(float(one.power.stderr)),
                "advice": one.advice,
            }
            for one in self.problems
        ]
        return {
            "scheme": self.scheme,
            "nearest": self.nearest,
            "phase": self.phase.value,
            "problems": problems,
            "notes": list(self.notes),
            "network": _plain(self.network),
            "layers": layers,
            "attention": {name: _plain(one) for name, one in self.attention.items()},
            "widths": list(self.widths),
            "seeds": self.seeds,
            "steps": self.steps,
            "update": self.update,
        }


def signed(power: Estimate) -> str:
    """A power with its sign and error, or a dash."""
    value, error = float(power), float(power.stderr)
    if math.isnan(value):
        return "-"
    told = f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    return told if math.isnan(error) else f"{told} ± {error:.2f}"


def _group_lines(problems: tuple[Problem, ...]) -> list[str]:
    """One line for problems of many layers that are the same."""
    groups: dict[tuple[str, float, str], list[Problem]] = {}
    for one in problems:
        groups.setdefault((one.quantity, round(2 * float(one.power)) / 2, one.advice), []).append(one)
    lines = []
    for (quantity, power, advice), some in groups.items():
        if len(some) < 3:
            lines += [str(one) for one in some]
        else:
            word = "too large" if power > 0 else "too small"
            names = ", ".join(one.parameter for one in some)
            lines.append(
                f"{len(some)} parameters: {quantity} is {word}, by the power {power:+g} of the width; {advice}"
                f" ({names})"
            )
    return lines


def _table(layers: Mapping[str, LayerScaling]) -> list[str]:
    rows = [["layer", "kind", *COLUMNS.values()]]
    for name, one in layers.items():
        rows.append([name or "(network)", one.kind, *(signed(one.exponents[key]) for key in COLUMNS)])
    size = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, size, strict=True)).rstrip() for row in rows]


def _wrap(line: str) -> str:
    """Long sentences within 100 columns; tables as they are."""
    if "  " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, 100, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(powers: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: {"value": _number(float(one)), "stderr": _number(float(one.stderr))} for name, one in powers.items()}
