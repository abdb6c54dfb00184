"""Backward passes of several output directions at once, beside those of torch."""

import pytest
import torch

from featlearn.errors import UnsupportedModelError
from featlearn.graph.graph import backward


def test_the_same_as_torch_gives():
    generator = torch.Generator().manual_seed(0)
    x, weight, unused = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (3, 2), (4,))
    )
    outputs = torch.tanh(x @ weight)
    cotangents = torch.randn(7, 5, 2, generator=generator, dtype=torch.float64)
    asked = [x, weight, unused]
    expected = torch.autograd.grad(
        outputs, asked, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    found = backward([outputs], asked, [cotangents], batched=True)
    assert found[2] is None
    for one, other, p in zip(found[:2], expected[:2], asked, strict=False):
        assert one is not None
        assert one.shape == (7, *p.shape)
        assert torch.equal(one, other)
    for k in range(7):
        single = backward([outputs], asked[:2], [cotangents[k]])
        for one, other in zip(found[:2], single, strict=True):
            assert torch.allclose(one[k], other, rtol=1e-12, atol=0)


def test_what_fails_leaves_no_batch_behind():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * float(grad.sum() != 0)  # reads a number, which no batch of rows has

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedModelError):
        backward([Doubled.apply(x)], [x], [torch.ones(3, 4)], batched=True)
    (found,) = torch.autograd.grad(x.square(), [x], torch.ones(3, 4), is_grads_batched=True)
    assert torch.equal(found, 2 * torch.ones(3, 4))
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    assert level == 1
