"""The short kernel that newcomers read first gives the numbers of the library."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import featlearn as fl
from tests.references.jacobian import dense_jacobian

PATH = Path(__file__).parents[1] / "docs/concepts/reference_ntk.py"
SPEC = importlib.util.spec_from_file_location("reference_ntk", PATH)
assert SPEC is not None
assert SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
    "no bias, norm": lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 2)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(16, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_library_and_the_dense_jacobian(name: str):
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(6, 5, dtype=torch.float64)
    kernel = reference.reference_ntk(model, x)
    torch.testing.assert_close(kernel, fl.ntk(model, x), rtol=1e-12, atol=1e-12)
    jacobians = [jacobian.flatten(2) for jacobian in dense_jacobian(model, x).values()]  # (P, C, parameters) each
    dense = sum(torch.einsum("ica,jca->ij", jacobian, jacobian) for jacobian in jacobians) / jacobians[0].shape[1]
    torch.testing.assert_close(kernel, dense, rtol=1e-12, atol=1e-12)


def test_it_reads_linear_layers_and_falls_back_elsewhere():
    torch.manual_seed(0)
    model = MODELS["no bias, norm"]()
    uses = reference.uses_of_parameters(model(torch.randn(4, 5)).grad_fn, dict(model.named_parameters()))
    assert {name: reference.can_read(nodes) for name, nodes in uses.items()} == {
        "0.weight": False,  # without a bias the node is Mm
        "1.weight": False,
        "1.bias": False,
        "3.weight": True,
        "3.bias": True,
    }


def test_it_is_short():
    assert len(PATH.read_text().splitlines()) <= 65
