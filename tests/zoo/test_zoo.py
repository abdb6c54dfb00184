"""Checks of the zoo itself, against the reference only."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..references.jacobian import dense_jacobian, dense_ntk, eval_mode, outputs_of
from .awkward import CASES, REFUSED
from .case import Case
from .families import CASES as FAMILIES
from .odd_orders import COUPLED_ORDERS, DRAWN, ODD_ORDERS

INDEPENDENT = CASES + FAMILIES + ODD_ORDERS
EVERY = INDEPENDENT + REFUSED + COUPLED_ORDERS
COUPLED = [case for case in REFUSED if "coupled" in case.flags]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other on several threads: up to 25 times slower on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(case: Case) -> tuple[nn.Module, Any, Any, Any]:
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    return case.build()


def take(x: Any, index: Tensor) -> Any:
    """Samples of a batch: every tensor in it has them first, or is shared by all (size 1); the rest goes through."""
    if isinstance(x, Mapping):
        return {name: take(value, index) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(take(value, index) for value in x)
    return x[index] if isinstance(x, Tensor) and len(x) > 1 else x


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, Mapping):
        return tensors_in(tuple(x.values()))
    if isinstance(x, tuple):
        return [tensor for value in x for tensor in tensors_in(value)]
    return [x] if isinstance(x, Tensor) else []


def state_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


def resampled_twice(case: Case) -> tuple[Tensor, Tensor]:
    """f(x)[index] and f(x[index]), for indices drawn with replacement."""
    model, x, _, readout = build(case)
    with eval_mode(model):
        f = outputs_of(model, x, readout).detach()
        last = len(f) - 1
        index = torch.tensor([last, 0, last, last // 2])
        return f[index], outputs_of(model, take(x, index), readout).detach()


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def test_there_are_enough_cases_with_names_of_their_own() -> None:
    assert len(CASES) >= 60
    assert len(FAMILIES) >= 20
    assert len(ODD_ORDERS) >= 36
    repeated = [name for name, count in Counter(names(EVERY)).items() if count > 1]
    assert repeated == []


def test_every_case_says_why_it_is_here() -> None:
    assert [case.name for case in EVERY if not case.why] == []


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_case_is_sound(case: Case) -> None:
    """Builds are deterministic; where samples are independent, outputs say so and the reference kernel is not empty."""
    before = torch.get_rng_state()
    first, second = build(case), build(case)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(state_of(first[0]), state_of(second[0]), rtol=0, atol=0)
    for tensor, other in zip(tensors_in((first[1], first[2])), tensors_in((second[1], second[2])), strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0)
    if case not in INDEPENDENT:
        return
    f, resampled = resampled_twice(case)
    assert f.ndim == 2
    assert f.is_floating_point()
    assert (resampled - f).abs().max() <= case.tolerance * f.abs().max()
    model, x, x2, readout = first
    kernel = dense_ntk(model, x, x2, readout=readout)
    assert kernel.shape[0] != kernel.shape[1]
    assert kernel.isfinite().all()
    assert kernel.abs().max() > 1e-3


@pytest.mark.parametrize("case", COUPLED, ids=lambda case: case.name)
def test_coupled_samples_are_coupled(case: Case) -> None:
    f, resampled = resampled_twice(case)
    assert f.shape != resampled.shape or (f - resampled).abs().max() > 1e-6 * f.abs().max()


def largest_differences(model: nn.Module, x: Any, readout: Any, indices: list[Tensor]) -> tuple[float, float]:
    """How much outputs and Jacobians of some samples differ between the whole batch and batches of these alone."""

    def measured(inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with eval_mode(model), torch.no_grad():
            return outputs_of(model, inputs, readout), dense_jacobian(model, inputs, readout)

    f, whole = measured(x)
    scale = max(float(jacobian.abs().max()) for jacobian in whole.values())
    outputs = jacobians = 0.0
    for index in indices:
        alone, own = measured(take(x, index))
        outputs = max(outputs, float((f[index] - alone).abs().max() / f.abs().max()))
        jacobians = max(jacobians, *(float((whole[name][index] - own[name]).abs().max()) / scale for name in whole))
    return outputs, jacobians


@pytest.mark.parametrize("case", ODD_ORDERS, ids=lambda case: case.name)
def test_odd_orders_leave_samples_independent(case: Case) -> None:
    """Shuffled, halved, with repetitions and alone: the same outputs and the same Jacobians."""
    model, x, _, readout = build(case)
    samples, generator = len(tensors_in(x)[0]), torch.Generator().manual_seed(0)
    shuffled = torch.randperm(samples, generator=generator)
    repeated = torch.randint(samples, (samples,), generator=generator)
    indices = [shuffled, shuffled[: samples // 2], repeated, *torch.arange(samples)[::5, None]]
    assert max(largest_differences(model, x, readout, indices)) <= case.tolerance


@pytest.mark.parametrize("case", COUPLED_ORDERS, ids=lambda case: case.name)
def test_coupled_orders_are_coupled_at_every_seed(case: Case) -> None:
    """Outputs differ between the batch and samples alone; or only Jacobians, where the flag says so."""
    for seed in range(10):
        model, x, _, readout = DRAWN[case.name](seed)
        if "gradient" in case.flags:
            outputs, jacobians = largest_differences(model, x, readout, [*torch.arange(len(x))[:, None]])
            assert outputs <= case.tolerance
            assert jacobians > 1e-3
        else:
            with eval_mode(model), torch.no_grad():
                f = outputs_of(model, x, readout)
                alone = torch.cat([outputs_of(model, x[i : i + 1], readout) for i in range(len(x))])
            assert (f - alone).abs().max() > 1e-3 * f.abs().max()
