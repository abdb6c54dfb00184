"""The exact fallback: sample by sample, and refused where the sum is not that of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.audit.audit import refuse_unequal_sums
from featlearn.audited_model import AuditedModel
from featlearn.errors import CoupledSamplesError
from featlearn.gradients.fallback import real_entries, sample_gradients
from tests.references.jacobian import dense_ntk


class Powers(nn.Module):
    """A parameter that no rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.power = nn.Linear(4, 2), nn.Parameter(torch.rand(2) + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).square().add(1.0) ** self.power


class Squeezing(Powers):
    """One sample alone has outputs of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


@pytest.mark.parametrize("kind", [Powers, Squeezing])
@pytest.mark.parametrize("samples", [2, 9])
def test_gradients_of_single_samples(kind: type[nn.Module], samples: int):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(samples, 4, dtype=torch.float64)
    assert fl.plan(model, x).fallbacks == {"power": "no rule for PowBackward1"}
    with AuditedModel(model).measuring([x]) as measurement:
        chunk = measurement.chunk(measurement.batches[0], 0, samples)
        directions = torch.eye(2, dtype=torch.float64)
        found = sample_gradients(chunk, ["power"], directions)
        gradient = found["power"].gradient
        refuse_unequal_sums(chunk, found, directions, torch.Generator().manual_seed(0))
        found["power"].gradient[[0, 1]] = gradient[[1, 0]]  # those of two samples exchanged
        with pytest.raises(CoupledSamplesError, match="do not add up"):
            refuse_unequal_sums(chunk, found, directions, torch.Generator().manual_seed(0))
    torch.testing.assert_close(fl.ntk(model, x, outputs="full"), dense_ntk(model, x, outputs="full"))


def test_a_complex_entry_counts_as_two():
    parameter = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(
        real_entries(parameter.conj(), parameter), torch.view_as_real(parameter.conj().resolve_conj()).flatten()
    )
    assert torch.equal(real_entries(None, parameter), torch.zeros(6))


class Sinking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / len(grad)


def test_gradients_that_depend_on_the_size_of_the_batch_are_refused():
    model = Powers().double()
    forward = model.forward
    model.forward = lambda x: Sinking.apply(forward(x))  # type: ignore[method-assign]
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, torch.randn(9, 4, dtype=torch.float64))


class ChannelsLast(nn.Module):
    """Gradients reach the normalization in channels-last order: torch mixes up the channels of a batch of one."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.conv, self.norm, self.head = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5).eval(), nn.Linear(5, 2)
            self.power = nn.Parameter(torch.rand(5, 1, 1) + 1.0)
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(self.norm.weight)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        h, norm = self.conv(x).square().add(1.0) ** self.power, self.norm
        if self.fused:
            h = norm(h)
        else:
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            h = (h - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]
        sequence = h.permute(2, 3, 0, 1).reshape(-1, *h.shape[:2])  # positions, samples, channels
        return self.head(torch.tanh(sequence).mean(0))


def test_a_batch_of_one_is_not_differentiated_alone_behind_batch_normalization():
    fused, plain = ChannelsLast(fused=True).double(), ChannelsLast(fused=False).double()
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert fl.plan(fused, x).fallbacks == {"power": "no rule for PowBackward1"}
    expected = dense_ntk(plain, x, outputs="full")
    torch.testing.assert_close(fl.ntk(fused, x, outputs="full"), expected)
    v = torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    product = fl.NTKOperator(fused, x[:1]) @ v
    torch.testing.assert_close(product, expected[0, 0] @ v)
