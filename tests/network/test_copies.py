"""Copies of a model that keeps what it computed in an earlier pass."""

import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import UnsupportedModelError
from featlearn.network.copies import copied, network_at

from ..references.jacobian import dense_ntk
from ..zoo.case import Net


class Policy:
    """A plain object that holds a distribution, as policies of reinforcement learning do."""

    def __init__(self, mean: Tensor) -> None:
        self.distribution = torch.distributions.Normal(mean, torch.ones_like(mean), validate_args=False)


KEEP: dict[str, Callable[[Tensor], Any]] = {
    "an attribute": lambda hidden: hidden,
    "a list": lambda hidden: [hidden, [hidden * 2]],
    "a dictionary": lambda hidden: {"a": {"b": hidden}},
    "a tuple": lambda hidden: (hidden, (hidden,)),
    "a queue": lambda hidden: deque([hidden]),
    "a plain object": lambda hidden: SimpleNamespace(last=hidden),
    "a distribution": Policy,
    "a view": lambda hidden: [hidden[:1], hidden.detach()],
}


def network(keep: Callable[[Tensor], Any]) -> Net:
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.last = keep(hidden)
        return self.second(hidden)

    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 3), last=None)


@pytest.mark.parametrize("name", KEEP)
def test_models_that_keep_results_of_a_pass_are_copied_to_double(name: str) -> None:
    model, x = network(KEEP[name]), torch.randn(7, 4)
    model(x[:3]).sum().backward()
    last = model.last
    kernel = fl.ntk(model, x, dtype=torch.float64)
    expected = dense_ntk(network(KEEP[name]).double(), x.double())
    torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=0)
    assert model.last is last
    features = fl.quantities.representation_kernels(model, x, dtype=torch.float64)["second"]
    hidden = torch.tanh(model.double().first(x.double()))
    torch.testing.assert_close(features, hidden @ hidden.T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", KEEP)
def test_models_that_keep_results_of_a_pass_have_a_linearization_gap(name: str) -> None:
    model, x = network(KEEP[name]).double(), torch.randn(7, 4).double()
    model(x[:3]).sum().backward()
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    assert torch.equal(network_at(model, initial)(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    start, parts = network_at(model, initial), dict(model.named_parameters())
    moved = {key: (parts[key] - p).detach() for key, p in start.named_parameters()}
    f0, linear = torch.func.jvp(
        lambda p: torch.func.functional_call(start, p, x),
        ({key: p.detach() for key, p in start.named_parameters()},),
        (moved,),
    )
    change, miss = model(x) - f0, model(x) - f0 - linear
    change, miss = (part - part.mean(0) for part in (change, miss))
    gap = fl.linearization_gap(model, x, initial)
    assert gap == pytest.approx(float((miss.norm() / change.norm()).detach()), rel=1e-10)


def test_watching_a_model_that_keeps_its_activations_gives_a_gap(tmp_path: Any) -> None:
    model, x = network(KEEP["a list"]), torch.randn(16, 4)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with fl.watch(
        model, (x, torch.randn(16, 3)), out=tmp_path / "run", every=2, budget=None, optimizer=optimizer
    ) as watch:
        for _ in range(4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    rows = [row["values"] for row in map(json.loads, (tmp_path / "run" / "scalars.jsonl").read_text().splitlines())]
    assert 0.0 < rows[-1]["gap/probe"] < 1.0


def through_a_stored_result(container: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> Net:
    """A network whose outputs depend on a weight through a tensor that was computed once."""

    def forward(self: Net, x: Tensor) -> Tensor:
        if self.stored is None:
            self.stored = container(self.scale.exp())
        return self.body(x) * read(self.stored)

    torch.manual_seed(0)
    model = Net(forward, body=nn.Linear(4, 3), scale=nn.Parameter(torch.randn(3)), stored=None)
    model(torch.randn(2, 4))
    return model


@pytest.mark.parametrize(
    ("container", "read"),
    [
        (lambda t: t, lambda t: t),
        (lambda t: [t], lambda kept: kept[0]),
        (lambda t: SimpleNamespace(t=t), lambda kept: kept.t),
        (lambda t: {"t": t[:2]}, lambda kept: torch.cat([kept["t"], kept["t"][:1]])),
    ],
)
def test_outputs_that_act_through_a_stored_result_are_refused_in_double(container: Any, read: Any) -> None:
    model = through_a_stored_result(container, read)
    with pytest.raises(UnsupportedModelError, match="scale act through a tensor that the model computed once"):
        fl.ntk(model, torch.randn(5, 4), dtype=torch.float64)


def test_a_stored_result_that_no_output_reads_does_not_matter() -> None:
    model = Net(lambda self, x: self.body(x), body=nn.Linear(4, 3), other=nn.Linear(2, 2), stored=None)
    model.stored = [model.other(torch.randn(3, 2))]
    x = torch.randn(5, 4)
    kernel = fl.ntk(model, x, dtype=torch.float64)
    torch.testing.assert_close(kernel, x.double() @ x.double().T + 1.0, rtol=1e-12, atol=1e-12)


class Spectral(nn.Module):
    """A Fourier layer: complex weights, a complex buffer, real outputs."""

    def __init__(self, lift: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 4, dtype=torch.complex64))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        self.lift = nn.Linear(8, 8) if lift else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.lift(x))[..., :4] * self.phase
        return torch.fft.irfft(torch.einsum("pik,iok->pok", modes, self.weight), n=8).flatten(1)[:, ::5]


@pytest.mark.parametrize("lift", [False, True])
def test_complex_weights_are_copied_to_another_precision(lift: bool) -> None:
    torch.manual_seed(0)
    model, x = Spectral(lift), torch.randn(5, 2, 8)
    twin = copied(model, torch.float64)
    assert {p.dtype for p in twin.parameters()} <= {torch.complex128, torch.float64}
    assert twin.phase.dtype == torch.complex128
    expected = dense_ntk(twin, x.double())
    torch.testing.assert_close(fl.ntk(model, x, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
    single = fl.ntk(twin, x.double(), dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert model.weight.dtype == model.phase.dtype == torch.complex64
