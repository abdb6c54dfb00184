"""Cost of merging two fine-tuned networks: `fl.interference`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featlearn import losses
from featlearn.dynamics.taylor import linearize
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.correlation import correlation
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, Readout
from featlearn.network.raw_outputs import raw_outputs
from featlearn.signatures import name_keywords

State = nn.Module | Mapping[str, Tensor]
Task = tuple[State, Inputs, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskInterference:
    """Effect of the other task's change of weights on one task."""

    loss: float
    """Loss of the fine-tuned network on its task."""
    merged: float
    """Loss of the merged network."""
    predicted: float
    """Loss of the merged network, predicted by the fine-tuned network's linearization."""
    overlap: float
    """Cosine of the changes of the centered outputs that the two tasks make on this task's samples, in the pretrained
    network's linearization. 0: the other task does not touch these samples."""
    layers: dict[str, float]
    """Layer -> first-order change of the loss by the other task's change of that layer."""

    @property
    def cost(self) -> float:
        """Increase of the loss by merging."""
        return self.merged - self.loss


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedTasks:
    """Cost to two fine-tuned networks of adding their changes of weights. From `fl.interference`."""

    a: TaskInterference
    b: TaskInterference

    def __str__(self) -> str:
        lines = []
        for name, other, task in (("a", "b", self.a), ("b", "a", self.b)):
            worst = max(task.layers, key=lambda layer: task.layers[layer])
            lines.append(
                f"Task {name}: merging with {other} changes the loss from {task.loss:.3g} to {task.merged:.3g} "
                f"({task.predicted:.3g} predicted by the linearization); overlap {task.overlap:.2f}, "
                f"most costly layer {worst!r}."
            )
        return "\n".join(lines)


@name_keywords()
def interference(
    model: nn.Module,
    task_a: Task,
    task_b: Task,
    *,
    loss: losses.Loss = "cross-entropy",
    readout: Readout | None = None,
) -> MergedTasks:
    """Measure what two fine-tuned networks cost each other when they are merged by adding their changes of weights.

    The merged network is the pretrained one plus both changes. If the network is linear in these directions, the cost
    follows from the tangent kernel between the two tasks; `predicted` beside `merged` says how far that holds.

    >>> result = fl.interference(pretrained, (tuned_a, x_a, y_a), (tuned_b, x_b, y_b))
    >>> print(result)

    Args:
        model: Pretrained network. It is measured in eval mode and not changed.
        task_a: Network (or state dict) fine-tuned on the first task, with samples x and targets y of that task.
        task_b: The same for the second task.
        loss: Name of `fl.losses`, module, or function of (outputs, y).
        readout: Map from the model's output to what the loss takes.

    Returns:
        An `MergedTasks` with `.a` and `.b`, each with `.loss`, `.merged`, `.predicted`, `.overlap` and `.layers`.
    """
    losses.function(loss)
    inner = unwrapped(model)
    start = {name: value.detach().clone() for name, value in trainable_parameters(inner).items()}
    networks = [_fine_tuned(inner, task, name) for task, name in ((task_a, "task_a"), (task_b, "task_b"))]
    changes = [
        {name: value.detach() - start[name] for name, value in unwrapped(network).named_parameters() if name in start}
        for network in networks
    ]
    for name, change in zip(("task_a", "task_b"), changes, strict=True):
        if not any(bool(value.any()) for value in change.values()):
            raise InputValueError(f"{name} has the weights of the pretrained network, expected a fine-tuned network")
    first, second = (
        _interference(inner, networks[n], changes[n], changes[1 - n], task[1], task[2], loss, readout)
        for n, task in enumerate((task_a, task_b))
    )
    return MergedTasks(a=first, b=second)


def _interference(
    model: nn.Module,
    network: nn.Module,
    change: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    x: Inputs,
    y: Tensor,
    loss: losses.Loss,
    readout: Readout | None,
) -> TaskInterference:
    outputs = raw_outputs(network, x, readout)
    value, slope = losses.gradient(loss, outputs, y)
    merged = network_at(network, {**unwrapped(network).state_dict(), **_moved(network, other)})
    linear = _linear(network)
    moved = _along(linear, other, x, readout)
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, part in other.items():
        if bool(part.any()):
            by_layer.setdefault(name.rpartition(".")[0], {})[name] = part
    layers = {
        layer: float((slope * (_along(linear, parts, x, readout) - outputs)).sum()) for layer, parts in by_layer.items()
    }
    around_start, begun = _linear(model), raw_outputs(model, x, readout)
    both = [(_along(around_start, part, x, readout) - begun).flatten(1).double() for part in (change, other)]
    both = [part - part.mean(0) for part in both]
    return TaskInterference(
        loss=float(value),
        merged=float(losses.gradient(loss, raw_outputs(merged, x, readout), y)[0]),
        predicted=float(losses.gradient(loss, moved, y)[0]),
        overlap=float(correlation(both[0], both[1])),
        layers=layers,
    )


def _linear(network: nn.Module) -> nn.Module:
    twin = network_at(network, {name: value.clone() for name, value in unwrapped(network).state_dict().items()})
    for part in twin.modules():
        part.training = False
    return linearize(twin)


def _along(linear: nn.Module, change: Mapping[str, Tensor], x: Inputs, readout: Readout | None) -> Tensor:
    """Return the outputs of a linearization after a change of weights from its center."""
    with torch.no_grad():
        for name, parameter in linear.get_submodule("network").named_parameters():
            if parameter.requires_grad:
                parameter.copy_(linear.get_submodule("start").get_buffer(name))
                if name in change:
                    parameter.add_(change[name])
    return raw_outputs(linear, x, readout)


def _moved(network: nn.Module, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = dict(unwrapped(network).named_parameters())
    return {name: parameters[name].detach() + part for name, part in change.items()}


def _fine_tuned(model: nn.Module, task: Any, name: str) -> nn.Module:
    """Return the network of a task, checked."""
    if not isinstance(task, tuple | list) or len(task) != 3:
        raise InputTypeError(f"{name} is {type(task).__name__}, expected (network or state dict, x, y)")
    state, _, y = task
    if not isinstance(y, Tensor):
        raise InputTypeError(f"the targets of {name} are {type(y).__name__}, expected a tensor")
    if isinstance(state, Mapping):
        state = network_at(model, {key: value.clone() for key, value in state.items()})
    if not isinstance(state, nn.Module):
        raise InputTypeError(f"{name} has a {type(state).__name__}, expected a network or a state dict")
    shapes = {key: value.shape for key, value in unwrapped(state).named_parameters()}
    for key, value in trainable_parameters(model).items():
        if shapes.get(key) != value.shape:
            raise InputValueError(
                f"{name} has no parameter {key!r} of shape {tuple(value.shape)}, expected the architecture of the "
                "pretrained network"
            )
    return state
