"""Try a change for a few steps on a copy of the watched network, before it is recommended."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from featlearn import losses
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.loss_kind import CROSS_ENTROPY
from featlearn.diagnosis.run_data import RunData, as_probabilities
from featlearn.errors import FeatlearnError
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, batch_size, call_model, map_tensors, read_output
from featlearn.quantities.linearization_gap import linearization_gap

STEPS = 40
"""Largest number of steps of a trial."""
FEWEST = 8
"""Fewest steps that show anything."""
WORK = 1.5e9
"""Multiply-adds of a trial, at most: below half a second on one CPU core. An advice takes up to four trials."""
SMALLEST_PROBE = 16
MOVES = 1.2
"""Factor by which the gap must differ from that of the unchanged network."""
SATURATED = 0.9
"""A gap above which it cannot show more."""

Apply = Callable[[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]
Objective = Callable[[Tensor], Tensor]


class WatchedPart(Protocol):
    """Samples that were watched."""

    x: Inputs
    y: Tensor | None


class WatchedNetwork(Protocol):
    """The network of a run, known in the process of its training."""

    model: nn.Module
    """the network, trained by now"""
    probe: WatchedPart
    optimizer: Optimizer | None
    readout: Any
    loss: losses.Loss | None
    initial: Mapping[str, Any]
    """its first state dict"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A few steps of full-batch training on the probe, from the first weights, with and without a change."""

    steps: int
    loss: tuple[float, float]
    """before and after, with the change"""
    unchanged_loss: tuple[float, float]
    """before and after, without it"""
    gap: float
    """linearization gap after these steps, with the change"""
    unchanged_gap: float
    """the same without it"""

    def keeps_promise(self, toward: str) -> bool:
        """Return whether the loss falls and the gap moves in the wanted direction."""
        if not (math.isfinite(self.loss[1]) and self.loss[1] < self.loss[0]):
            return False
        if toward == "rich":
            return self.gap > MOVES * self.unchanged_gap or self.gap > SATURATED
        return self.gap * MOVES < self.unchanged_gap

    def __str__(self) -> str:
        return (
            f"tried for {self.steps} steps: loss {self.loss[0]:.3g} to {self.loss[1]:.3g}, "
            f"gap {self.gap:.2g} instead of {self.unchanged_gap:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A network with its data and loss, ready for trials."""

    network: WatchedNetwork
    optimizer: Optimizer
    x: Inputs
    objective: Objective
    steps: int

    def run(self, apply: Apply | None) -> tuple[tuple[float, float], float]:
        """Return the loss before and after some steps from the first weights, and the gap after them."""
        model, optimizer = self.start()
        if apply is not None:
            model, optimizer = apply(model, optimizer)
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        values = []
        for _ in range(self.steps):
            optimizer.zero_grad()
            loss = self.objective(self.outputs(model))
            values.append(float(loss.detach()))
            if not math.isfinite(values[-1]):
                return (values[0], math.nan), math.nan
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            values.append(float(self.objective(self.outputs(model))))
        try:
            gap = float(linearization_gap(model, self.x, initial, readout=self.network.readout))
        except FeatlearnError:
            gap = math.nan
        return (values[0], values[-1]), gap

    def start(self) -> tuple[nn.Module, Optimizer]:
        """Return a copy of the network with its first weights, and an optimizer of its class and first rates."""
        model = network_at(self.network.model, self.network.initial)
        trained = {id(p): name for name, p in self.network.model.named_parameters()}
        parameters = dict(model.named_parameters())
        for name, parameter in self.network.model.named_parameters():
            parameters[name].requires_grad_(parameter.requires_grad)

        def copied(group: list[Tensor]) -> list[Tensor]:
            return [parameters[trained[id(p)]] for p in group if id(p) in trained]

        return model, rebuilt(self.optimizer, copied)

    def outputs(self, model: nn.Module) -> Tensor:
        """Return the outputs (P, C) of a model on the probe."""
        tensor: Tensor = read_output(call_model(model, self.x), self.x, self.network.readout)
        return tensor.reshape(batch_size(self.x), -1)


def rebuilt(optimizer: Optimizer, parameters: Callable[[list[Tensor]], list[Tensor]]) -> Optimizer:
    """Return a new optimizer of the same class and settings, without state, on other parameters."""
    groups = []
    for group in optimizer.param_groups:
        settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
        if "initial_lr" in settings:  # what a scheduler began with
            settings["lr"] = settings.pop("initial_lr")
        groups.append({"params": parameters(group["params"]), **settings})
    build: Callable[..., Optimizer] = type(optimizer)
    return build([group for group in groups if group["params"]])


def bench_of(findings: Findings) -> Bench | str:
    """Return what trials need, or the reason why nothing can be tried."""
    network: WatchedNetwork | None = findings.run.network
    if network is None:
        return "the network is not in this process, only its run"
    if network.optimizer is None or not network.initial:
        return "the optimizer or the first weights are not known: pass optimizer= to fl.watch"
    objective = _objective(findings, network)
    if objective is None:
        return "the loss is not known: pass loss= to fl.watch"
    x, stride = network.probe.x, 1
    try:
        while True:
            part, rows = _every(x, stride), objective[1][::stride]
            loss = objective[0](rows)
            bench = Bench(network=network, optimizer=network.optimizer, x=part, objective=loss, steps=1)
            steps = int(WORK / max(_work(bench), 1.0))
            if steps >= FEWEST:
                return Bench(
                    network=network, optimizer=network.optimizer, x=part, objective=loss, steps=min(steps, STEPS)
                )
            if batch_size(part) < 2 * SMALLEST_PROBE:
                return "a few steps of this network take longer than two seconds"
            stride *= 2
    except Exception as error:  # whatever a model of others raises on a copy
        return f"a copy cannot be trained: {type(error).__name__}: {error}"


def try_change(bench: Bench, apply: Apply) -> Trial | str:
    """Return what a few steps with a change give, or why they fail."""
    try:
        with isolated():
            unchanged_loss, unchanged_gap = bench.run(None)
            loss, gap = bench.run(apply)
    except Exception as error:  # whatever a model of others raises on a copy
        return f"{type(error).__name__}: {error}"
    return Trial(steps=bench.steps, loss=loss, unchanged_loss=unchanged_loss, gap=gap, unchanged_gap=unchanged_gap)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Keep random numbers, gradient mode and autocast of the caller as they are."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        yield


def _work(bench: Bench) -> float:
    """Return the multiply-adds of one forward and backward pass."""
    with isolated(), FlopCounterMode(display=False) as counter:
        model, _ = bench.start()
        bench.objective(bench.outputs(model)).backward()
    return float(counter.get_total_flops()) / 2


def _objective(findings: Findings, network: WatchedNetwork) -> tuple[Callable[[Tensor], Objective], Tensor] | None:
    """Return (targets -> loss of outputs) and the targets; None if the loss is not known."""
    run_data, y = findings.run_data, network.probe.y
    if y is None:
        return None
    if network.loss is not None:
        loss = losses.function(network.loss)
        return lambda rows: lambda f: loss(f[:, 0] if f.shape[1] == 1 and rows.dim() == 1 else f, rows), y
    if run_data.targets is None or not run_data.loss_is_known:
        return None
    kind, factor = run_data.loss_kind, _loss_factor(run_data)
    targets = run_data.targets.double()
    rows = as_probabilities(targets) if kind is CROSS_ENTROPY else targets
    first = next(network.model.parameters())
    rows = rows.to(first.device, first.dtype if first.is_floating_point() else torch.float32)
    return lambda part: lambda f: factor * kind.mean(f, part), rows


def _loss_factor(run_data: RunData) -> float:
    """Return the loss passed to `watch.step` divided by the recorded one on the probe, in the first quarter."""
    passed, recorded = run_data.curve("loss"), run_data.loss
    if passed is None or recorded is None:
        return 1.0
    early = passed.steps <= max(float(passed.steps[-1]) / 4, float(passed.steps[0]))
    ratio = passed.values[early].log() - recorded.logarithmic_at(passed.steps[early])
    return float(ratio.mean().exp())


def _every(x: Inputs, stride: int) -> Inputs:
    samples = batch_size(x)

    def rows(tensor: Tensor) -> Tensor:
        return tensor[::stride] if tensor.dim() and len(tensor) == samples else tensor

    return map_tensors(x, rows)
