"""The exact fallback: sample by sample, and refused where the sum is not that of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.audit.gradient_check import refuse_unequal_sums
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
