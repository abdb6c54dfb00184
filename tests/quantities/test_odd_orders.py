"""fl.ntk on models whose samples meet the weights in odd orders, and refusals of those that couple their samples."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.network.inputs import map_tensors
from tests.references.jacobian import contract, dense_jacobian, dense_ntk
from tests.zoo.case import Case, Net, default_dtype
from tests.zoo.odd_orders import COUPLED_ORDERS, DRAWN, ODD_ORDERS
from tests.zoo.odd_permutations import swapped
from tests.zoo.odd_pooling import counts_of
from tests.zoo.test_zoo import take

SEEDS = range(10)
BATCHES = 6

# nested and compressed tensors may be refused, by an error of the library's own
REFUSABLE = [case for case in ODD_ORDERS if "refusable" in case.flags]
MEASURED = [case for case in ODD_ORDERS if "refusable" not in case.flags]
SORTED = [case for case in MEASURED if "sorted" in case.flags]
UNSORTED = [case for case in MEASURED if "sorted" not in case.flags]
PLACES = (0, 1, 2, 13, 22)
BY_CHANCE = (
    "second_of_two_equal_rows_zeroed",
    "both_of_two_equal_rows_zeroed",
    "decision_for_the_whole_batch",
    "clipping_chosen_for_the_whole_batch",
)


@pytest.fixture(autouse=True)
def double_on_one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with default_dtype(torch.float64):
        yield
    torch.set_num_threads(before)


def parametrized(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def assert_close(kernel: Tensor, reference: Tensor, scale: Tensor, tolerance: float) -> None:
    assert kernel.shape == reference.shape
    assert float((kernel.double() - reference).abs().max()) <= tolerance * float(scale)


@cache
def references_of_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    model, x, _, readout = case.build()
    return [(other, dense_ntk(model, other, readout=readout)) for other in [x, *other_batches(x)]]


def other_batches(x: Tensor, count: int = BATCHES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(count)]


@cache
def jacobian_of(case: Case, second: bool = False) -> dict[str, Tensor]:
    """Of the case's first or second batch; several tests need it."""
    model, x, x2, readout = case.build()
    return dense_jacobian(model, x2 if second else x, readout)


def references(case: Case, outputs: str = "mean", second: bool = False) -> dict[str, Tensor]:
    """The kernel of each parameter, of the first batch with itself or with the second one."""
    first, other = jacobian_of(case), jacobian_of(case, second)
    return {name: contract(first[name], other[name], outputs) for name in first}


def reference_of(case: Case, outputs: str = "mean", second: bool = False) -> Tensor:
    return torch.stack(list(references(case, outputs, second).values())).sum(0)


def assert_every_mode(case: Case) -> None:
    """Twice without a check, since a second call may go another way than the first; then with it."""
    model, x, x2, readout = case.build()
    scale = reference_of(case, "full").abs().max()
    for options in ({}, {}, {"verify": True}):
        assert_close(fl.ntk(model, x, readout=readout, **options), reference_of(case), scale, case.tolerance)
    for outputs in ("each", "full"):
        kernel = fl.ntk(model, x, outputs=outputs, readout=readout)
        assert_close(kernel, reference_of(case, outputs), scale, case.tolerance)
    cross = fl.ntk(model, x, x2=x2, outputs="full", readout=readout)
    assert_close(cross, reference_of(case, "full", second=True), scale, case.tolerance)


def assert_every_parameter(case: Case) -> None:
    model, x, _, readout = case.build()
    scale = reference_of(case).abs().max()
    kernels = fl.ntk(model, x, readout=readout, by="parameter")
    assert list(kernels) == list(references(case))
    for name, reference in references(case).items():
        assert_close(kernels[name], reference, scale, case.tolerance)


@parametrized(MEASURED)
def test_every_mode_equals_the_dense_jacobian(case: Case):
    assert_every_mode(case)


@parametrized(MEASURED)
def test_every_parameter_equals_the_dense_jacobian(case: Case):
    assert_every_parameter(case)


@parametrized(MEASURED)
def test_single_precision_is_close_to_the_dense_jacobian(case: Case):
    model, x, _, readout = case.build()
    reference = reference_of(case)
    single = map_tensors(x, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    with default_dtype(torch.float32):
        kernel = fl.ntk(model.float(), single, readout=readout)
    assert_close(kernel, reference, reference.abs().max(), 1e-3)


@parametrized(UNSORTED)
def test_shuffled_batches_have_shuffled_kernels(case: Case):
    """Shapes stay as they are; short and long samples, experts and ranks change places."""
    model, x, _, readout = case.build()
    reference = reference_of(case)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        order = torch.randperm(len(reference), generator=generator)
        kernel = fl.ntk(model, take(x, order), readout=readout)
        assert_close(kernel, reference[order][:, order], reference.abs().max(), case.tolerance)


def wrong_places(case: Case, batches: dict[int, Any]) -> list[int]:
    """Where the kernel is wrong, for one model that is measured on one batch after the other."""
    model, _, _, readout = case.build()
    wrong = []
    for place, batch in batches.items():
        reference = dense_ntk(model, batch, readout=readout)
        kernel = fl.ntk(model, batch, readout=readout)
        if float((kernel - reference).abs().max()) > case.tolerance * float(reference.abs().max()):
            wrong.append(place)
    return wrong


@parametrized([case for case in MEASURED if "ragged" in case.flags])
def test_two_irregular_samples_are_found_wherever_they_are(case: Case):
    """All but two neighbors have equal length: a look at some samples, or at regular shares of rows, misses them."""
    x, _ = case.build()[1]
    assert wrong_places(case, {place: (x, counts_of(len(x), place)) for place in PLACES}) == []


@parametrized([case for case in MEASURED if "swapped" in case.flags])
def test_two_swapped_samples_are_found_wherever_they_are(case: Case):
    """All but two neighbors are in the order that the model sorts by."""
    x = case.build()[1]
    assert wrong_places(case, {place: swapped(x, place) for place in PLACES}) == []


@parametrized(SORTED)
def test_batch_after_batch_equals_the_dense_jacobian(case: Case):
    """The order comes from the data: what was learned of one batch does not hold for the next."""
    model, _, _, readout = case.build()
    for other, reference in references_of_batches(case):
        kernel = fl.ntk(model, other, readout=readout)
        assert_close(kernel, reference, reference.abs().max(), case.tolerance)


@parametrized(SORTED)
def test_a_session_equals_the_dense_jacobian_batch_after_batch(case: Case):
    model, x, x2, readout = case.build()
    session = fl.Session(model, x, readout=readout)
    for other, reference in references_of_batches(case):
        assert_close(session.ntk(x=other), reference, reference.abs().max(), case.tolerance)
    cross = reference_of(case, "full", second=True)
    assert_close(session.ntk(x2, outputs="full"), cross, cross.abs().max(), case.tolerance)


@parametrized(UNSORTED)
def test_a_session_equals_the_dense_jacobian(case: Case):
    """Its own batch, then a shuffled one of the same shape."""
    model, x, _, readout = case.build()
    reference = reference_of(case, "each")
    session = fl.Session(model, x, readout=readout)
    assert_close(session.ntk(outputs="each"), reference, reference.abs().max(), case.tolerance)
    order = torch.randperm(reference.shape[1], generator=torch.Generator().manual_seed(2))
    kernel = session.ntk(x=take(x, order), outputs="each")
    assert_close(kernel, reference[:, order][:, :, order], reference.abs().max(), case.tolerance)


@pytest.mark.parametrize("name", [case.name for case in COUPLED_ORDERS])
def test_coupled_samples_are_refused_at_every_seed(name: str):
    measured = []
    for seed in SEEDS:
        model, x, _, readout = DRAWN[name](seed)
        try:
            fl.ntk(model, x, readout=readout)
        except fl.FeatlearnError:
            continue
        measured.append(seed)
    assert measured == []


def harmless(x: Tensor, count: int) -> list[Tensor]:
    """Batches in which no samples are equal and no feature is large."""
    return [other.clamp(-1.5, 1.5) for other in other_batches(x, count)]


@pytest.mark.parametrize("name", BY_CHANCE)
def test_coupled_samples_are_refused_after_batches_without_any(name: str):
    measured = []
    for seed in SEEDS:
        model, x, _, readout = DRAWN[name](seed)
        for other in harmless(x, 3):
            with suppress(fl.FeatlearnError):
                fl.ntk(model, other, readout=readout)
        try:
            fl.ntk(model, x, readout=readout)
        except fl.FeatlearnError:
            continue
        measured.append(seed)
    assert measured == []


@pytest.mark.parametrize("name", BY_CHANCE)
def test_a_session_refuses_coupled_samples_in_a_later_batch(name: str):
    measured = []
    for seed in SEEDS:
        model, x, _, readout = DRAWN[name](seed)
        try:
            session = fl.Session(model, harmless(x, 1)[0], readout=readout)
            session.ntk(x=x)
        except fl.FeatlearnError:
            continue
        measured.append(seed)
    assert measured == []


@contextmanager
def measured_or_refused() -> Iterator[None]:
    """A failed check is no refusal: it says that the kernel is wrong."""
    try:
        yield
    except fl.errors.VerificationError:
        raise
    except fl.FeatlearnError:
        return


@parametrized(REFUSABLE)
def test_nested_and_compressed_tensors_are_measured_or_refused(case: Case):
    for check in (assert_every_mode, assert_every_parameter):
        with measured_or_refused():
            check(case)


class NormedGradient(torch.autograd.Function):
    """The identity; its gradient is divided by its norm over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm().clamp(min=1e-30)


def test_a_backward_pass_that_is_not_linear_is_measured_or_refused():
    """Passes for one output at a time have a meaning; a pass for several at once gives something else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"body": nn.Linear(3, 5), "head": nn.Linear(5, 2)}
        model = Net(lambda self, x: self.head(NormedGradient.apply(torch.tanh(self.body(x)))), **layers)
        x = torch.randn(24, 3)
    reference = dense_ntk(model, x)
    with measured_or_refused():
        assert_close(fl.ntk(model, x), reference, reference.abs().max(), 1e-10)


class OwnStep(torch.optim.SGD):
    """Steps along the sign of the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad.sign()


def test_an_optimizer_with_a_step_of_its_own_is_refused():
    """That it derives from SGD says nothing about the update it makes."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    fl.ntk(model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(fl.FeatlearnError):
        fl.ntk(model, x, optimizer=OwnStep(model.parameters(), lr=0.1))
