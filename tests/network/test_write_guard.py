"""Weights of large models are not copied: an op that would write to them is refused before it runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import UnsupportedModelError
from featlearn.network import state
from featlearn.network.state import Inventory, state_kept


class Writing(nn.Module):
    """Layers, one tied to another, and an act of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5, bias=False), nn.Linear(5, 4), nn.Linear(4, 5, bias=False)
        self.c.weight = self.a.weight
        self.factor = nn.Parameter(torch.tensor([0.5, -1.5, 2.0]))
        self.act: Callable[[Writing], object] = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * self.factor.sum()


ACTS: dict[str, Callable[[Writing], object]] = {
    "in place": lambda m: m.a.weight.data.mul_(1.5),
    "under no_grad": lambda m: torch.no_grad()(m.b.bias.add_)(1.0),
    "a row": lambda m: m.a.weight.data[2].zero_(),
    "by out=": lambda m: torch.add(m.b.weight.data, 1.0, out=m.b.weight.data),
    "several": lambda m: torch._foreach_mul_([m.a.weight.data, m.b.bias.data], 3.0),
    "by index": lambda m: m.b.weight.data.index_fill_(0, torch.tensor([1]), 7.0),
    "in a view of another shape": lambda m: m.b.weight.detach().view(-1)[3:7].copy_(torch.ones(4)),
    "twice": lambda m: [m.factor.data.neg_(), m.factor.data.add_(1.0)],
    "elsewhere": lambda m: setattr(m.b.weight, "data", m.b.weight.data * 2),
    "elsewhere and there": lambda m: [setattr(m.b.weight, "data", m.b.weight.data * 2), m.b.weight.data.add_(1.0)],
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LARGE", 0)
    monkeypatch.setattr(state, "LARGE_TOGETHER", -1)


def bits(model: nn.Module) -> list[tuple[int, list[int]]]:
    return [(p.data_ptr(), p.detach().view(-1).view(torch.int32).tolist()) for p in model.parameters()]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ACTS)
def test_weights_that_are_written_to_are_refused_and_put_back(name: str) -> None:
    torch.manual_seed(0)
    model, x = Writing(), torch.randn(9, 4)
    session = fl.Session(model, x)
    expected, before = session.ntk(), bits(model)
    model.act = ACTS[name]
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="rewrites"):
            session.ntk()
        assert bits(model) == before
    model.act = lambda model: None
    assert torch.equal(session.ntk(), expected)


def test_small_weights_alone_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Writing()
    size = sum(p.nbytes for p in model.parameters())
    large = sum(p.nbytes for p in model.parameters() if p.nbytes >= 80)
    assert 0 < large < size
    for least, most, copied in ((0, 2**28, size), (0, 0, 0), (80, large, size), (80, large - 1, size - large)):
        monkeypatch.setattr(state, "LARGE", least)
        monkeypatch.setattr(state, "LARGE_TOGETHER", most)
        for only_read in (True, False):
            with state_kept(Inventory(model), only_read=only_read) as kept:
                assert (kept.guard is None) == (copied == size or not only_read)
                assert kept.copied_bytes == (copied if only_read else size)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_any_bit_of_a_weight_counts(dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LARGE_TOGETHER", -1)
    monkeypatch.setattr(state, "LARGE", 0 if large else 2**24)
    for place in (0, 4, 6):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(7).to(dtype))
        with state_kept(Inventory(module)) as kept:
            assert (kept.guard is None) != large
            assert not kept.rewritten()
            module.weight.data.view(torch.uint8)[place * dtype.itemsize] ^= 1  # nobody watches
            assert kept.rewritten() == {id(module.weight)}
            assert kept.rewritten() == ({id(module.weight)} if large else set()), "small ones are put back"
            if large:
                module.weight.data.view(torch.uint8)[place * dtype.itemsize] ^= 1


@pytest.mark.usefixtures("always")
def test_weights_that_are_written_to_behind_torch_are_told() -> None:
    torch.manual_seed(0)
    model, x = Writing(), torch.randn(9, 4)
    held = model.b.weight.detach().numpy()
    model.act = lambda model: held.__setitem__((1, 2), 0.25)
    with pytest.raises(UnsupportedModelError, match="cannot be put back"):
        fl.ntk(model, x)


@pytest.mark.usefixtures("always")
def test_code_that_does_not_bear_to_be_seen_runs_without() -> None:
    class Shy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if torch._C._len_torch_dispatch_stack():
                raise RuntimeError("no modes")
            return torch.tanh(self.layer(x))

    torch.manual_seed(0)
    model, x = Shy().double(), torch.randn(9, 4).double()
    rows = [torch.autograd.grad(f, tuple(model.parameters()), retain_graph=True) for f in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(9, 3, -1)
    expected = torch.einsum("ick,jck->ij", jacobian, jacobian) / 3
    torch.testing.assert_close(fl.ntk(model, x), expected, rtol=1e-12, atol=1e-12)


class Halving(torch.autograd.Function):
    """Its backward pass writes to the weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.w.data.mul_(0.5)
        return grad @ w.T, x.T @ grad


class InBackward(nn.Module):
    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.weight, self.hooked = nn.Parameter(torch.randn(4, 2)), hooked

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            return Halving.apply(x, self.weight)
        h = x @ self.weight
        h.register_hook(lambda grad: self.weight.data.mul_(0.5) and None)
        return h


@pytest.mark.usefixtures("always")
def test_weights_in_one_buffer_are_guarded() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(5, 3, bias=False))
    flat, begin = torch.randn(1 + sum(p.numel() for p in model.parameters())), 1
    for layer, name in ((model[0], "weight"), (model[0], "bias"), (model[2], "weight")):
        shape = getattr(layer, name).shape
        setattr(layer, name, nn.Parameter(flat[begin : begin + shape.numel()].view(shape)))
        begin += shape.numel()
    wrapped, x = nn.Sequential(nn.Identity(), Passing(), model), torch.randn(6, 4)
    before = flat.clone()
    plain = nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(5, 3, bias=False))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(fl.ntk(wrapped, x), fl.ntk(plain, x))
    assert torch.equal(flat, before)


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("offset", range(4))
def test_weights_anywhere_in_a_buffer_are_put_back(offset: int) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(70)[offset : offset + 64].view(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.w.mul_(1.5)
            return (x @ self.w).sum(1)

    model = Growing()
    before = bits(model)
    with pytest.raises(UnsupportedModelError, match="rewrites"):
        fl.ntk(model, torch.randn(5, 8))
    assert bits(model)[0][1] == before[0][1]


@pytest.mark.parametrize("hooked", [False, True])
def test_small_weights_that_a_backward_pass_writes_to_are_put_back(hooked: bool) -> None:
    torch.manual_seed(0)
    model, x = InBackward(hooked), torch.randn(5, 4)
    before, session = bits(model), fl.Session(model, x)
    for measure in (
        session.ntk,
        session.ntk,
        session.ntk_diagonal,
        lambda: fl.NTKOperator(model, x) @ torch.ones(5, 2),
    ):
        with pytest.raises(fl.FeatlearnError):
            measure()
        assert bits(model) == before


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("hooked", [False, True])
def test_large_weights_that_a_backward_pass_writes_to_are_told(hooked: bool) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match="cannot be put back"):
        fl.ntk(InBackward(hooked), torch.randn(5, 4))
