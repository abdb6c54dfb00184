"""Fit powers of the size to the uses of parameters."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.widths.fits import power, product_power
from featlearn.widths.scaling import UseScaling
from featlearn.widths.schemes import Update
from featlearn.widths.size_runs import SIGNS, SizeRun

GROWS = 1.5
"""Ratio of two sizes, at the largest and smallest size, above which a size grows."""
Runs = Sequence[Sequence[SizeRun]]
"""by size, by seed"""
FITTED: tuple[str, ...] = (
    "activation",
    "change",
    "own_change",
    "inherited_change",
    "effect",
    "weight",
    "update",
    "kernel_motion",
)
FITTED += ("gain", "factor", "lr")


def merge_repeated(runs: Runs) -> list[list[SizeRun]]:
    """Merge uses of blocks whose number differs between sizes, as `blocks.*.up.weight`, by geometric means."""
    names = [set(seed_runs[0].uses) for seed_runs in runs]
    starred: set[str] = set()
    while True:  # outer containers first: what they hold is then compared under one name
        children: dict[str, list[set[str]]] = defaultdict(lambda: [set() for _ in names])
        for k, several in enumerate(names):
            for name in several:
                parts = _pattern(name, starred).split(".")
                for place, part in enumerate(parts):
                    if part.isdigit():
                        children[".".join(parts[:place])][k].add(part)
        grown = [prefix for prefix, sets in children.items() if any(indices != sets[0] for indices in sets)]
        if not grown:
            break
        starred.add(min(grown, key=lambda prefix: prefix.count(".") + bool(prefix)))
    if not starred:
        return [list(seed_runs) for seed_runs in runs]
    singles = [_single_members(seed_runs[0], starred) for seed_runs in runs]
    everywhere = set.intersection(*(set(members) for members in singles))
    keys = [{members[signature]: singles[0][signature] for signature in everywhere} for members in singles]
    return [[_merged(run, starred, kept) for run in seed_runs] for seed_runs, kept in zip(runs, keys, strict=True)]


def _pattern(name: str, starred: set[str], kept: Mapping[str, str] | None = None) -> str:
    """Return a name with a star for the indices of containers that grow; `kept` members have names of their own."""
    parts: list[str] = []
    for part in name.split("."):
        member = ".".join([*parts, part])
        if kept and member in kept:
            parts = kept[member].split(".")
        else:
            parts.append("*" if part.isdigit() and ".".join(parts) in starred else part)
    return ".".join(parts)


def _single_members(run: SizeRun, starred: set[str]) -> dict[Any, str]:
    """Return members of growing containers that are unlike all others, as a first layer before blocks."""
    members: dict[str, list[Any]] = defaultdict(list)
    for name, use in run.uses.items():
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[:place]) in starred:
                rest = ".".join(parts[place + 1 :])
                members[".".join(parts[: place + 1])].append((rest, use.op, use.fan_in, use.fan_out))
    signatures = {member: (member.rpartition(".")[0], tuple(entries)) for member, entries in members.items()}
    counts = Counter(signatures.values())
    return {signature: member for member, signature in signatures.items() if counts[signature] == 1}


def _merged(run: SizeRun, starred: set[str], kept: Mapping[str, str]) -> SizeRun:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in run.uses:
        groups[_pattern(name, starred, kept)].append(name)
    merged = replace(run, uses={}, sizes={}, tied={key for key, names in groups.items() if run.tied & set(names)})
    for key, names in groups.items():
        first = run.uses[names[0]]
        merged.uses[key] = replace(first, name=key, parameter=_pattern(first.parameter, starred, kept))
        entries = [run.sizes[name] for name in names if name in run.sizes]
        shared = set.intersection(*map(set, entries)) if entries else set()
        logs = {
            quantity: [math.log(e[quantity]) if e[quantity] > 0 else -math.inf for e in entries] for quantity in shared
        }
        merged.sizes[key] = {quantity: math.exp(sum(values) / len(values)) for quantity, values in logs.items()}
    return merged


def fit_uses(runs: Runs, sizes: Sequence[int], update: Update) -> dict[str, UseScaling]:
    """Fit the powers of all uses that every size has."""
    first, last = runs[0][0], runs[-1][0]
    rows = {}
    for name, use in last.uses.items():
        if not all(name in run.uses for seed_runs in runs for run in seed_runs):
            continue
        values = partial(_values, runs, name)
        rule = _update_rule(values, use.fan_in, use.fan_out, update)
        fitted = {key: values(key) for key in FITTED}
        fitted["rate"] = values({"gradient": "rate_gradient", "signs": "rate_signs"}.get(rule, "rate_spectral"))
        exponents = {key: power(entry, sizes) for key, entry in fitted.items()}
        rows[name] = UseScaling(
            name=name,
            parameter=use.parameter,
            layer=use.parameter.rpartition(".")[0],
            op=use.op,
            kind=_kind(first.uses[name], use),
            fan_in=tuple(seed_runs[0].uses[name].fan_in for seed_runs in runs),
            fan_out=tuple(seed_runs[0].uses[name].fan_out for seed_runs in runs),
            exponents=exponents,
            expected={},
            sizes=fitted | {"error": values("output_gradient"), "descent": values("descent")},
            update_rule=rule,
            tied=name in last.tied,
            is_vector=use.is_vector,
            is_readout=use.is_readout,
            closes_branch=use.closes_branch,
        )
    return rows


def _values(runs: Runs, name: str, quantity: str) -> Tensor:
    return torch.tensor([[run.sizes.get(name, {}).get(quantity, math.nan) for run in seed_runs] for seed_runs in runs])


def _kind(first: Any, last: Any) -> str:
    in_grows, out_grows = last.fan_in > GROWS * first.fan_in, last.fan_out > GROWS * first.fan_out
    if last.is_vector:
        return "vector" if out_grows else "finite"
    return {(True, True): "hidden", (False, True): "input", (True, False): "output"}.get(
        (in_grows, out_grows), "finite"
    )


def _update_rule(values: Any, fan_in: int, fan_out: int, update: Update) -> str:
    """Return what updates of a parameter follow: the gradient, its signs, or another rule, such as Muon's."""
    if update == "proportional":
        return "gradient"
    along = values("along_signs")
    known = along[torch.isfinite(along)]
    if not known.numel() or bool((known > SIGNS).all()):
        return "signs"
    spectral, rms, lr = values("update_spectral")[-1, 0], values("update_rms")[-1, 0], values("lr")[-1, 0]
    # the stable rank of an orthogonal matrix is its smaller side, that of a gradient is small
    if not lr or float(rms**2 * fan_in * fan_out / spectral**2) < 6:
        return "other"
    by_lr = float(spectral / lr) / max(fan_in, fan_out) ** 0.5
    widest = float((values("update_spectral") / values("lr")).nanmean(1)[0] / (spectral / lr))
    if 0.7 < widest < 1.4:
        return "Muon, spectral"
    return "Muon, unit RMS" if 0.6 < by_lr < 1.5 else "Muon, 0.2 RMS" if 0.12 < by_lr < 0.3 else "Muon"


def relative_effect(row: UseScaling, sizes: Sequence[int], update: Update) -> Estimate:
    """Fit the effect of the first update for errors of size one."""
    parts = [(1.0, row.sizes["effect"])]
    return product_power([*parts, (-1.0, row.sizes["error"])] if update == "proportional" else parts, sizes)


def relative_descent(row: UseScaling, sizes: Sequence[int], update: Update) -> Estimate:
    """Fit the change of the loss by the first update for errors of size one."""
    factor = -2.0 if update == "proportional" else -1.0
    return product_power([(1.0, row.sizes["descent"]), (factor, row.sizes["error"])], sizes)


def fit_attention(runs: Runs, sizes: Sequence[int]) -> dict[str, dict[str, Estimate]]:
    """Fit powers of attention, by module."""
    everywhere = [run for seed_runs in runs for run in seed_runs]
    modules = [module for module in runs[-1][0].attention if all(module in run.attention for run in everywhere)]

    def values(module: str, key: str) -> Tensor:
        return torch.tensor([[run.attention[module].get(key, math.nan) for run in seed_runs] for seed_runs in runs])

    keys = ("scale", "logits", "change", "head")
    return {module: {key: power(values(module, key), sizes) for key in keys} for module in modules}
