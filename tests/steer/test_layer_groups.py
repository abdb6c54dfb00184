import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.steer import SLO, speed_groups


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def taken(model: nn.Module, speeds: dict[str, float]) -> list[tuple[list[str], float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [([names[id(p)] for p in group["params"]], group["speed"]) for group in speed_groups(model, speeds)]


def test_the_first_glob_that_matches_wins():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert taken(model, {"0": 500.0, "*": 0.002}) == [
        (["0.weight", "0.bias"], 500.0),
        (["2.weight", "2.bias"], 0.002),
    ]
    assert taken(model, {"*.bias": 0.0, "2": 3.0, "*": 1.0}) == [
        (["0.bias", "2.bias"], 0.0),
        (["2.weight"], 3.0),
        (["0.weight"], 1.0),
    ]


def test_a_tied_parameter_is_taken_once_and_answers_to_each_name():
    model = Tied()
    assert taken(model, {"head": 2.0, "body.*": 1.0}) == [
        (["embed.weight"], 2.0),
        (["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.2.weight"], 1.0),
    ]
    assert len(taken(model, {"embed": 2.0, "*": 1.0})) == 2


def test_a_last_star_may_take_nothing():
    assert len(taken(nn.Linear(3, 2), {"weight": 1.0, "bias": 2.0, "*": 3.0})) == 2


def test_frozen_parameters_are_left_out():
    model = Tied()
    model.body[0].requires_grad_(False)
    assert taken(model, {"body.*": 1.0, "*": 2.0})[0][0] == ["body.1.weight", "body.1.bias", "body.2.weight"]


def test_the_groups_drive_an_optimizer():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = SLO(speed_groups(model, {"0": 5.0, "*": 0.5}), 0.1)
    model(torch.ones(2, 3).double()).sum().backward()
    optimizer.step()
    moved = [float((p.detach() - s).norm()) for p, s in zip(model.parameters(), start, strict=True)]
    assert moved == pytest.approx([0.5, 0.05], rel=1e-12)


@pytest.mark.parametrize(
    ("speeds", "kind", "words"),
    [
        ({}, TypeError, "expected a mapping"),
        ([("0", 1.0)], TypeError, "expected a mapping"),
        ({0: 1.0}, TypeError, "expected a mapping"),
        ({"0": 1.0}, ValueError, r"no glob of \['0'\] matches '2.weight'; add a last entry"),
        ({"1": 1.0, "*": 1.0}, ValueError, "'1' adds no trainable parameter.*0.weight"),
        ({"*": 1.0, "0": 2.0}, ValueError, "'0' adds no trainable parameter.*those of earlier globs"),
    ],
)
def test_globs_that_leave_something_over_are_refused(speeds, kind: type, words: str):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(fl.FeatlearnError, match=words) as failure:
        speed_groups(model, speeds)
    assert isinstance(failure.value, kind)
