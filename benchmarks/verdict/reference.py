"""The linearization gap and the change of the kernel, apart from `fl.diagnose`: forward mode of torch.func in double.

    gap = |f(now) - f(start) - J(start) (theta_now - theta_start)| / |f(now) - f(start)|

outputs centered over samples, buffers as they are now in all terms, in eval mode.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.verdict.constructions import Trial
from benchmarks.verdict.training import State, Trained, measured_loss


def linearization_gap(model: nn.Module, start: State, now: State, x: Tensor) -> float:
    """The share of the change of centered outputs from `start` to `now` that the linearization at `start` misses.

    nan if the outputs did not change.
    """
    network = copy.deepcopy(model).double().eval()
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    others = {name: value.double() if value.is_floating_point() else value for name, value in now.items()}
    first, last = ({name: state[name].double() for name in trained} for state in (start, now))

    def outputs(parameters: State) -> Tensor:
        f = torch.func.functional_call(network, {**others, **parameters}, (x.double(),))
        return f - f.mean(0)

    with torch.no_grad():
        before, linear = torch.func.jvp(outputs, (first,), ({name: last[name] - first[name] for name in trained},))
        change = outputs(last) - before
    size = float(change.norm())
    return float((change - linear).norm()) / size if size > 0 else math.nan


def shrunk(initial: State, now: State) -> State:
    """The first weights, each tensor times the share of it that is left: <now, first> / <first, first>, within 0 and 1.

    Weight decay shrinks weights without learning; from here on only the rest of their change counts.
    """
    found = {}
    for name, first in initial.items():
        size = float(first.double().square().sum()) if first.is_floating_point() else 0.0
        left = float((now[name].double() * first.double()).sum()) / size if size else 1.0
        found[name] = first * min(max(left, 0.0), 1.0) if first.is_floating_point() else first
    return found


def kernels(model: nn.Module, states: list[State], x: Tensor) -> list[Tensor]:
    """Centered tangent kernels, a mean over outputs, with the buffers of the last state."""
    network, found = copy.deepcopy(model).double().eval(), []
    weights = {name for name, _ in network.named_parameters()}
    for state in states:
        network.load_state_dict({name: (state if name in weights else states[-1])[name] for name in state})
        kernel = fl.ntk(network, x.double())
        rows = kernel - kernel.mean(0, keepdim=True)
        found.append(rows - rows.mean(1, keepdim=True))
    return found


def references(trial: Trial, run: Trained) -> dict[str, Any]:
    """All numbers that the table holds beside those of the diagnosis."""
    model, initial, final = trial.model, run.initial, run.final
    probe, test = trial.probed.x, trial.test.x
    base = shrunk(initial, final)
    first, last = kernels(model, [initial, final], probe)
    return {
        "reference_gap_probe": linearization_gap(model, initial, final, probe),
        "reference_gap_test": linearization_gap(model, initial, final, test),
        "reference_gap_unshrunk": linearization_gap(model, base, final, probe),
        "reference_gap_unshrunk_test": linearization_gap(model, base, final, test),
        "reference_turning": 1 - float((first * last).sum() / (first.norm() * last.norm())),
        "reference_growth": float(last.norm() / first.norm()),
        "weights_left": _weights_left(model, initial, final),
        "curve": _curve(trial, run),
    }


def _weights_left(model: nn.Module, initial: State, final: State) -> float:
    """<now, first> / <first, first> over all trained weights."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    product = sum(float((initial[n].double() * final[n].double()).sum()) for n in names)
    return product / max(sum(float(initial[n].double().square().sum()) for n in names), 1e-300)


def _bases(initial: State, now: State) -> list[State]:
    return [initial, shrunk(initial, now)]


def _curve(trial: Trial, run: Trained) -> list[list[float]]:
    """[step, loss on the probe, on the test points, gap on the test points, gap unshrunk] at steps that are kept."""
    found = []
    for step, state in run.states.items():
        trial.model.load_state_dict(state)
        losses = [measured_loss(trial).plain, measured_loss(trial, trial.test).plain]
        gaps = [linearization_gap(trial.model, base, state, trial.test.x) for base in _bases(run.initial, state)]
        found.append([step, *losses, *gaps])
    trial.model.load_state_dict(run.final)
    return found
