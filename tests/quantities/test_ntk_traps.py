"""Networks on which a careless engine gives a wrong number, or refuses without reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CoupledSamplesError
from tests.references.jacobian import dense_ntk


class Net(nn.Module):
    """Parts and a forward function."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(self, *inputs)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(n: int, m: int, seed: int = 0, **options: Any) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(n, m, dtype=torch.float64, **options)


def assert_exact(model: nn.Module, x: Any, **options: Any) -> None:
    reference = dense_ntk(model, x, outputs="full", **options)
    kernel = fl.ntk(model, x, outputs="full", **options)
    assert float((kernel - reference).abs().max() / reference.abs().max()) < 1e-10


def test_experts_that_the_first_samples_do_not_use_count():
    def forward(self: Net, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            if (chosen == i).any():
                out[chosen == i] = expert(x[chosen == i])
        return out

    model = Net(forward, gate=linear(3, 8), experts=nn.ModuleList(linear(3, 2, seed) for seed in range(8)))
    x = drawn(32, 3)
    assert {p.route for p in fl.plan(model, x).parameters if p.name.startswith("experts")} >= {"fallback", "unused"}
    assert_exact(model, x)


def test_a_branch_that_only_one_sample_takes_counts():
    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.stack([self.rare(row) if row[0] > 100 else self.common(row) for row in x])

    x = drawn(30, 3)
    x[17, 0] = 1000.0
    assert_exact(Net(forward, rare=linear(3, 2), common=linear(3, 2, 1)), x)


def test_adaptive_softmax():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [4, 10], div_value=2.0).double()
    x = (drawn(24, 6), torch.randint(20, (24,), generator=torch.Generator().manual_seed(1)))
    assert_exact(model, x, readout=lambda out: out.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_cancel_are_not_taken_for_coupling(dtype: torch.dtype):
    """Antisymmetric initialization: two equal halves, f = 0 but for rounding."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) - self.d(torch.tanh(self.c(x)))

    model = Net(forward, a=linear(5, 50), b=linear(50, 2), c=linear(5, 50), d=linear(50, 2)).to(dtype)
    x = drawn(16, 5).to(dtype)
    reference = dense_ntk(model, x)
    assert float((fl.ntk(model, x) - reference).norm() / reference.norm()) < (1e-6 if dtype == torch.float32 else 1e-14)


class CenteredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


def straight_through(self: Net, x: Tensor) -> Tensor:
    h = self.a(x)
    mean = h.mean(0)
    return self.b(torch.tanh(h + (mean - mean.detach())))


def centered_backward(self: Net, x: Tensor) -> Tensor:
    return self.b(torch.tanh(CenteredBackward.apply(self.a(x))))


def hidden_behind_an_offset(self: Net, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.tanh(h - h.mean(0))) + 1e5


def hidden_behind_a_column(self: Net, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.tanh(h - h.mean(0))) * 1e-6 + torch.tensor([0.0, 1e6]) * x[:, :1]


def capacity(self: Net, x: Tensor) -> Tensor:
    """Each half of the units serves at most a quarter of the batch, first come, first served."""
    h = self.a(x)
    side = h[:, 0] > 0
    place = torch.where(side, side.cumsum(0), (~side).cumsum(0))
    return self.b(h * (place <= len(x) // 4 + 1)[:, None])


@pytest.mark.parametrize(
    "forward", [straight_through, centered_backward, hidden_behind_an_offset, hidden_behind_a_column, capacity]
)
def test_coupling_that_hides_is_refused(forward: Callable[..., Tensor]):
    model, x = Net(forward, a=linear(4, 6), b=linear(6, 2)), drawn(40, 4)
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, x)


def test_time_major_layers_with_as_many_samples_as_steps():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x.transpose(0, 1)) - 1.5))[7]

    model, x = Net(forward, a=linear(2, 3), b=linear(3, 1, bias=False)).float(), drawn(120, 120, 2).float()
    reference = dense_ntk(model, x)
    assert fl.plan(model, x).fallbacks == {}
    assert float((fl.ntk(model, x) - reference).abs().max() / reference.abs().max()) < 1e-5


def test_hooks_on_a_compiled_model_are_part_of_the_function():
    model = torch.compile(nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2)), backend="eager")
    model.register_forward_hook(lambda module, args, output: 3 * output)
    assert_exact(model, drawn(5, 3))


def test_a_network_that_differentiates_by_its_input():
    def forward(self: Net, x: Tensor) -> Tensor:
        u = torch.tanh(self.a(x)).sum(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return slope

    assert_exact(Net(forward, a=linear(3, 4)), drawn(5, 3).requires_grad_(True))


def test_a_module_is_a_readout():
    model, x = nn.Conv1d(2, 3, 2, dtype=torch.float64), drawn(4, 2, 5)
    reference = dense_ntk(model, x, readout=lambda out: out.flatten(1))
    torch.testing.assert_close(fl.ntk(model, x, readout=nn.Flatten()), reference)


def test_a_tied_parameter_answers_to_each_of_its_names():
    model = nn.ModuleDict({"e": linear(4, 4, bias=False), "h": linear(4, 4, bias=False)})
    model["h"].weight = model["e"].weight
    net = Net(lambda self, x: self.m["h"](torch.tanh(self.m["e"](x))), m=model)
    assert list(fl.ntk(net, drawn(3, 4), by="parameter", parameters="m.h.weight")) == ["m.e.weight"]


def test_a_model_may_cast_its_own_input():
    model = Net(lambda self, x: self.a(x.double()), a=linear(3, 2))
    assert_exact(model, drawn(5, 3).half())


def test_gradients_too_small_for_their_precision_are_refused():
    model, x = linear(3, 2).float(), drawn(5, 3).float()
    with pytest.raises(fl.FeatlearnError, match=r"float32 cannot hold; measure with dtype=torch.float64"):
        fl.ntk(model, x, readout=lambda out: out * 1e-25)
    assert float(fl.ntk(model, x, readout=lambda out: out * 1e-25, dtype=torch.float64).trace()) > 0


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_weight_decay_enters_the_second_moment_as_torch_has_it(kind: Any, decay: float):
    """Against the moment that stands after the step has really been made."""
    model, x = linear(3, 2), drawn(6, 3)
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=decay)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        kernel = None if not optimizer.state else fl.ntk(model, x, optimizer=optimizer, by="parameter")["weight"]
        optimizer.step()
    state = optimizer.state[model.weight]
    key = {torch.optim.RMSprop: "square_avg", torch.optim.Adagrad: "sum"}.get(kind, "exp_avg_sq")
    moment = state[key] / (1 - 0.999**2) if key == "exp_avg_sq" else state[key]
    rate = 0.1 / (moment.sqrt() + optimizer.param_groups[0]["eps"])
    jacobian = torch.einsum("co,pi->pcoi", torch.eye(2, dtype=x.dtype), x)
    torch.testing.assert_close(kernel, torch.einsum("pcoi,oi,qcoi->pq", jacobian, rate, jacobian) / 2)
