"""Containers of other types than Python's own, in what a model holds and in what it is given."""

from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.network.inputs import map_tensors, tensors_in

from ..references.jacobian import dense_ntk


class Irreps(tuple[int, ...]):
    """A tuple without a length, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


class Silent(dict[str, Any]):
    """A dictionary that does not list its values."""

    def values(self) -> Any:
        raise NotImplementedError


class Holding(nn.Module):
    """Keeps a container, and writes to a tensor that lies in it."""

    def __init__(self, container: Any, inner: Tensor) -> None:
        super().__init__()
        self.layer, self.container = nn.Linear(4, 2).double(), container
        self.write = lambda: inner.add_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return self.layer(x)


@pytest.mark.parametrize("kind", [Irreps, Silent, list, deque, tuple], ids=lambda kind: kind.__name__)
def test_tensors_in_containers_of_any_class_are_put_back(kind: type) -> None:
    torch.manual_seed(0)
    inner = torch.zeros(3)
    model = Holding(kind(scale=inner) if kind is Silent else kind([inner]), inner)
    x = torch.randn(5, 4).double()
    kernel = fl.ntk(model, x)
    assert not inner.any()
    torch.testing.assert_close(kernel, dense_ntk(model.layer, x), rtol=1e-12, atol=0)


class TensorDict(MutableMapping[str, Any]):
    """Entries that share their first axes, as in the package of that name."""

    def __init__(self, entries: dict[str, Any], batch_size: tuple[int, ...]) -> None:
        self._entries: dict[str, Any] = {}
        self._batch_size = batch_size
        for key, value in entries.items():
            self[key] = value

    @property
    def batch_size(self) -> tuple[int, ...]:
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: tuple[int, ...]) -> None:
        assert all(value.shape[: len(size)] == tuple(size) for value in self._entries.values())
        self._batch_size = tuple(size)

    def __copy__(self) -> "TensorDict":
        return TensorDict(dict(self._entries), self._batch_size)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        assert value.shape[: len(self._batch_size)] == self._batch_size
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Reading(nn.Module):
    """Takes a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()

    def forward(self, entries: TensorDict) -> Tensor:
        assert type(entries) is TensorDict
        assert entries.batch_size == (len(entries["x"]),)
        return self.layer(entries["x"]) * entries["scale"]


def test_a_mapping_in_a_tuple_keeps_its_type() -> None:
    torch.manual_seed(0)
    model, x, scale = Reading(), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    given = TensorDict({"x": x, "scale": scale}, (6,))
    jacobian = torch.einsum("ic,ck,ij->ickj", scale, torch.eye(2).double(), torch.cat([x, torch.ones(6, 1)], 1))
    expected = torch.einsum("ickj,Ickj->iI", jacobian, jacobian) / 2
    torch.testing.assert_close(fl.ntk(model, (given,)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fl.ntk(model, (given,), memory="20kB"), expected, rtol=1e-12, atol=1e-12)
    assert given["x"] is x
    assert given.batch_size == (6,)


class Frozen(dict[str, Any]):
    """Cannot be written to."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize(
    ("kind", "expected"), [(dict, dict), (OrderedDict, OrderedDict), (UserDict, UserDict), (Frozen, dict)]
)
def test_what_type_a_changed_mapping_has(kind: type, expected: type) -> None:
    mapping = kind(a=torch.ones(3, 2), b={"c": torch.zeros(3)}, d="text")
    changed = map_tensors((mapping,), lambda tensor: tensor[:1])[0]
    assert type(changed) is expected
    assert [tuple(tensor.shape) for tensor in tensors_in(changed)] == [(1, 2), (1,)]
    assert changed["d"] == "text"
    assert len(mapping["a"]) == 3
