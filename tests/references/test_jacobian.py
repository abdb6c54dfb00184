"""The reference itself, against closed forms and finite differences."""

import torch
from torch import Tensor, nn

from .jacobian import dense_jacobian, dense_ntk


def linear_network() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, x2 = (torch.randn(samples, 4, dtype=torch.float64, generator=generator) for samples in (5, 3))
    return nn.Linear(4, 2, dtype=torch.float64), x, x2


def test_kernel_of_a_linear_layer_is_the_gram_matrix_plus_one() -> None:
    model, x, x2 = linear_network()
    expected = x @ x2.T + 1
    torch.testing.assert_close(dense_ntk(model, x, x2), expected)
    torch.testing.assert_close(dense_ntk(model, x, x2, outputs="sum"), 2 * expected)
    torch.testing.assert_close(dense_ntk(model, x, x2, outputs="each"), expected.expand(2, 5, 3))
    torch.testing.assert_close(dense_ntk(model, x, x2, outputs=1), expected)
    full = expected[:, :, None, None] * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(dense_ntk(model, x, x2, outputs="full"), full)
    by_parameter = dense_ntk(model, x, x2, by="parameter")
    torch.testing.assert_close(by_parameter, {"weight": x @ x2.T, "bias": torch.ones(5, 3, dtype=torch.float64)})
    torch.testing.assert_close(dense_ntk(model, x, x2, by="layer"), {"": expected})


def test_full_kernel_has_its_outputs_in_the_order_of_its_samples() -> None:
    model, x, x2 = linear_network()
    deep = nn.Sequential(model, nn.Tanh(), nn.Linear(2, 3, dtype=torch.float64))
    first, second = dense_jacobian(deep, x)["0.weight"], dense_jacobian(deep, x2)["0.weight"]
    full = dense_ntk(deep, x, x2, outputs="full", by="parameter")["0.weight"]
    torch.testing.assert_close(full[4, 2, 0, 1], first[4, 0] @ second[2, 1])


def test_a_layer_is_the_sum_of_its_parameters_and_the_network_of_its_layers() -> None:
    model, x, _ = linear_network()
    deep = nn.Sequential(model, nn.Tanh(), nn.Linear(2, 3, dtype=torch.float64))
    layers, parameters = dense_ntk(deep, x, by="layer"), dense_ntk(deep, x, by="parameter")
    assert list(layers) == ["0", "2"]
    torch.testing.assert_close(layers["2"], parameters["2.weight"] + parameters["2.bias"])
    torch.testing.assert_close(dense_ntk(deep, x), layers["0"] + layers["2"])


def test_a_complex_parameter_counts_its_real_and_imaginary_parts() -> None:
    class Modulus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.3 + 0.7j, -0.4 + 0.2j], dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.weight).abs()

    model, step = Modulus(), 1e-6
    x = torch.tensor([[0.5, -1.0], [1.5, 0.3]], dtype=torch.float64)
    jacobian = dense_jacobian(model, x)["weight"]
    for coordinate in range(4):
        values = []
        for sign in (1, -1):
            moved = Modulus()
            with torch.no_grad():
                torch.view_as_real(moved.weight).view(-1)[coordinate] += sign * step
            values.append(moved(x).detach())
        torch.testing.assert_close(
            jacobian[:, 0, coordinate], (values[0] - values[1]) / (2 * step), rtol=1e-7, atol=1e-8
        )


def test_training_flags_are_restored() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1, dtype=torch.float64)).eval()
    model[0].training = True
    x = torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(dense_ntk(model, x), torch.full((2, 2), 4.0, dtype=torch.float64))
    assert [module.training for module in model.modules()] == [False, True, False]
