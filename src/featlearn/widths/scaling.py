"""Result of a scale check: powers of the size, scheme, phase, and problems."""

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.theory.phases import Phase

if TYPE_CHECKING:
    from featlearn.widths.transfer import RateTransfer

CONTROLLED = "controlled divergence"
PHASES = {
    Phase.LEARNING: "features are learned at any {along}: the steps move them by as much as their own size",
    Phase.KERNEL: "at infinite {along} no features are learned: the outputs move and the features stay, a kernel "
    "machine",
    Phase.FROZEN: "at infinite {along} nothing is learned: steps move the outputs less and less",
    Phase.UNSTABLE: "at these rates there is no limit of infinite {along}: steps move the network further and further",
    CONTROLLED: "the logits grow with the {along}, which cross-entropy bears: gradients stay, and features are learned "
    "in the hidden layers",
}
MUP = 'muP, as fl.steer.parametrize(model, "mup", ...) sets it'
REMEDIES = {
    "width": MUP,
    "heads": MUP,
    "depth": "divide what each block adds by the depth; with SGD, also multiply the learning rates of blocks by it",
    "rank": "divide adapters by the rank; with SGD, by its square root",
    "experts": "learning rates that fall with the number of experts",
}
"""Usual remedies of a scheme that is unstable, by what the size is."""
COLUMNS = {
    "activation": "activation",
    "change": "change",
    "own_change": "own",
    "inherited_change": "inherited",
    "effect": "effect",
    "weight": "weight",
    "update": "update",
}
"""Printed exponents of a use -> column heads."""
OTHER_COLUMNS = {"activation": "activation", "change": "change", "effect": "effect", "gain": "gain", "rate": "rate"}
"""Those along other directions than the width, where gains and rates are all there is to read."""


@dataclass(frozen=True)
class Problem:
    """A parameter that does not follow the scheme."""

    parameter: str
    """name of the parameter or attention module, or "all" if all rates deviate"""
    layer: str
    quantity: str
    """"initial scale", "multiplier", "learning rate", "attention scale" or "all learning rates\""""
    power: Estimate
    """power of the size by which it is too large; negative if too small"""
    advice: str
    patch: str = ""
    """Python text to paste: an entry of the optimizer's parameter groups, or a line after the model is made"""
    tried: bool | None = None
    """whether the patch, run by the check, removed the problem; None if it cannot be run"""
    along: str = "width"

    def __str__(self) -> str:
        word = "too large" if float(self.power) > 0 else "too small"
        power = signed(self.power)
        return f"{self.parameter}: {self.quantity} is {word}, by the power {power} of the {self.along}; {self.advice}"


@dataclass(frozen=True)
class UseScaling:
    """How a use of a parameter scales: a row of the check."""

    name: str
    """name of the parameter; `name#2` for its second kind of use, `blocks.*.up.weight` for those of all blocks"""
    parameter: str
    layer: str
    """the module that holds the parameter"""
    op: str
    """the op that combines it with data, as the autograd graph names it"""
    kind: str
    """"input", "hidden", "output", "vector" or "finite", by the sides of its weight that grow; along the depth
    "branch output", "branch" or "outside", as they stand to the residual stream"""
    fan_in: tuple[int, ...]
    """by size"""
    fan_out: tuple[int, ...]
    exponents: Mapping[str, Estimate]
    """Powers of the size: `activation` at the start and its `change` (root mean squares of what the op gives), the
    parts of that change that are its `own_change` (by its own update) and `inherited_change` (by its inputs), `weight`
    and `update` (spectral norms, at the start and of the whole update), `kernel_motion` (relative, of the Gram matrix
    of what it gives), `effect` (what the first update moves, along the gradient), `factor` in the forward pass, `lr`,
    and `gain` and `rate`, which the scheme fixes. nan where sizes are zero."""
    expected: Mapping[str, float]
    """`gain` and `rate` of the scheme"""
    sizes: Mapping[str, Tensor]
    """what the powers are fitted to, (sizes, seeds)"""
    update_rule: str
    """"gradient", "signs" (as Adam), "Muon, spectral", "Muon, unit RMS", "Muon, 0.2 RMS" or "other\""""
    tied: bool = False
    is_vector: bool = False
    """whether it is added to or scales single units, as biases and gains"""
    is_readout: bool = False
    """whether it gives the network's output"""
    closes_branch: bool = False
    """whether its output is added to a residual stream"""


@dataclass(frozen=True)
class WidthCheck:
    """Scaling of a network with its size; `str()` gives a summary, `plot()` a figure."""

    scheme: str
    """along the width "standard", "ntk", "mean_field", "mup" or "other"; other directions have schemes of their own"""
    scheme_words: str
    nearest: str
    """the nearest scheme, with which powers are compared; equal to `scheme` unless that is "other\""""
    phase: Phase | str
    """of `theory.phases`: learning, kernel, frozen or unstable; or "controlled divergence\""""
    uses: Mapping[str, UseScaling]
    """every use of every parameter"""
    attention: Mapping[str, Mapping[str, Estimate]]
    """powers of `scale`, `logits` and their `change`, and of the size of a `head`, by module"""
    network: Mapping[str, Estimate]
    """powers of `output`, `output_change` and `kernel_motion` (relative, of the tangent kernel)"""
    network_sizes: Mapping[str, Tensor]
    """what the powers of the network are fitted to, (sizes, seeds)"""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    """special cases and limitations"""
    sizes: tuple[int, ...]
    seeds: int
    steps: int
    update: str
    """"proportional" to the gradient, or "normalized\""""
    along: str = "width"
    transfer: "RateTransfer | None" = None
    """with `transfer=True`: the best learning rate at each size"""

    @property
    def layers(self) -> dict[str, UseScaling]:
        """The use of the largest weight of each module."""
        layers: dict[str, UseScaling] = {}
        for use in self.uses.values():
            weight = use.fan_in[-1] * use.fan_out[-1]
            other = layers.get(use.layer)
            if other is None or (use.kind != "vector", weight) > (
                other.kind != "vector",
                other.fan_in[-1] * other.fan_out[-1],
            ):
                layers[use.layer] = use
        return layers

    def __str__(self) -> str:
        nearest_text = f"; the nearest is {self.nearest}" if self.scheme == "other" else ""
        lines = [f"scheme: {self.scheme}, {self.scheme_words}{nearest_text}"]
        lines += [f"phase: {self.phase!s}: {PHASES[self.phase].format(along=self.along)}"]
        if self.problems or self.phase != Phase.UNSTABLE:
            lines += [f"problems: {len(self.problems) or 'none'}", *_problem_lines(self.problems)]
        else:
            lines.append(
                f"problems: none relative to the {self.nearest} scheme; the scheme itself is unstable. Usual remedy: "
                f"{REMEDIES[self.along]}"
            )
        lines += [
            f"powers of the {self.along}, with standard errors:",
            *_table(self.uses, COLUMNS if self.along == "width" else OTHER_COLUMNS),
        ]
        network_text = ", ".join(f"{name.replace('_', ' ')} {signed(entry)}" for name, entry in self.network.items())
        lines.append(f"  network: {network_text}")
        for name, entry in self.attention.items():
            lines.append(
                f"  attention {name}: scale {signed(entry['scale'])}, logits {signed(entry['logits'])}, "
                f"their change {signed(entry['change'])}"
            )
        if self.transfer is not None:
            lines.append(str(self.transfer))
        lines += [f"note: {note}" for note in self.notes]
        sizes_text = ", ".join(map(str, self.sizes))
        lines.append(
            f"({self.along} {sizes_text}; {self.seeds} seed{'s' * (self.seeds != 1)}, {self.steps} steps, "
            f"updates {self.update})"
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
        shown = (
            "parameter",
            "layer",
            "op",
            "kind",
            "fan_in",
            "fan_out",
            "exponents",
            "expected",
            "update_rule",
            "tied",
        )
        uses = {name: {key: _plain(getattr(use, key)) for key in shown} for name, use in self.uses.items()}
        named = ("parameter", "layer", "quantity", "advice", "patch", "tried")
        problems = [
            {key: getattr(problem, key) for key in named}
            | {"power": float(problem.power), "stderr": _plain(float(problem.power.stderr))}
            for problem in self.problems
        ]
        whole = ("scheme", "nearest", "notes", "network", "attention", "along", "sizes", "seeds", "steps", "update")
        return {
            **{key: _plain(getattr(self, key)) for key in whole},
            "phase": str(self.phase),
            "problems": problems,
            "uses": uses,
            "transfer": None if self.transfer is None else self.transfer.entries,
        }


def signed(power: Estimate) -> str:
    """Format a power with sign and error, or a dash."""
    value, error = float(power), float(power.stderr)
    if math.isnan(value):
        return "-"
    text = f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    return text if math.isnan(error) else f"{text} ± {error:.2f}"


def _problem_lines(problems: tuple[Problem, ...]) -> list[str]:
    """Return lines of problems and patches, grouping equal problems of many parameters."""
    groups: dict[tuple[str, float, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.quantity, round(2 * float(problem.power)) / 2, problem.advice), []).append(problem)
    lines = []
    for (quantity, power, advice), group in groups.items():
        if len(group) < 3:
            lines += [f"  - {problem}" for problem in group]
        else:
            word = "too large" if power > 0 else "too small"
            names = ", ".join(problem.parameter for problem in group)
            lines.append(
                f"  - {len(group)} parameters: {quantity} is {word}, by the power {power:+g} of the {group[0].along}; "
                f"{advice} ({names})"
            )
        if group[0].patch:
            tried = {True: "tried: it removes the problem", False: "tried: the problem stays", None: "not tried"}
            ending = "" if len(group) < 2 else ", and the same for the others"
            lines.append(f"    change ({tried[group[0].tried]}){ending}:")
            lines += [f"      {line}" for line in group[0].patch.splitlines()]
    return lines


def _table(uses: Mapping[str, UseScaling], columns: Mapping[str, str]) -> list[str]:
    rows = [["parameter", "kind", *columns.values()]]
    for name, use in uses.items():
        if not use.is_vector and (columns is OTHER_COLUMNS or use.kind not in ("vector", "finite")):
            rows.append([name, use.kind, *(signed(use.exponents[key]) for key in columns)])
    size = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, size, strict=True)).rstrip() for row in rows]


def _wrap(line: str) -> str:
    """Wrap sentences to 100 columns, but not tables or code."""
    if "  " in line.strip() or line.startswith("      "):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, 100, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: estimates as mappings, nan and infinity as None."""
    if isinstance(value, Estimate):
        return {"value": _plain(float(value)), "stderr": _plain(float(value.stderr))}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
