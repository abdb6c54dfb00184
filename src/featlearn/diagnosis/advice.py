"""From a diagnosis to changes that make training richer or lazier.

See Xu & Ziyin 2024, Cor. 1; Shan & Bordelon 2021b, Sec. 4.2; Beaglehole et al. 2024, Sec. 5.1.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.loss_kind import SQUARE
from featlearn.diagnosis.trial import Bench, Trial, bench_of, isolated, rebuilt, try_change
from featlearn.diagnosis.verdict import Diagnosis, diagnose
from featlearn.diagnosis.words import plain_number
from featlearn.errors import InputValueError
from featlearn.record import Run
from featlearn.steer import ScaledOutput, scale_init, scale_output

__all__ = ["Advice", "Change", "advise"]

Direction = Literal["rich", "lazy"]
EXPONENT = 0.74
"""The odds gap / (1 - gap) go about as the divisor of the output to this power: fitted to ReLU networks on digits,
divisors from 0.01 to 30, gaps from 0.11 to 0.98. Smooth networks are steeper where they are lazy, so that this goes
further than they need."""
WANTED = {"rich": 0.7, "lazy": 0.05}
"""The gap that is aimed at: well beyond the thresholds of a diagnosis."""
NEAREST = 0.99
"""A gap above is taken for this one: there it says no more how far it is to lazy training."""
GUESS = 100.0
SMALLEST, LARGEST = 3.0, 1000.0
RATES = (1.0, 0.25, 1 / 16)
"""Further factors of the learning rate that are tried in turn: a grown kernel needs a smaller step."""
CURVED = 1e-2
"""Relative difference of the gap through the link and the plain one from which the link is no linear function."""
POWER = 0.02
"""Relative deviation up to which outputs are a power of the scale of the weights."""
GRADIENT_STEPS = ("SGD", "ASGD")
"""Optimizers whose steps are proportional to the gradient; those of Adam and its kin do not know its size."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One way to go; the changes of an advice are alternatives, not steps."""

    text: str
    """what to change, with the learning rate"""
    kind: Literal["unfreeze", "scale output", "scale first weights"]
    factor: float
    """multiplier of the output, or of the first weights; 1 for "unfreeze" """
    rate_factor: float
    """multiplier of the learning rate, for the optimizer of the run"""
    expect: str
    because: str
    command: str
    """a line of shell or Python that does all of it"""
    tried: Trial | None = None
    """what a trial of a few steps gave; None if it was not tried"""
    not_tried: str = ""
    """why it was not tried"""

    def apply(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the changed model and a new optimizer of the same class for it, with its rates set.

        Args:
            model: The untrained network. Its parameters are shared; "scale first weights" changes them in place.
            optimizer: Its optimizer, from which class and settings are taken.
        """
        if self.kind == "unfreeze":
            return model, _with_all(model, optimizer)
        if self.kind == "scale first weights":
            scale_init(model, self.factor)
        else:
            model = scale_output(model, self.factor)
        changed = rebuilt(optimizer, list)
        for group in changed.param_groups:
            group["lr"] = group["lr"] * self.rate_factor
            if group.get("weight_decay") and self.rate_factor > 1:
                group["weight_decay"] /= self.rate_factor  # the decay of a step stays as it was
            if "eps" in group and self.kind == "scale output":
                group["eps"] *= min(self.factor, 1.0)  # gradients shrink with the output
        return model, changed

    def __str__(self) -> str:
        tried = str(self.tried) if self.tried is not None else f"not tried: {self.not_tried}"
        return f"{self.text}\n    {self.command}\n    {tried}\n    expect: {self.expect}\n    because: {self.because}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change in a run."""

    toward: Direction
    regime: str
    """what the run was"""
    changes: tuple[Change, ...]
    """alternatives, the first one first; empty if nothing has to or can be changed"""
    note: str

    def __str__(self) -> str:
        head = f"The run was {self.regime}. {self.note}"
        if self.regime == "cannot tell":
            head = f"It is not known whether the run was lazy or rich. {self.note}"
        return "\n".join([head, *(f"  {i}. {change}" for i, change in enumerate(self.changes, 1))])


def advise(
    run: Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]] | Diagnosis,
    toward: Direction | None = None,
) -> Advice:
    """Return what to change to make a run richer or lazier, each change tried for a few steps where that is possible.

    Dividing the output by gamma, with the kernel times the learning rate kept, raises the share of the target in the
    speed of training over that of the first kernel by gamma^2 (Xu & Ziyin 2024, Cor. 1 and Eq. 15). The factor is
    estimated from the linearization gap. Diagnose the new run, and repeat if the change was too small.

    A change is tried on a copy of the network, from its first weights: 40 steps at most on the probe, with the
    optimizer of the run, below two seconds of CPU together. One that does not keep its promise is not returned. The
    network is only known to `watch.run`, in the process of its training; for a run on disk nothing can be tried.

    Args:
        run: A run, its path, several runs that differ in their seed, or a diagnosis.
        toward: "rich" or "lazy".
    """
    diagnosis = run if isinstance(run, Diagnosis) else diagnose(run)
    if toward not in ("rich", "lazy"):
        passed = "toward is missing" if toward is None else f"toward={toward!r}"
        raise InputValueError(
            f'{passed}, expected a direction: toward="rich" to learn features, toward="lazy" to keep those of the '
            f"start. The regime of this run: {diagnosis.regime}."
        )
    if diagnosis.regime == toward:
        return Advice(toward=toward, regime=diagnosis.regime, changes=(), note="To keep it so, nothing has to change.")
    findings = diagnosis.findings[0]
    if toward == "rich" and findings.linear and not _frozen(findings):
        note = "The model is linear in its trained weights and cannot learn features: add a hidden layer before them."
        return Advice(toward=toward, regime=diagnosis.regime, changes=(), note=note)
    bench = bench_of(findings)
    candidates, failures = list(_candidates(diagnosis, toward, bench)), list[str]()
    if isinstance(bench, str):
        changes = tuple(replace(change, not_tried=bench) for change in candidates)
    else:
        trials = [_tried(change, bench, toward) for change in candidates]
        changes = tuple(trial for trial in trials if isinstance(trial, Change))
        failures = [trial for trial in trials if isinstance(trial, str)]
    changes = tuple(
        replace(change, command=_python(toward, place)) if change.command.startswith("model,") else change
        for place, change in enumerate(changes)
    )
    note = f"To make it {toward}, make any one of these changes."
    if diagnosis.regime == "cannot tell":
        note += " They are a guess."
    if not changes and failures:
        note = f"A change of the output or of the first weights fails on a copy: {failures[0]}."
    elif not changes and candidates:
        tried = "The change that was tried" if len(candidates) == 1 else f"None of {len(candidates)} changes tried"
        note = f"{tried} for a few steps {'did not keep' if len(candidates) == 1 else 'kept'} its promise."
    elif not changes and _unknown_loss(findings):
        note = "Pass loss= to fl.watch: it depends on the loss whether multiplying the output changes the regime."
    elif not changes:
        factor = _output_factor(diagnosis, toward)
        rate = factor ** -_rate_power(findings)
        note = (
            f"To make it {toward}, multiply the input of the model's output function (softmax, sigmoid, exp) by "
            f"{plain_number(factor)} and the learning rate {_by(rate)} (not tried)."
        )
    return Advice(toward=toward, regime=diagnosis.regime, changes=changes, note=note)


def next_step(diagnosis: Diagnosis) -> str:
    """Return one piece of advice for a diagnosis, in a sentence."""
    if diagnosis.diverged or "Lower the learning rate" in diagnosis.headline:
        return "Lower the learning rate."
    if diagnosis.so_far:
        return "Train longer, then diagnose again."
    if diagnosis.findings[0].run_data.dead:
        return "Lower the learning rate, or change the first weights and biases, so that gradients reach all layers."
    if not diagnosis.gap.known:
        return "See diagnosis.full for what is missing."
    if diagnosis.regime in ("rich", "lazy then rich") and diagnosis.helped != "no":
        return _how_to_see(diagnosis) or "Nothing has to change."
    if diagnosis.regime != "lazy" and diagnosis.useful.nothing_learnable:
        return "Check the targets, or train on more data: unseen data is predicted hardly better than by a constant."
    toward: Direction = "lazy" if diagnosis.regime in ("rich", "lazy then rich") else "rich"
    needless = "Features were not needed here. " if toward == "lazy" else ""
    advice = advise(diagnosis, toward)
    if not advice.changes:
        return f"{needless}{advice.note}"
    change = advice.changes[0]
    tried = str(change.tried) if change.tried is not None else "not tried"
    purpose = "To learn features" if toward == "rich" else "To train a lazy network instead"
    call = change.command if change.command.startswith("featlearn") else f'fl.advise(run, "{toward}")'
    text = change.text[:1].lower() + change.text[1:].removesuffix(".")
    return f"{needless}{purpose}, {text} ({tried}): `{call}`."


def _how_to_see(diagnosis: Diagnosis) -> str:
    """Return what to pass to `fl.watch` to see whether features helped; empty if that is known, or nothing helps."""
    useful = diagnosis.useful
    resolvable = math.isfinite(useful.first) and not useful.worse_than_constant
    resolvable = resolvable or (math.isfinite(useful.network) and useful.learned is None)
    if diagnosis.helped == "cannot tell" and resolvable:
        return "Pass more test data to fl.watch (test=) to see whether that helped."
    return useful.remedy


def _tried(change: Change, bench: Bench, toward: Direction) -> Change | str | None:
    """Return the change with its trial, at the largest rate at which it keeps its promise.

    None if it does at none; the message of the error if it cannot be made.
    """
    for share in RATES:
        slower = _at_rate(change, share)
        trial = try_change(bench, slower.apply)
        if isinstance(trial, str):
            return trial
        if trial.keeps_promise(toward):
            return replace(slower, tried=trial)
    return None


def _at_rate(change: Change, share: float) -> Change:
    """Return the change with its learning rate multiplied once more."""
    if share == 1:
        return change
    rate = change.rate_factor * share
    return replace(change, rate_factor=rate, text=change.text.replace(_by(change.rate_factor), _by(rate)))


def _candidates(diagnosis: Diagnosis, toward: Direction, bench: Bench | str) -> Iterator[Change]:
    findings = diagnosis.findings[0]
    frozen = _frozen(findings)
    if toward == "rich" and frozen:
        yield Change(
            text=f"Train the {frozen} frozen parameters too.",
            kind="unfreeze",
            factor=1.0,
            rate_factor=1.0,
            expect="the gap rises from zero: with a frozen body the network is linear in what is trained",
            because="a trained head on fixed features learns no features, whatever its scale",
            command=_python(toward),
        )
        if findings.linear:
            return
    factor = _output_factor(diagnosis, toward)
    squared = findings.run_data.loss_is_known and findings.run_data.loss_kind is SQUARE
    reason = "Xu & Ziyin 2024, Eq. 15: the feature term over the kernel term goes as 1 / factor^2"
    if squared:
        reason += "; on squared error the same as labels divided by the factor (Shan & Bordelon 2021b, Sec. 4.2)"
    rate = factor ** -_rate_power(findings)
    expect = "at first the outputs move as fast as before; then the kernel grows and rotates to the task"
    if toward == "lazy":
        expect = "at first the outputs move as fast as before, and the kernel stays; it may take longer"
    if not _output_function(findings) and not _unknown_loss(findings):
        yield Change(
            text=f"Multiply the output by {plain_number(factor)} and the learning rate {_by(rate)}.",
            kind="scale output",
            factor=factor,
            rate_factor=rate,
            expect=expect,
            because=reason,
            command=_command(findings, factor) or _python(toward),
        )
    degree = math.nan if isinstance(bench, str) else _degree(bench)
    if degree > 1:
        sigma = factor ** (1 / degree)
        rate = sigma ** ((1 - degree) * _rate_power(findings))
        yield Change(
            text=f"Multiply the first weights by {plain_number(sigma)} and the learning rate {_by(rate)}.",
            kind="scale first weights",
            factor=sigma,
            rate_factor=rate,
            expect=f"{expect}; the first outputs are multiplied by {plain_number(factor)}, too",
            because=f"measured: weights times sigma give outputs times sigma^{degree:.2g} (Beaglehole et al. 2024, "
            "Sec. 5.1)",
            command=_python(toward),
        )


def _by(rate: float) -> str:
    return f"by {plain_number(rate)}"


def _python(toward: Direction, place: int = 0) -> str:
    return f'model, optimizer = fl.advise(run, "{toward}").changes[{place}].apply(model, optimizer)'


def _command(findings: Findings, factor: float) -> str:
    """Return the shell command of a run that `featlearn diagnose` made; empty for others."""
    settings = findings.run.config.get("settings")
    if not isinstance(settings, dict) or not settings.keys() >= {"subject", "output_scale", "optimizer"}:
        return ""
    scale = settings["output_scale"]
    subject = f" {settings['subject']}" if settings["subject"] else ""
    return f"featlearn diagnose{subject} --output-scale {factor * (1.0 if scale is None else scale):.2g}"


def _output_factor(diagnosis: Diagnosis, toward: Direction) -> float:
    """Return the multiplier of the output, rounded to two digits."""
    gap = float(diagnosis.numbers["gap"])
    divisor = GUESS if toward == "rich" else 1 / GUESS
    if math.isfinite(gap):
        divisor = (_odds(WANTED[toward]) / max(_odds(min(gap, NEAREST)), 1e-12)) ** (1 / EXPONENT)
    if toward == "rich":
        return float(f"{1 / min(max(divisor, SMALLEST), LARGEST):.2g}")
    return float(f"{min(max(1 / divisor, SMALLEST), 10 * LARGEST):.2g}")


def _odds(share: float) -> float:
    return share / (1 - share)


def _rate_power(findings: Findings) -> int:
    """Return the power of the output's factor that divides the learning rate: 2 for SGD, 1 for Adam and its kin."""
    name = findings.run_data.optimizer[0]
    return 2 if name in GRADIENT_STEPS or not name else 1


def _unknown_loss(findings: Findings) -> bool:
    """Return whether the run was trained on a loss of its own, of which nothing is known."""
    run_data, network = findings.run_data, findings.run.network
    passed = network is not None and network.loss is not None
    return run_data.curve("loss") is not None and not run_data.loss_is_known and not passed


def _output_function(findings: Findings) -> bool:
    """Return whether the model itself applies a function, such as softmax, after its last trained map."""
    network = findings.run.network
    readout = findings.run.config.get("readout") if network is None else network.readout
    through, plain = findings.run_data.last("gap/link"), findings.run_data.last("gap/probe")
    # A linear function, such as a factor, leaves both gaps the same.
    return readout is None and abs(through - plain) > CURVED * max(through, plain)


def _frozen(findings: Findings) -> int:
    """Return the number of frozen parameters of the network, copies that only center outputs left out."""
    network = findings.run.network
    if network is not None:
        return sum(p.numel() for p in _frozen_parameters(network.model))
    described = findings.run.config.get("model")
    if not isinstance(described, dict) or str(described.get("class", "")).endswith("ScaledOutput"):
        return 0
    whole, trained = described.get("parameters"), described.get("trainable")
    return whole - trained if isinstance(whole, int) and isinstance(trained, int) else 0


def _frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    copies = {
        id(p)
        for part in model.modules()
        if isinstance(part, ScaledOutput) and part.start is not None
        for p in part.start.parameters()
    }
    return [p for p in model.parameters() if not p.requires_grad and p.is_floating_point() and id(p) not in copies]


def _with_all(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer that trains the frozen parameters, too, with the settings of its first group."""
    frozen = _frozen_parameters(model)
    for parameter in frozen:
        parameter.requires_grad_(True)
    changed = rebuilt(optimizer, list)
    known = {id(p) for group in changed.param_groups for p in group["params"]}
    added: list[Tensor] = [p for p in frozen if id(p) not in known]
    if added:
        first = {key: value for key, value in changed.param_groups[0].items() if key != "params"}
        changed.add_param_group({"params": added, **first})
    return changed


def _degree(bench: Bench) -> float:
    """Return p if the outputs at weights times sigma are sigma^p times the outputs, by two passes; else nan."""
    sigma = 0.5
    try:
        with isolated(), torch.no_grad():
            model, _ = bench.start()
            model.eval()
            whole = bench.outputs(model).double()
            scaled = bench.outputs(scale_init(model, sigma)).double()
    except Exception:  # whatever a model of others raises on a copy: the change is then not offered
        return math.nan
    ratio = float((whole * scaled).sum() / whole.square().sum()) if bool(whole.any()) else 0.0
    if ratio <= 0 or float((scaled - ratio * whole).norm()) > POWER * float(scaled.norm()):
        return math.nan
    degree = math.log(ratio) / math.log(sigma)
    return degree if math.isfinite(degree) else math.nan
