"""Which networks are known to treat samples one by one and to leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from featlearn.capture.plain import _FORWARD, is_plain


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def plain(model: nn.Module, x: Any = None, readout: Any = None) -> bool:
    return is_plain(list(model.modules()), torch.zeros(5, 3) if x is None else x, readout)


def test_every_layer_of_the_table_is_one_that_torch_has_written():
    assert len(_FORWARD) > 40
    assert nn.Softmax not in _FORWARD
    assert nn.BatchNorm1d not in _FORWARD
    assert nn.RReLU not in _FORWARD  # draws numbers
    assert nn.Embedding not in _FORWARD  # rewrites its weights, with max_norm


@pytest.mark.parametrize("model", [
    network(),
    nn.Linear(3, 2),
    nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.AvgPool2d(2), nn.GroupNorm(1, 2), nn.Flatten(), nn.Dropout(0.3),
                  nn.Linear(2, 1)),
    nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)),
])  # fmt: skip
def test_plain_networks(model: nn.Module):
    assert plain(model)
    assert plain(model.eval())


class Own(nn.Linear):
    pass


def _forwarded(model: nn.Sequential) -> None:
    model[0].forward = lambda x: x  # type: ignore[method-assign]


Change = Callable[[nn.Sequential], Any]
CHANGES: dict[str, Change] = {
    "forward hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m[2][0].register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m[0].register_full_backward_pre_hook(lambda *_: None),
    "hook of a weight": lambda m: m[0].weight.register_hook(lambda g: g),
    "own forward": _forwarded,
    "own class": lambda m: m.append(Own(2, 2)),
    "any other module": lambda m: m.append(nn.Softmax(0)),
    "parametrization": lambda m: parametrizations.weight_norm(m[0]),
    "pruning": lambda m: prune.random_unstructured(m[0], "weight", 0.5),
    "in place": lambda m: m.append(nn.ReLU(inplace=True)),
    "samples joined": lambda m: m.append(nn.Flatten(0)),
    "shape without weight": lambda m: m.append(nn.LayerNorm(2, elementwise_affine=False)),
    "lazy": lambda m: m.append(nn.LazyLinear(2)),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_what_the_user_has_changed_is_not_plain(change: Change):
    model = network()
    change(model)
    assert not plain(model)


def test_hooks_of_all_modules_are_seen():
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not plain(network())
    assert plain(network())


def test_a_layer_whose_class_was_changed_is_seen(monkeypatch: pytest.MonkeyPatch):
    real = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: real(self, x) - x.mean())
    assert not plain(network())


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(5, 3)


@pytest.mark.parametrize("x", [
    (torch.zeros(5, 3),), {"input": torch.zeros(5, 3)}, torch.zeros(5), torch.zeros(5, 3, requires_grad=True),
    nn.Parameter(torch.zeros(5, 3), requires_grad=False), _inference(),
])  # fmt: skip
def test_other_inputs(x: Any):
    assert not plain(network(), x)


def test_a_readout_is_code_of_the_user():
    assert not plain(network(), readout=lambda output: output)
