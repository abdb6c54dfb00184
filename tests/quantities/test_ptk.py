"""ptk against derivatives taken one by one, and Prop. 4: with the rows it makes the tangent kernel of a weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, UnsupportedModelError
from tests.references.features import features
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net, default_dtype


@pytest.fixture(autouse=True)
def seeded() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def tokens() -> nn.Module:
    return Net(
        lambda self, x: self.second(torch.tanh(self.first(x))).mean(1), first=nn.Linear(4, 6), second=nn.Linear(6, 3)
    )


def own_rows(model: nn.Module, x: Tensor, layer: str) -> Tensor:
    """df/dh of every sample at its own positions, (P, C, T, k)."""
    deltas = features(model, x, f"{layer}.weight").deltas
    samples, classes, rows, units = deltas.shape
    split = deltas.reshape(samples, classes, samples, rows // samples, units)
    return torch.stack([split[sample, :, sample] for sample in range(samples)])


@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_every_mode_of_a_plain_layer(layer: str):
    model, x, x2 = mlp(), torch.randn(6, 4), torch.randn(5, 4)
    first, second = own_rows(model, x, layer)[:, :, 0], own_rows(model, x2, layer)[:, :, 0]
    full = torch.einsum("pck,qdk->pqcd", first, second)
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer=layer, outputs="full"), full)
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer=layer), torch.einsum("pqcc->pq", full))
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer=layer, outputs=2), full[..., 2, 2])
    assert_equal(fl.quantities.ptk(model, x, layer=layer), torch.einsum("pck,qck->pq", first, first))
    assert_equal(
        fl.quantities.ptk(model, x, layer=layer, positions=True),
        torch.einsum("pck,qck->pq", first, first)[:, None, :, None],
    )


def test_positions():
    model, x, x2 = tokens(), torch.randn(6, 3, 4), torch.randn(5, 3, 4)
    first, second = own_rows(model, x, "first"), own_rows(model, x2, "first")
    assert_equal(
        fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True),
        torch.einsum("pctk,qcsk->ptqs", first, second),
    )
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer="first"), torch.einsum("pctk,qctk->pq", first, second))
    full = torch.einsum("pctk,qdsk->ptqscd", first, second)
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True, outputs="full"), full)
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True, outputs=1), full[..., 1, 1])
    longer = own_rows(model, x2 := torch.randn(5, 7, 4), "first")
    assert_equal(
        fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True),
        torch.einsum("pctk,qcsk->ptqs", first, longer),
    )


@pytest.mark.parametrize("layer", ["0", "2"])
def test_with_one_position_the_tangent_kernel_is_the_product_of_ptk_and_inputs(layer: str):
    model, x, x2 = mlp(), torch.randn(6, 4), torch.randn(5, 4)
    first, second = x, x2
    if layer == "2":
        first, second = model[1](model[0](x)).detach(), model[1](model[0](x2)).detach()
    kernel = fl.quantities.ptk(model, x, x2=x2, layer=layer) * (first @ second.T)
    assert_equal(kernel, fl.ntk(model, x, x2=x2, outputs="sum", by="parameter")[f"{layer}.weight"])
    assert_equal(kernel, dense_ntk(model, x, x2, outputs="sum", by="parameter")[f"{layer}.weight"])
    full = fl.quantities.ptk(model, x, x2=x2, layer=layer, outputs="full") * (first @ second.T)[..., None, None]
    assert_equal(full, dense_ntk(model, x, x2, outputs="full", by="parameter")[f"{layer}.weight"])


def test_with_several_positions_it_is_the_double_sum_and_not_that_over_equal_positions():
    model, x, x2 = tokens(), torch.randn(6, 3, 4), torch.randn(5, 7, 4)
    kernel = fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True)
    expected = dense_ntk(model, x, x2, outputs="sum", by="parameter")["first.weight"]
    assert_equal(torch.einsum("ptqs,ptd,qsd->pq", kernel, x, x2), expected)
    assert_equal(fl.ntk(model, x, x2=x2, outputs="sum", by="parameter")["first.weight"], expected)
    x2 = torch.randn(6, 3, 4)
    expected = dense_ntk(model, x, x2, outputs="sum", by="parameter")["first.weight"]
    kernel = fl.quantities.ptk(model, x, x2=x2, layer="first", positions=True)
    assert_equal(torch.einsum("ptqs,ptd,qsd->pq", kernel, x, x2), expected)
    same = torch.einsum("ptqt,ptd,qtd->pq", kernel, x, x2)
    assert float((same - expected).norm()) > 0.1 * float(expected.norm())
    factorized = fl.quantities.ptk(model, x, x2=x2, layer="first") * torch.einsum("ptd,qtd->pq", x, x2)
    assert float((factorized - expected).norm()) > 0.1 * float(expected.norm())


def test_a_convolution_with_its_patches():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    x, x2 = torch.randn(5, 2, 4, 5), torch.randn(4, 2, 4, 5)
    patches = [nn.functional.unfold(part, 2, padding=1, stride=2).mT for part in (x, x2)]
    kernel = fl.quantities.ptk(model, x, x2=x2, layer="0", positions=True)
    assert kernel.shape == (5, 9, 4, 9)
    expected = dense_ntk(model, x, x2, outputs="sum", by="parameter")["0.weight"]
    assert_equal(torch.einsum("ptqs,ptd,qsd->pq", kernel, *patches), expected)


def test_a_layer_called_twice_has_the_positions_of_both_calls():
    model = Net(lambda self, x: self.layer(torch.tanh(self.layer(x))), layer=nn.Linear(4, 4))
    x = torch.randn(6, 4)
    hidden = torch.tanh(model.layer(x)).detach()
    kernel = fl.quantities.ptk(model, x, layer="layer", positions=True)
    assert kernel.shape == (6, 2, 6, 2)
    expected = dense_ntk(model, x, outputs="sum", by="parameter")["layer.weight"]
    orders = [torch.stack(rows, 1) for rows in ([x, hidden], [hidden, x])]
    errors = [float((torch.einsum("ptqs,ptd,qsd->pq", kernel, rows, rows) - expected).norm()) for rows in orders]
    assert min(errors) <= 1e-10 * float(expected.norm())


def test_a_part_of_a_fused_projection():
    def forward(self: Net, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)

    model, x = Net(forward, qkv=nn.Linear(6, 24), out=nn.Linear(8, 3)), torch.randn(5, 4, 6)
    kernels = [fl.quantities.ptk(model, x, layer=f"qkv.{role}", positions=True) for role in "qkv"]
    expected = dense_ntk(model, x, outputs="sum", by="parameter")["qkv.weight"]
    assert_equal(torch.einsum("ptqs,ptd,qsd->pq", sum(kernels), x, x), expected)
    with pytest.raises(InputValueError, match=r"'qkv' is qkv\.q, qkv\.k, qkv\.v; expected one of them"):
        fl.quantities.ptk(model, x, layer="qkv")


def test_the_covariance_and_the_kernel_have_the_same_spectrum():
    model, x = mlp(), torch.randn(9, 4)
    kernel = fl.quantities.ptk(model, x, layer="2", outputs="full").transpose(1, 2).reshape(27, 27) / 9
    covariance = fl.neural_features(model, x)["2"].ptk_covariance
    assert_equal(torch.linalg.eigvalsh(kernel)[-5:], torch.linalg.eigvalsh(covariance))


def test_chunks_and_precision_do_not_matter():
    model, x, x2 = mlp(), torch.randn(30, 4), torch.randn(23, 4)
    expected = fl.quantities.ptk(model, x, x2=x2, layer="2")
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer="2", memory="40KB"), expected, 1e-13)
    single = fl.quantities.ptk(model.float(), x.float(), x2=x2.float(), layer="2")
    assert single.dtype == torch.float32
    assert_equal(single.double(), expected, 1e-5)
    assert_equal(fl.quantities.ptk(model, x, x2=x2, layer="2", dtype=torch.float64), expected, 1e-5)


def test_the_root_is_called_by_its_empty_name():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    assert_equal(fl.quantities.ptk(model, x, layer=""), torch.full((6, 6), 3.0))


def test_wrong_arguments_are_refused():
    model, x = mlp(), torch.randn(6, 4)
    with pytest.raises(InputTypeError, match="layer is 0, expected the name"):
        fl.quantities.ptk(model, x, layer=0)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="layers='body' matches no layer, expected some of 0, 2, 4"):
        fl.quantities.ptk(model, x, layer="body")
    with pytest.raises(InputValueError, match=r"layer='\*' is 0, 2, 4; expected one of them"):
        fl.quantities.ptk(model, x, layer="*")
    with pytest.raises(InputValueError, match="outputs=3, expected an output between 0 and 2"):
        fl.quantities.ptk(model, x, layer="0", outputs=3)
    with pytest.raises(InputValueError, match="outputs='mean', expected 'sum', 'full' or the number"):
        fl.quantities.ptk(model, x, layer="0", outputs="mean")  # type: ignore[arg-type]
    with pytest.raises(MemoryBudgetError, match=r"the gradients at 0 take .*take fewer samples"):
        fl.quantities.ptk(model, torch.randn(500, 4), layer="0", memory="60KB")
    table = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"0\.weight is not a linear map: its rows are looked up"):
        fl.quantities.ptk(table, torch.randint(6, (5, 2)), layer="0")


def test_equal_positions_of_unequal_lengths_are_refused():
    with pytest.raises(fl.FeatlearnError, match="positions"):
        fl.quantities.ptk(tokens(), torch.randn(6, 3, 4), x2=torch.randn(5, 7, 4), layer="first")


def test_a_kernel_that_does_not_fit_is_refused():
    with pytest.raises(MemoryBudgetError):
        fl.quantities.ptk(tokens(), torch.randn(60, 30, 4), layer="first", positions=True, memory="1MiB")
