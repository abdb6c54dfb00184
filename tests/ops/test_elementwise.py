"""Rules of elementwise ops keep the precision of the network, whatever torch's default is."""

import torch
from torch import Tensor

import featlearn as fl
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net


def test_the_factor_of_a_scaled_product_is_not_rounded_to_single_precision():
    torch.manual_seed(0)
    assert torch.get_default_dtype() == torch.float32

    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.addcmul(x, x, self.weight, value=0.7).sin()

    model = Net(forward, weight=torch.nn.Parameter(torch.randn(4, dtype=torch.float64)))
    x = torch.randn(7, 4, dtype=torch.float64)
    reference = dense_ntk(model, x)
    kernel = fl.ntk(model, x, verify=True)
    assert fl.plan(model, x).fallbacks == {}
    assert float((kernel - reference).abs().max()) <= 1e-13 * float(reference.abs().max())
