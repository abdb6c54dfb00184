"""Distances to learned centers, of every order."""

import pytest
import torch
from torch import Tensor

import featlearn as fl
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net, default_dtype, parameter


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("shape", [(7, 3), (30, 3), (7, 4, 3), (3, 28, 3)], ids=str)
def test_two_layers_of_distances_are_exact(p: float, shape: tuple[int, ...]):
    def forward(self: Net, x: Tensor) -> Tensor:
        found = torch.cdist(torch.cdist(x, self.first, p=p), self.second, p=p)
        return found if found.dim() == 2 else found.sum(1)

    with default_dtype(torch.float64), torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Net(forward, first=parameter(5, 3), second=parameter(2, 5)), torch.randn(shape)
        assert fl.plan(model, x).fallbacks == {}
        reference = dense_ntk(model, x, outputs="full")
        torch.testing.assert_close(fl.ntk(model, x, outputs="full", verify=True), reference)


def test_a_sample_on_a_center_has_no_gradient_there():
    with default_dtype(torch.float64):
        model = Net(lambda self, x: torch.cdist(x, self.centers), centers=parameter(4, 3))
        x = torch.randn(6, 3)
        x[2] = model.centers.detach()[1]
        torch.testing.assert_close(fl.ntk(model, x, verify=True), dense_ntk(model, x))


def test_centers_in_the_first_place_go_to_the_fallback():
    with default_dtype(torch.float64):
        model = Net(lambda self, x: torch.cdist(self.centers, x).T, centers=parameter(4, 3))
        x = torch.randn(6, 3)
        assert fl.plan(model, x).fallbacks == {"centers": "the rule for CdistBackward0 does not cover this case"}
        torch.testing.assert_close(fl.ntk(model, x, verify=True), dense_ntk(model, x))
