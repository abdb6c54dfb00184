"""Unusual outputs and inputs, and models that act on being called or on being put in a mode."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Built, Case, Net, case, gaussian, tokens

CASES: list[Case] = []


@dataclass
class Prediction:
    mean: Tensor
    deviation: Tensor


def heads(self: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(self.body(x))
    return self.left(hidden), self.right(hidden)


def two_headed(forward: Any) -> Net:
    return Net(forward, body=nn.Linear(4, 6), left=nn.Linear(6, 2), right=nn.Linear(6, 3))


@case(CASES)
def tuple_output() -> Built:
    """The readout chooses one head of two: the other one's kernel is zero."""
    return two_headed(heads), *gaussian(4), lambda output: output[0]


@case(CASES)
def dictionary_output() -> Built:
    """The readout combines entries of a dictionary."""
    model = two_headed(lambda self, x: dict(zip(("left", "right"), heads(self, x), strict=True)))
    return model, *gaussian(4), lambda output: torch.cat([output["left"], output["right"]], dim=1)


@case(CASES)
def dataclass_output() -> Built:
    """The readout reads fields of a dataclass and gives (P,)."""
    model = two_headed(lambda self, x: Prediction(*heads(self, x)))
    return model, *gaussian(4), lambda output: output.mean.sum(1) / F.softplus(output.deviation).sum(1)


@case(CASES)
def object_with_logits() -> Built:
    """An output with .logits needs no readout."""
    model = two_headed(lambda self, x: SimpleNamespace(loss=None, logits=heads(self, x)[0]))
    return model, *gaussian(4), None


@case(CASES)
def readout_with_the_input() -> Built:
    """The readout reads a position that the input names, from a mapping with a mask and a label."""

    def forward(self: Net, ids: Tensor, mask: Tensor, label: Tensor) -> SimpleNamespace:
        hidden = self.embedding(ids) * mask[:, :, None]
        return SimpleNamespace(logits=self.head(torch.tanh(hidden.cumsum(1))))

    def readout(output: SimpleNamespace, x: dict[str, Tensor]) -> Tensor:
        last = x["mask"].sum(1).long() - 1
        logits = output.logits[torch.arange(len(last)), last]
        return logits.gather(1, x["label"][:, None])

    def inputs(samples: int) -> dict[str, Tensor]:
        lengths = torch.randint(1, 6, (samples, 1))
        label = torch.randint(3, (samples,))
        return {"ids": torch.randint(7, (samples, 5)), "mask": (torch.arange(5) < lengths).double(), "label": label}

    return Net(forward, embedding=nn.Embedding(7, 4), head=nn.Linear(4, 3)), inputs(6), inputs(4), readout


@case(CASES)
def tuple_of_categories_and_numbers() -> Built:
    """A tuple of an integer input and a real input."""

    def forward(self: Net, category: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.relu(torch.cat([self.embedding(category), self.body(numbers)], dim=1)))

    (category, category2), (numbers, numbers2) = tokens(4), gaussian(3)
    model = Net(forward, embedding=nn.Embedding(4, 2), body=nn.Linear(3, 4), head=nn.Linear(6, 2))
    return model, (category, numbers), (category2, numbers2), None


@case(CASES, flags=("shared input",))
def input_shared_by_all_samples() -> Built:
    """Position numbers of shape (1, T) beside ids (P, T), as tokenizers give them: batch size 1 is shared by all."""

    def forward(self: Net, ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(position_ids)
        return self.head(torch.tanh(hidden)).mean(1)

    ids, ids2 = tokens(6, 3)
    model = Net(forward, tokens=nn.Embedding(6, 4), positions=nn.Embedding(5, 4), head=nn.Linear(4, 2))
    places = torch.tensor([[3, 0, 4]])
    return model, {"ids": ids, "position_ids": places}, {"ids": ids2, "position_ids": places}, None


@case(CASES, flags=("non-tensor input",))
def mapping_with_an_option() -> Built:
    """A mapping whose values are not all tensors: a flag and a None go to the model as they are."""

    def forward(self: Net, x: Tensor, mask: Tensor | None = None, squared: bool = False) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden**2 if squared else hidden)

    x, x2 = gaussian(4)
    inputs, inputs2 = {"x": x, "mask": None, "squared": True}, {"x": x2, "mask": None, "squared": True}
    return Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 2)), inputs, inputs2, None


@case(CASES, flags=("writes to itself",))
def counts_its_calls() -> Built:
    """forward changes a buffer, an attribute and draws a random number that has no effect."""

    def forward(self: Net, x: Tensor) -> Tensor:
        self.calls += 1
        self.last_draw = float(torch.rand(()))
        return self.body(x) if self.last_draw < 2 else x

    model = Net(
        forward,
        body=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
        calls=torch.zeros((), dtype=torch.long),
    )
    return model, *gaussian(4), None


@case(CASES, flags=("hooks",))
def forward_hooks_change_the_output() -> Built:
    """Forward hooks and pre-hooks that rescale: part of the function."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model[2].register_forward_hook(lambda module, inputs, output: output * module.weight.sum())
    return model, *gaussian(4), None


@case(CASES)
def module_that_acts_on_eval() -> Built:
    """train() merges an adapter into the weight: flags must be set without calling it."""

    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> nn.Module:
            with torch.no_grad():
                self.weight.mul_(2.0)
            return super().train(mode)

    return nn.Sequential(Merging(4, 6), nn.Tanh(), nn.Linear(6, 2)), *gaussian(4), None
