"""Bilinear layers are read, and are no linear maps."""

import torch
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net, default_dtype


def test_the_weight_of_a_bilinear_layer_is_read_and_left_out_of_neural_features():
    def forward(self: Net, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(x, y)))

    with default_dtype(torch.float64):
        model = Net(forward, middle=nn.Bilinear(3, 4, 5), head=nn.Linear(5, 2))
        x = (torch.randn(7, 3), torch.randn(7, 4))
        assert fl.plan(model, x).fallbacks == {}
        torch.testing.assert_close(fl.ntk(model, x, verify=True), dense_ntk(model, x))
        features = fl.neural_features(model, x)
    assert list(features) == ["head"]
    assert features.left_out == {"middle.weight": "the rule for TrilinearBackward0 declares no LinearMap"}
