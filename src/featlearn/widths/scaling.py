"""Result of a width check: powers of the width, scheme, phase, and problems."""

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
"""Printed exponents of a layer -> column heads."""


@dataclass(frozen=True)
class Problem:
    """A parameter that does not follow the scheme."""

    parameter: str
    """name of the parameter or attention module, or "all" if all rates deviate"""
    layer: str
    quantity: str
    """"initial scale", "multiplier", "learning rate", "attention scale" or "all learning rates\""""
    power: Estimate
    """power of the width by which it is too large; negative if too small"""
    advice: str

    def __str__(self) -> str:
        value = float(self.power)
        word = "too large" if value > 0 else "too small"
        power = signed(self.power)
        return f"{self.parameter}: {self.quantity} is {word}, by the power {power} of the width; {self.advice}"


@dataclass(frozen=True)
class LayerScaling:
    """Scaling of a layer with the width."""

    name: str
    kind: str
    """"input", "hidden", "output", "vector" or "finite", by the sides of its weight that grow with the width"""
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
    """rates of its other parameters, such as biases"""
    tied: bool = False


@dataclass(frozen=True)
class WidthCheck:
    """Scaling of a network with its width; `str()` gives a summary, `plot()` a figure."""

    scheme: str
    """"standard", "ntk", "mean_field", "mup" or "other\""""
    nearest: str
    """the nearest scheme, with which powers are compared; equal to `scheme` unless that is "other\""""
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
    """special cases and limitations"""
    widths: tuple[int, ...]
    seeds: int
    steps: int
    update: str
    """"proportional" to the gradient, or "normalized\""""

    def __str__(self) -> str:
        nearest_text = f"; the nearest is {self.nearest}" if self.scheme == "other" else ""
        head = f"scheme: {self.scheme}, {WORDS[self.scheme]}{nearest_text}"
        lines = [head, f"phase: {self.phase.value}: {PHASES[self.phase]}"]
        lines += [f"problems: {len(self.problems) or 'none'}", *(f"  - {line}" for line in _group_lines(self.problems))]
        lines += ["powers of the width, with standard errors:", *_table(self.layers)]
        network_text = ", ".join(f"{name.replace('_', ' ')} {signed(entry)}" for name, entry in self.network.items())
        lines.append(f"  network: {network_text}")
        for name, entry in self.attention.items():
            lines.append(
                f"  attention {name}: scale {signed(entry['scale'])}, logits {signed(entry['logits'])}, "
                f"their change {signed(entry['change'])}"
            )
        lines += [f"note: {note}" for note in self.notes]
        widths_text = ", ".join(map(str, self.widths))
        lines.append(
            f"({widths_text}; {self.seeds} seed{'s' * (self.seeds != 1)}, {self.steps} steps, updates {self.update})"
        )
        return "\n".join(_wrap(line) for line in lines)

    def plot(self) -> Any:
        """Plot sizes over the width, with a panel per layer, fitted lines, and powers; return the figure."""
        from featlearn.widths.size_figure import draw

        return draw(self)

    def to_json(self) -> str:
        """Return a JSON document; nan becomes null."""
        return json.dumps(self.entries, indent=1, allow_nan=False)

    @property
    def entries(self) -> dict[str, Any]:
        """Content of `to_json`."""
        layers = {
            name: {
                "kind": item.kind,
                "parameter": item.parameter,
                "exponents": _plain(item.exponents),
                "expected": {key: _number(value) for key, value in item.expected.items()},
                "others": _plain(item.others),
                "tied": item.tied,
            }
            for name, item in self.layers.items()
        }
        problems = [
            {
                "parameter": item.parameter,
                "layer": item.layer,
                "quantity": item.quantity,
                "power": float(item.power),
                "stderr": _number(float(item.power.stderr)),
                "advice": item.advice,
            }
            for item in self.problems
        ]
        return {
            "scheme": self.scheme,
            "nearest": self.nearest,
            "phase": self.phase.value,
            "problems": problems,
            "notes": list(self.notes),
            "network": _plain(self.network),
            "layers": layers,
            "attention": {name: _plain(item) for name, item in self.attention.items()},
            "widths": list(self.widths),
            "seeds": self.seeds,
            "steps": self.steps,
            "update": self.update,
        }


def signed(power: Estimate) -> str:
    """Format a power with sign and error, or a dash."""
    value, error = float(power), float(power.stderr)
    if math.isnan(value):
        return "-"
    text = f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    return text if math.isnan(error) else f"{text} ± {error:.2f}"


def _group_lines(problems: tuple[Problem, ...]) -> list[str]:
    """Return lines of problems, grouping equal problems of many layers."""
    groups: dict[tuple[str, float, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.quantity, round(2 * float(problem.power)) / 2, problem.advice), []).append(problem)
    lines = []
    for (quantity, power, advice), group in groups.items():
        if len(group) < 3:
            lines += [str(problem) for problem in group]
        else:
            word = "too large" if power > 0 else "too small"
            names = ", ".join(problem.parameter for problem in group)
            lines.append(
                f"{len(group)} parameters: {quantity} is {word}, by the power {power:+g} of the width; {advice}"
                f" ({names})"
            )
    return lines


def _table(layers: Mapping[str, LayerScaling]) -> list[str]:
    rows = [["layer", "kind", *COLUMNS.values()]]
    for name, layer in layers.items():
        rows.append([name or "(network)", layer.kind, *(signed(layer.exponents[key]) for key in COLUMNS)])
    size = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, size, strict=True)).rstrip() for row in rows]


def _wrap(line: str) -> str:
    """Wrap sentences to 100 columns, but not tables."""
    if "  " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, 100, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(powers: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: {"value": _number(float(p)), "stderr": _number(float(p.stderr))} for name, p in powers.items()}
