"""Sample axes found by value: scaled cotangents show to which sample an entry belongs."""

import pytest
import torch
from torch import Tensor

from featlearn.graph.graph import Layout, build_graph, splits
from featlearn.graph.samples import attribution_error, probed_graph, sample_error, sample_factors
from featlearn.ops.registry import sample_axis


@pytest.mark.parametrize("samples", [1, 2, 7, 8])
def test_factors_of_few_samples_tell_each_from_every_other(samples: int):
    for seed in range(20):
        factors = sample_factors(samples, torch.Generator().manual_seed(seed))
        assert len(set(factors.abs().tolist())) == samples


@pytest.mark.parametrize("samples", [2, 8, 9, 500])
def test_factors_are_powers_of_two_that_every_type_holds(samples: int):
    factors = sample_factors(samples, torch.Generator().manual_seed(0))
    assert torch.equal(factors.abs().log2(), factors.abs().log2().round())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(factors.to(dtype).double(), factors)


def test_one_live_entry_is_ascribed_to_its_own_sample():
    """130 samples and 130 steps, time first: only the axis in which the entry shows its own factor is right."""
    samples = 130
    weights = torch.randn(samples, generator=torch.Generator().manual_seed(0))
    for step, sample in ((3, 77), (77, 3), (0, 129)):
        plain = torch.zeros(samples, samples, 2)
        plain[step, sample] = 1.0
        coded = plain * weights[None, :, None]
        fitting = [
            layout
            for layout in splits(plain.shape, samples)
            if float(attribution_error([plain], weights[:, None], coded, layout)) < 1e-3
        ]
        assert fitting == [Layout(samples, samples, 2)]


def test_small_samples_are_judged_by_their_own_size():
    found = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(0))
    expected = found.clone()
    found[0, 2], expected[0, 2] = 1e-20, 2e-20
    assert float(sample_error(expected, found)) == pytest.approx(0.5)
    found[0, 2] = expected[0, 2]
    assert float(sample_error(expected, found)) == 0.0


def test_entries_that_are_not_finite_count_as_equal():
    found = torch.tensor([[[1.0], [torch.nan], [torch.inf]]])
    assert float(sample_error(found, found)) == 0.0


def parts_of(shape: tuple[int, ...], samples: int) -> list[Layout]:
    return list(splits(torch.Size(shape), samples))


def test_splits_lie_inside_one_axis():
    assert parts_of((6, 4), 3) == [Layout(1, 3, 8), Layout(2, 3, 4)]
    assert parts_of((2, 6), 3) == [Layout(2, 3, 2), Layout(4, 3, 1)]
    assert parts_of((3, 3), 3) == [Layout(1, 3, 3), Layout(3, 3, 1)]
    assert parts_of((2, 2), 4) == []
    assert parts_of((0, 3), 3) == []


@pytest.mark.parametrize("shape", [(5,), (5, 3), (3, 5), (10, 3), (2, 15, 2), (5, 5, 5), (1, 5, 1)])
def test_the_axis_of_a_split_is_found_again(shape: tuple[int, ...]):
    for layout in parts_of(shape, 5):
        found = sample_axis(torch.Size(shape), layout)
        assert found is not None
        axis, outer = found
        before = torch.Size(shape[:axis]).numel() * outer
        assert (before, shape[axis] % (outer * 5)) == (layout.before, 0)


def across_axes(h: Tensor) -> Tensor:
    return h.view(2, 3, -1).tanh().view(6, -1)


def shared(h: Tensor) -> Tensor:
    return h + h.mean(0)


@pytest.mark.parametrize("forward", [across_axes, shared])
def test_what_lies_in_no_single_axis_has_no_sample_axis(forward):
    torch.manual_seed(0)
    weight = torch.randn(4, 2, requires_grad=True)
    outputs = forward(torch.randn(6, 4) @ weight)
    graph = build_graph(outputs, {"weight": weight})
    axes = probed_graph(outputs, graph, {"weight": weight}, torch.Generator().manual_seed(0)).axes
    names = {node.name(): layout for node, layout in axes.items()}
    if forward is across_axes:
        assert "TanhBackward0" not in names  # it meets no parameter
        assert names["MmBackward0"] == Layout(1, 6, 2)
    else:
        assert names["MmBackward0"] is None
        assert names["MeanBackward1"] is None
