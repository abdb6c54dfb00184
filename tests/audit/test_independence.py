"""Every sample of a batch is run again among others: which parts there are, and what they show."""

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.audit.independence import MANY, SMALL, last_digit_changed, part_sizes, run_parts
from featlearn.errors import CoupledSamplesError
from featlearn.network.inputs import ModelWithInputs


def batch(x: Tensor) -> ModelWithInputs:
    return ModelWithInputs(nn.Identity(), x, len(x), None, lambda: None)


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 12, 40, MANY - 1, MANY, 333])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_parts_cover_the_batch_and_are_never_as_large(samples: int, pieces: int):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    parts = run_parts(batch(x), 0, samples, pieces, torch.Generator().manual_seed(0))
    assert set(torch.cat([part.places for part in parts]).tolist()) == set(range(samples))
    for part in parts:
        assert torch.equal(part.outputs, x[part.places])
    sizes = [len(part.places) for part in parts]
    assert sizes == part_sizes(samples, pieces)
    assert all(size >= 2 and size != samples for size in sizes)
    assert sum(sizes) <= samples + 2 * len(sizes)


def test_parts_of_a_chunk_are_its_own_samples():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    parts = run_parts(batch(x), 20, 50, 4, torch.Generator().manual_seed(0))
    assert set(torch.cat([part.places for part in parts]).tolist()) == set(range(30))
    for part in parts:
        assert torch.equal(part.outputs, x[20 + part.places])


def test_equal_samples_are_run_apart():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    parts = run_parts(batch(x), 0, 40, 8, torch.Generator().manual_seed(0))
    for part in parts:
        own = part.places.unique() % 20
        assert len(own.unique()) == len(own)


def test_many_samples_have_small_parts_as_well():
    assert part_sizes(MANY, 8)[:6] == [2, 2] + [SMALL] * SMALL
    assert min(part_sizes(MANY - 1, 8)[2:]) > SMALL
    assert part_sizes(MANY, 2)[:2] == [2, SMALL]


class Rare(nn.Module):
    """A decision for the whole batch that one sample in ten would take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if bool((x[:, 0] > 1.28).any()) else 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("samples", [12, 40, 120])
def test_a_decision_for_the_whole_batch_is_seen(samples: int, seed: int):
    torch.manual_seed(seed)
    x = torch.randn(samples, 4)
    x[0, 0] = 2.0
    with pytest.raises(CoupledSamplesError):
        fl.ntk(Rare(), x)


class Converging(nn.Module):
    """A fixed point whose iteration stops for all samples once the last one has converged."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(4, 6), nn.Linear(6, 2)
        self.weight = nn.Parameter(0.15 * torch.randn(6, 6))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        shift = self.input(x)
        hidden = shift.tanh()
        for self.steps in range(100):
            before, hidden = hidden, (hidden @ self.weight + shift).tanh()
            if float((hidden - before).detach().abs().max()) < 1e-3:
                break
        return self.output(hidden)


@pytest.mark.parametrize("seed", range(12))
def test_a_stopping_rule_for_the_whole_batch_is_seen(seed: int):
    """Most halves of the batch stop as early as the whole batch. Single samples do not."""
    torch.manual_seed(seed)
    model, x = Converging().double(), torch.randn(7, 4, dtype=torch.float64)
    steps = set()
    for row in x.split(1):
        model(row)
        steps.add(model.steps)
    if len(steps) == 1:
        fl.ntk(model, x)
    else:
        with pytest.raises(CoupledSamplesError):
            fl.ntk(model, x)


class Deduplicating(nn.Module):
    """Equal samples get the number of their copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, where, counts = x.unique(dim=0, return_inverse=True, return_counts=True)
        return self.layer(x) * counts[where][:, None]


def test_pairs_of_equal_samples_are_seen():
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    x[17] = x[3]
    with pytest.raises(CoupledSamplesError):
        fl.ntk(Deduplicating(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_weights_move_by_their_last_digit_and_come_back(dtype: torch.dtype):
    model = nn.Module()
    wide = torch.complex128 if dtype.is_complex else torch.float64  # bfloat16 would draw zeros
    model.weight = nn.Parameter(torch.randn(50, dtype=wide).to(dtype))
    model.frozen = nn.Parameter(torch.randn(50, dtype=wide).to(dtype), requires_grad=False)
    before = [p.detach().clone() for p in model.parameters()]
    eps = torch.finfo(dtype).eps
    with last_digit_changed(model):
        for p, kept in zip(model.parameters(), before, strict=True):
            changed = (torch.view_as_real(p) if p.is_complex() else p).detach().double()
            original = (torch.view_as_real(kept) if kept.is_complex() else kept).double()
            ratio = ((changed - original) / original).abs() / eps
            assert float(ratio.max()) <= 2.0
            assert float(ratio.median()) >= 0.5
    for p, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, kept)
