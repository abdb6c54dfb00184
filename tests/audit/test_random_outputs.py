"""Models that draw random numbers in eval mode are refused, unless what they draw has no effect."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import UnsupportedModelError

from ..references.jacobian import dense_ntk
from ..zoo.case import Net

Forward = Callable[[Any, Tensor], Tensor]


def mlp(forward: Forward, **parts: Any) -> Net:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 6), "second": nn.Linear(6, 3)}
    scales = {"rho": nn.Parameter(torch.randn(6, 4)), "sigma": nn.Parameter(torch.tensor(0.1))}
    return Net(forward, **layers, **scales, **parts).double()


def head(self: Net, hidden: Tensor) -> Tensor:
    return self.second(torch.tanh(hidden)) * (1 + self.sigma)


def with_random_weights(self: Net, x: Tensor) -> Tensor:
    mean = self.first.weight
    weight = mean + F.softplus(self.rho) * torch.randn_like(mean)
    return head(self, F.linear(x, weight, self.first.bias))


def with_layer_dropout(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * (0.0 if float(torch.rand(())) < 0.5 else 1.0))


def with_a_number_of_numpy(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * numpy.random.rand())


def with_a_number_of_python(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * random.random())


def with_a_generator_of_torch(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * float(torch.rand((), generator=self.generator)))


def with_a_generator_of_numpy(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * self.generator.random())


def with_a_legacy_generator(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * self.generator.uniform())


def behind_a_zero_gate(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * torch.rand(6).to(x)) * self.gate


RANDOM: dict[str, tuple[Forward, dict[str, Any]]] = {
    "weights": (with_random_weights, {}),
    "layer dropout": (with_layer_dropout, {}),
    "numpy": (with_a_number_of_numpy, {}),
    "python": (with_a_number_of_python, {}),
    "a generator of torch": (with_a_generator_of_torch, {"generator": torch.Generator()}),
    "a generator of numpy": (with_a_generator_of_numpy, {"generator": numpy.random.default_rng(3)}),
    "a legacy generator": (with_a_legacy_generator, {"generator": numpy.random.RandomState(3)}),
    "a generator of python": (with_a_legacy_generator, {"generator": None}),
    "behind a zero gate": (behind_a_zero_gate, {"gate": nn.Parameter(torch.zeros(()))}),
}
MEASURES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "kernel": fl.ntk,
    "in single": lambda model, x: fl.ntk(model, x, dtype=torch.float32),
    "diagonal": fl.quantities.ntk_diagonal,
    "session": lambda model, x: fl.Session(model, x).ntk(),
    "plan": fl.plan,
    "operator": lambda model, x: fl.NTKOperator(model, x) @ torch.ones(len(x), 3).double(),
}


def states() -> list[object]:
    legacy = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), legacy[1].tolist(), legacy[2:]]


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_random_outputs_are_refused(name: str, measure: Callable[[nn.Module, Tensor], object]) -> None:
    forward, parts = RANDOM[name]
    if name == "a generator of python":
        parts = {"generator": random.Random(3)}
        forward = lambda self, x: head(self, self.first(x) * self.generator.random())  # noqa: E731
    model, x = mlp(forward, **parts), torch.randn(9, 4).double()
    before = states()
    with pytest.raises(UnsupportedModelError, match=r"random numbers in eval mode.*torch\.manual_seed"):
        measure(model, x)
    assert states() == before


@pytest.mark.parametrize("name", [name for name in RANDOM if "zero" not in name and name != "a generator of python"])
def test_random_features_are_refused(name: str) -> None:
    forward, parts = RANDOM[name]
    model = mlp(forward, **parts)
    with pytest.raises(UnsupportedModelError, match="random numbers in eval mode"):
        fl.quantities.representation_kernels(model, torch.randn(9, 4).double(), layers="second")


def with_draws_that_are_not_used(self: Net, x: Tensor) -> Tensor:
    torch.rand(3), random.random(), numpy.random.rand()
    return head(self, self.first(x))


def with_dropout_of_nothing(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x) * (torch.rand_like(self.first(x)) >= 0.0) / (1 - 0.0))


def with_a_fixed_draw(self: Net, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return with_random_weights(self, x)


def mean_network(self: Net, x: Tensor) -> Tensor:
    return head(self, self.first(x))


@pytest.mark.parametrize(
    ("forward", "equal"),
    [
        (with_draws_that_are_not_used, mean_network),
        (with_dropout_of_nothing, mean_network),
        (with_a_fixed_draw, with_a_fixed_draw),
    ],
    ids=lambda forward: forward.__name__,
)
def test_draws_without_effect_are_accepted(forward: Forward, equal: Forward) -> None:
    model, x = mlp(forward), torch.randn(9, 4).double()
    expected = dense_ntk(mlp(equal), x)
    before, session = states(), fl.Session(model, x)
    for kernel in (fl.ntk(model, x), session.ntk(), session.ntk()):
        torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=1e-12)
    session.ntk_diagonal()
    fl.quantities.representation_kernels(model, x)
    assert states() == before


def test_noise_that_grows_while_a_session_is_open_is_refused() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        return head(self, self.first(x) + self.level * torch.randn(6).to(x))

    model, x = mlp(forward, level=torch.zeros(())), torch.randn(9, 4).double()
    session = fl.Session(model, x)
    torch.testing.assert_close(session.ntk(), dense_ntk(model, x), rtol=1e-12, atol=1e-12)
    model.level.fill_(0.1)
    with pytest.raises(UnsupportedModelError, match="random numbers in eval mode"):
        session.ntk()


def test_random_numbers_of_a_backward_pass_are_refused() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (1 + torch.rand(()))

    model = mlp(lambda self, x: head(self, Noisy.apply(self.first(x))))
    with pytest.raises(fl.FeatlearnError):
        fl.ntk(model, torch.randn(9, 4).double())
