"""`verify=True`: small errors in float32 are caught among many samples, and rounding is not taken for one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.contraction import kernel_sum
from featlearn.errors import VerificationError
from featlearn.network.inputs import batch_size, map_tensors
from tests.zoo.awkward import CASES

ODD = ("upsampling_unet", "depthwise_separable_convolution", "circulant_weight", "experts_top1")
"""A bias summed over many pixels; a Fourier transform that takes samples together; gates that saturate."""
LEFT_OUT = ("mixed_trainable_dtypes", "compiled_submodule")
"""Float64 is part of it; compiling takes long."""


def perceptron(samples: int, seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layers = nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)
    return nn.Sequential(*layers).float(), torch.randn(samples, 20, dtype=torch.float32)


def plant(monkeypatch: pytest.MonkeyPatch, parameter: int, row: int | slice, error: float = 0.01) -> None:
    """The kernel of one parameter is wrong in one row and column, or in all."""
    real, calls = kernel_sum.add_gram, iter(range(10**6))

    def add_gram(out: Tensor, *args: Any, **options: Any) -> None:
        before = out.clone()
        real(out, *args, **options)
        if next(calls) == parameter:
            if options["symmetric"]:
                kernel_sum.mirror(out, args[2])
            added = (out - before).clone()
            out[..., row, :] += error * added[..., row, :]
            if isinstance(row, int):
                out[..., row] += error * added[..., row]

    monkeypatch.setattr(kernel_sum, "add_gram", add_gram)


@pytest.mark.parametrize("samples", [64, 512, 2000])
@pytest.mark.parametrize("outputs", ["sum", "each"])
def test_one_percent_in_one_row_is_caught(samples: int, outputs: Any, monkeypatch: pytest.MonkeyPatch):
    for parameter, row in ((0, 7), (3, samples - 1)):
        model, x = perceptron(samples)
        with monkeypatch.context() as patched:
            plant(patched, parameter, row)
            with pytest.raises(VerificationError, match="fails its check"):
                fl.ntk(model, x, outputs=outputs, verify=True)
    fl.ntk(model, x, outputs=outputs, verify=True)


@pytest.mark.parametrize("samples", [64, 512])
def test_one_percent_in_one_layer_is_caught(samples: int, monkeypatch: pytest.MonkeyPatch):
    model, x = perceptron(samples)
    plant(monkeypatch, 2, slice(None))
    with pytest.raises(VerificationError, match="fails its check"):
        fl.ntk(model, x, verify=True)


@pytest.mark.parametrize("samples", [2, 4, 6, 64])
@pytest.mark.parametrize("columns", [None, 1, 2, 3, 4, 5, 6, 7, 8])
def test_a_wrong_kernel_of_a_bias_is_caught_where_rows_are_equally_long(
    samples: int, columns: int | None, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    model, x = nn.Linear(samples, 1).float(), torch.eye(samples, dtype=torch.float32)
    x2 = None if columns is None else torch.ones(columns, samples, dtype=torch.float32)
    for parameter in (0, 1):
        with monkeypatch.context() as patched:
            plant(patched, parameter, slice(None))
            with pytest.raises(VerificationError, match="fails its check"):
                fl.ntk(model, x, x2=x2, verify=True)
    fl.ntk(model, x, x2=x2, verify=True)


def test_one_percent_is_caught_in_blocks_of_a_cross_kernel_of_all_outputs(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).float(), torch.randn(90, 5)
    for arguments in ({}, {"x2": x[:70].flip(0).float()}):
        fl.ntk(model, x.float(), outputs="full", verify=True, **arguments)
        with monkeypatch.context() as patched:
            plant_rows_of_full(patched)
            with pytest.raises(VerificationError, match="fails its check"):
                fl.ntk(model, x.float(), outputs="full", verify=True, **arguments)


def plant_rows_of_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all parameters: the kernel of one sample is wrong for one of its outputs."""
    real = kernel_sum.add_gram

    def add_gram(out: Tensor, *args: Any, **options: Any) -> None:
        real(out, *args, **options)
        out[66, :, 1] *= 1.01

    monkeypatch.setattr(kernel_sum, "add_gram", add_gram)


def test_a_row_of_zeros_is_caught(monkeypatch: pytest.MonkeyPatch):
    model, x = perceptron(130)
    plant(monkeypatch, 1, 100, error=-1.0)
    with pytest.raises(VerificationError, match="fails its check"):
        fl.ntk(model, x, verify=True)


@pytest.mark.parametrize(
    ("case", "decades"),
    [
        pytest.param(case, decades, id=f"{case.name}-{decades}")
        for number, case in enumerate(CASES)
        for decades in (0, 6)
        if (number % 8 == 0 or case.name in ODD) and case.name not in LEFT_OUT
    ],
)
def test_rounding_is_no_error(case: Any, decades: int):
    """Also where the sizes of samples differ by six decades, and where a network amplifies rounding."""
    model, x, _, readout = case.build()
    many = sized(x, 70, decades)
    try:
        fl.ntk(model.float(), many, readout=readout)
    except fl.FeatlearnError:
        pytest.skip("refused in float32, or where samples are large")
    fl.ntk(model, many, readout=readout, verify=True)


def sized(x: Any, samples: int, decades: int) -> Any:
    """More samples like those of x, in float32, of sizes over so many decades."""
    few, generator = batch_size(x), torch.Generator().manual_seed(3)
    places = torch.randint(few, (samples,), generator=generator)
    scales = 10 ** torch.linspace(-decades / 2, decades / 2, samples)[torch.randperm(samples, generator=generator)]

    def change(tensor: Tensor) -> Tensor:
        chosen = tensor[places] if tensor.dim() and tensor.shape[0] == few else tensor
        if not tensor.is_floating_point():
            return chosen
        if chosen is tensor:
            return tensor.float()
        noisy = chosen.float() + 0.3 * torch.randn(chosen.shape, generator=generator, dtype=torch.float32)
        return noisy * scales.float().reshape(-1, *[1] * (noisy.dim() - 1))

    return map_tensors(x, change)


class Loud(nn.Module):
    """Gradients of the first layer overflow float16; outputs do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(1e-4 * self.first(x)) * 3e4 * 300


@pytest.mark.parametrize("verify", [False, True])
def test_an_overflow_is_named_before_a_disagreement(verify: bool):
    torch.manual_seed(0)
    model = Loud()
    with torch.no_grad():
        model.first.weight.mul_(1e-3), model.first.bias.mul_(1e-3)
    with pytest.raises(fl.errors.NotFiniteError):
        fl.ntk(model.half(), torch.randn(5, 4).half(), verify=verify)
