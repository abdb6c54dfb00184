"""The kernel of the update an optimizer makes, against the definition and against real steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_jacobian

Build = Callable[[nn.Module, float], torch.optim.Optimizer]


class Shared(nn.Module):
    """Every kind of reading: outer products, a direct bias, a pulled back and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.tied = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(3)))
        self.last = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.normed(torch.tanh(self.first(x))))
        return self.last(torch.tanh(h @ self.tied) @ self.tied.T)


def built() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Shared().double()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(6, n, dtype=torch.float64, generator=generator) for n in (4, 2))
    return model, x, y


def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.startswith("first")], "lr": 3 * lr},
        {"params": [p for n, p in named if not n.startswith("first")], "lr": lr},
    ]


OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda m, lr: torch.optim.SGD(groups(m, lr)),
    "Adam": lambda m, lr: torch.optim.Adam(groups(m, lr), betas=(0.0, 0.9), eps=1e-3),
    "AMSGrad": lambda m, lr: torch.optim.Adam(groups(m, lr), betas=(0.0, 0.9), eps=1e-3, amsgrad=True),
    "AdamW": lambda m, lr: torch.optim.AdamW(groups(m, lr), betas=(0.0, 0.8), eps=1e-2, weight_decay=0.0),
    "RMSprop": lambda m, lr: torch.optim.RMSprop(groups(m, lr), alpha=0.7, eps=1e-3),
    "centered RMSprop": lambda m, lr: torch.optim.RMSprop(groups(m, lr), alpha=0.7, eps=1e-1, centered=True),
    "Adagrad": lambda m, lr: torch.optim.Adagrad(groups(m, lr), lr_decay=0.1, eps=1e-3),
}


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """0.5 |f - y|^2, summed; returns the residual f - y."""
    model.zero_grad()
    f = model(x)
    (0.5 * (f - y).square().sum()).backward()
    return (f - y).detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_small_step_moves_the_outputs_as_the_kernel_says(name: str):
    """df = -K (f - y), the learning rates inside K. No momentum, so the update is diag(eta) times the gradient."""
    lr = 1e-6
    model, x, y = built()
    optimizer = OPTIMIZERS[name](model, lr)
    for _ in range(4):
        backward(model, x, y)
        optimizer.step()
    residual = backward(model, x, y)
    kernel = fl.ntk(model, x, outputs="full", optimizer=optimizer, verify=True)
    before = model(x).detach()
    optimizer.step()
    change = model(x).detach() - before
    predicted = -torch.einsum("pqcd,qd->pc", kernel, residual)
    assert float((change - predicted).norm() / change.norm()) < 1e-3


@pytest.mark.parametrize("by", ["parameter", "network"])
def test_it_is_the_weighted_sum_over_entries(by: str):
    model, x, y = built()
    optimizer = torch.optim.Adam(groups(model, 0.1), betas=(0.9, 0.99), eps=1e-3)
    backward(model, x, y)
    optimizer.step()
    model.zero_grad()  # no gradient at hand: the second moment counts as it stands
    jacobian, references = dense_jacobian(model, x), {}
    for group in optimizer.param_groups:
        for name, parameter in model.named_parameters():
            if any(parameter is p for p in group["params"]):
                moment = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.99)
                rate = (group["lr"] / (moment.sqrt() + group["eps"])).flatten()
                references[name] = torch.einsum("pcn,n,qcn->cpq", jacobian[name], rate, jacobian[name])
    kernels = fl.ntk(model, x, outputs="each", optimizer=optimizer, by=by)
    if by == "network":
        torch.testing.assert_close(kernels, sum(references.values()))
    else:
        for name, reference in references.items():
            torch.testing.assert_close(kernels[name], reference)


def test_sgd_groups_weigh_the_layers():
    model, x, _ = built()
    optimizer = torch.optim.SGD(groups(model, 0.2), momentum=0.9, weight_decay=0.1)
    plain = fl.ntk(model, x, by="parameter")
    weighed = fl.ntk(model, x, by="parameter", optimizer=optimizer)
    for name, kernel in plain.items():
        torch.testing.assert_close(weighed[name], (0.6 if name.startswith("first") else 0.2) * kernel)


def test_parameters_the_optimizer_does_not_hold_do_not_move():
    model, x, _ = built()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.5)
    kernels = fl.ntk(model, x, by="parameter", optimizer=optimizer)
    assert float(kernels["last.weight"].abs().max()) == 0.0
    assert float(kernels["first.weight"].abs().max()) > 0.0


def test_rates_follow_a_copy_in_double():
    model, x, y = built()
    model, x, y = model.float(), x.float(), y.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-2)
    backward(model, x, y)
    optimizer.step()
    single = fl.ntk(model, x, optimizer=optimizer)
    double = fl.ntk(model, x, optimizer=optimizer, dtype=torch.float64)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-6)
