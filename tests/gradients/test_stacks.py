"""How gradients of several output directions lie in memory, and which positions have any."""

import pytest
import torch

from featlearn.gradients.formed import StackedGradients, side_by_side, stacked, used_positions


def test_gradients_that_lie_side_by_side_are_not_copied():
    whole = torch.arange(24.0).view(2, 3, 4)
    parts = [whole[:, k] for k in range(3)]
    for several in (parts, list(whole)):  # sample by sample, or direction by direction
        found = side_by_side(several)
        assert found is not None
        assert torch.equal(found, torch.stack(several))
        assert found.data_ptr() == whole.data_ptr()
    copy = torch.empty(2, 3, 4)[:, 1]  # at the right distance, in another place
    for others in ([parts[0], copy, parts[2]], parts[::-1], [parts[0], parts[0], parts[1]]):
        assert side_by_side(others) is None


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)])
def test_stacked_gradients_are_the_same_in_any_order_of_memory(order: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    back = [order.index(axis) for axis in range(4)]
    shape = [(5, 3, 2, 4)[axis] for axis in order]
    grads = [torch.randn(shape, generator=generator).permute(back) for _ in range(3)]
    found = stacked(grads, torch.float64)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.stack(grads).double())
    assert torch.equal(stacked(grads[:1], torch.float64), grads[0].double()[None])


def test_views_of_a_stack_are_no_copies():
    whole = torch.randn(3, 5, 6)
    stack = StackedGradients(whole)
    found = stack.viewed(lambda grad: grad.reshape(5, 2, 3).transpose(0, 1))
    assert found is not None
    assert torch.equal(found, whole.reshape(3, 5, 2, 3).transpose(1, 2))
    assert found.data_ptr() == whole.data_ptr()
    assert stack.viewed(lambda grad: grad * 2) is None
    assert stack.viewed(lambda grad: grad.T.reshape(5, 6)) is None


def test_positions_are_those_of_any_sample_and_direction():
    grads = [torch.zeros(3, 9, 1, 2) for _ in range(2)]
    grads[0][0, 4] = grads[1][2, 7] = 1.0
    found = used_positions(grads)
    assert found is not None
    assert found.tolist() == [4, 7]
    grads[0][1, :5] = 1.0
    assert used_positions(grads) is None  # more than half
    assert used_positions([grad[:, :3] for grad in grads]) is None  # not worth it
