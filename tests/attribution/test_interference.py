"""Merged networks against adding weights by hand, and linear predictions against a dense Jacobian."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

import featlearn as fl

P, D, C = 11, 4, 3


def setting() -> tuple[nn.Module, list[nn.Module], list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, C)).double()
    tuned, data = [], []
    for samples in (P, P - 2):
        network = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        tuned.append(network)
        data.append((torch.randn(samples, D).double(), torch.randint(C, (samples,))))
    return model, tuned, data


def test_costs_and_predictions():
    model, tuned, data = setting()
    before = copy.deepcopy(model.state_dict())
    result = fl.interference(model, (tuned[0], *data[0]), (tuned[1].state_dict(), *data[1]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    weights = [{name: value.detach() for name, value in network.named_parameters()} for network in (model, *tuned)]
    changes = [{name: (part[name] - weights[0][name]).detach() for name in part} for part in weights[1:]]
    for number, task in enumerate((result.a, result.b)):
        x, y = data[number]
        own, other = changes[number], changes[1 - number]
        evaluated = copy.deepcopy(model).eval()

        def outputs(parameters: dict[str, Tensor], x: Tensor = x, evaluated: nn.Module = evaluated) -> Tensor:
            return functional_call(evaluated, parameters, (x,))

        def along(at: dict[str, Tensor], change: dict[str, Tensor], outputs: Any = outputs) -> Tensor:
            jacobian = jacrev(outputs)(at)
            return sum(torch.tensordot(jacobian[name], part, part.dim()) for name, part in change.items())

        f = outputs(weights[1 + number]).detach()
        merged = outputs({name: part + other[name] for name, part in weights[1 + number].items()})
        slope = (f.softmax(1) - functional.one_hot(y, C)) / len(y)
        expected = {
            "loss": functional.cross_entropy(f, y),
            "merged": functional.cross_entropy(merged, y),
            "predicted": functional.cross_entropy(f + along(weights[1 + number], other), y),
        }
        for name, value in expected.items():
            assert getattr(task, name) == pytest.approx(float(value), rel=1e-9)
        for layer in ("0", "3"):
            part = {name: value for name, value in other.items() if name.startswith(layer)}
            assert task.layers[layer] == pytest.approx(
                float((slope * along(weights[1 + number], part)).sum()), rel=1e-8
            )
        ours, theirs = (along(weights[0], change) for change in (own, other))
        ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
        assert task.overlap == pytest.approx(float((ours * theirs).sum() / ours.norm() / theirs.norm()), rel=1e-8)
        assert task.cost == pytest.approx(task.merged - task.loss)
    assert str(result).startswith("Task a: merging with b changes the loss from ")


def test_a_linear_model_is_predicted_exactly():
    torch.manual_seed(0)
    model, x, y = nn.Linear(D, C).double(), torch.randn(P, D).double(), torch.randn(P, C).double()
    tuned = [copy.deepcopy(model) for _ in range(2)]
    for network in tuned:
        nn.init.normal_(network.weight)
    result = fl.interference(model, (tuned[0], x, y), (tuned[1], x, y), loss="mse")
    assert result.a.predicted == pytest.approx(result.a.merged)
    assert result.b.predicted == pytest.approx(result.b.merged)


def test_bad_input_is_refused():
    model, tuned, data = setting()
    good = (tuned[0], *data[0])
    for task, message in (
        (tuned[0], "task_b is Sequential, expected"),
        ((tuned[0], data[0][0], 3), "targets of task_b are int"),
        ((3, *data[0]), "task_b has a int"),
        ((nn.Linear(D, C), *data[0]), "task_b has no parameter '0.weight' of shape"),
        ((copy.deepcopy(model), *data[0]), "task_b has the weights of the pretrained network"),
    ):
        with pytest.raises(fl.FeatlearnError, match=message):
            fl.interference(model, good, task)  # type: ignore[arg-type]
