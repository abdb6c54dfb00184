"""An inventory lists what torch lists, in the same order and under the same names."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from featlearn.network.state import Inventory


class Shared(nn.Module):
    """A module in two places, a parameter in two modules, a missing child and a missing bias."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        self.first = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.missing: nn.Module | None
        self.register_module("missing", None)
        self.again = self.first[0]
        self.last = nn.ModuleDict({"a": nn.Linear(2, 3), "b": self.first})
        self.last["a"].weight = self.first[0].weight
        self.register_buffer("table", torch.zeros(2))


class Renaming(Shared):
    """Names its parameters otherwise."""

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        yield "alone", self.own


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return list(map(id, found)) == list(map(id, expected))


def test_what_torch_lists():
    for model in (Shared(), nn.Linear(2, 2), nn.Transformer(8, 2, 1, 1, 8)):
        found = Inventory(model)
        assert list(map(id, found.modules)) == list(map(id, model.modules()))
        assert same(found.parameters, list(model.parameters()))
        assert {id(t) for t in found.tensors} == {id(t) for t in (*model.parameters(), *model.buffers())}
        expected = list(model.named_parameters())
        assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected]
        assert same([p for _, p in found.named_parameters()], [p for _, p in expected])


def test_names_of_a_model_that_has_its_own():
    assert [name for name, _ in Inventory(Renaming()).named_parameters()] == ["alone"]


def test_the_kind_follows_every_tensor():
    model = Shared()
    kind = Inventory(model).kind
    assert Inventory(model).kind == kind
    model.table = torch.zeros(3)
    assert Inventory(model).kind != kind
