"""fl.ntk against dense Jacobians, one backward pass per scalar output, on every model of the zoo."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.network.inputs import map_tensors
from tests.references.jacobian import dense_jacobian, eval_mode, kernel_of, outputs_of
from tests.zoo.awkward import CASES
from tests.zoo.case import Case, default_dtype
from tests.zoo.families import CASES as FAMILIES

AWKWARD_ON_CPU = [(case, "cpu") for case in CASES]


class Measured(NamedTuple):
    """A case on a device, with the Jacobians of its two batches, from which all references follow."""

    case: Case
    device: str
    first: dict[str, Tensor]
    second: dict[str, Tensor]

    def reference(self, outputs: str, by: str = "network", cross: bool = False) -> Any:
        return kernel_of(self.first, self.second if cross else self.first, outputs, by)


def cases() -> list[Any]:
    devices = (("cpu", ()), ("cuda", (pytest.mark.gpu,)))
    return [
        pytest.param((case, device), id=f"{case.name}-{device}", marks=marks)
        for device, marks in devices
        for case in (*CASES, *FAMILIES)
    ]


@pytest.fixture(scope="module", params=cases())
def measured(request: pytest.FixtureRequest) -> Measured:
    """pytest runs the tests of one case after the other, so that each Jacobian is computed once and then let go."""
    case, device = request.param
    with default_dtype(torch.float64):
        model, x, x2, readout = on(device, case)
        return Measured(case, device, *(dense_jacobian(model, part, readout) for part in (x, x2)))


def on(device: str, case: Case) -> tuple[Any, ...]:
    model, x, x2, readout = case.build()
    if device == "cpu":
        return model, x, x2, readout
    x, x2 = (map_tensors(part, lambda tensor: tensor.to(device)) for part in (x, x2))
    return model.to(device), x, x2, readout


def assert_close(kernel: Tensor, reference: Tensor, scale: Tensor, tolerance: float) -> None:
    assert kernel.shape == reference.shape
    assert float((kernel - reference).abs().max()) <= tolerance * float(scale)


def test_every_mode_equals_the_dense_jacobian(measured: Measured):
    case = measured.case
    with default_dtype(torch.float64):
        model, x, x2, readout = on(measured.device, case)
        full, cross = (measured.reference("full", cross=cross) for cross in (False, True))
        scale, classes = full.abs().max(), full.shape[-1]

        assert_close(fl.ntk(model, x, outputs="full", readout=readout), full, scale, case.tolerance)
        assert_close(fl.ntk(model, x, x2=x2, outputs="full", readout=readout), cross, scale, case.tolerance)
        each = torch.einsum("pqcc->cpq", cross)
        assert_close(fl.ntk(model, x, x2=x2, outputs="each", readout=readout), each, scale, case.tolerance)
        assert_close(fl.ntk(model, x, x2=x2, outputs=classes - 1, readout=readout), each[-1], scale, case.tolerance)
        mean = torch.einsum("pqcc->pq", full) / classes
        assert_close(fl.ntk(model, x, readout=readout, verify=True), mean, scale, case.tolerance)


def test_every_parameter_and_layer_equals_the_dense_jacobian(measured: Measured):
    case = measured.case
    with default_dtype(torch.float64):
        model, x, _, readout = on(measured.device, case)
        references = measured.reference("sum", by="parameter")
        scale = sum(references.values()).abs().max()
        kernels = fl.ntk(model, x, outputs="sum", readout=readout, by="parameter", verify=True)
        assert list(kernels) == list(references)
        for name, reference in references.items():
            assert_close(kernels[name], reference, scale, case.tolerance)
        layers = fl.ntk(model, x, outputs="sum", readout=readout, by="layer")
        for name, reference in measured.reference("sum", by="layer").items():
            assert_close(layers[name], reference, scale, case.tolerance)


@pytest.mark.parametrize("measured", [one for one in cases() if one.values[0] in AWKWARD_ON_CPU], indirect=True)
def test_a_small_budget_gives_the_same_kernel(measured: Measured):
    """Chunks of one or two samples, many blocks, output by output."""
    case = measured.case
    with default_dtype(torch.float64):
        model, x, x2, readout = on("cpu", case)
        full, cross = (measured.reference("full", cross=cross) for cross in (False, True))
        budget = smallest_budget(model, x, x2, readout)
        plan = fl.plan(model, x, outputs="full", readout=readout, memory=budget)
        samples = full.shape[0]
        # Of one model all samples fit as soon as one does.
        assert samples == 1 or any(group.chunk < samples for group in plan.groups) or case.name == "quadratic_form"
        for outputs, reference in (("full", full), ("each", torch.einsum("pqcc->cpq", full))):
            kernel = fl.ntk(model, x, outputs=outputs, readout=readout, memory=budget)
            assert_close(kernel, reference, full.abs().max(), case.tolerance)
        kernel = fl.ntk(model, x, x2=x2, outputs="sum", readout=readout, memory=budget)
        assert_close(kernel, torch.einsum("pqcc->pq", cross), full.abs().max(), case.tolerance)


def smallest_budget(model: torch.nn.Module, x: Any, x2: Any, readout: Any) -> int:
    """The smallest power of two that is not refused."""
    for exponent in range(8, 40):
        try:
            for other, outputs in ((None, "full"), (None, "each"), (x2, "sum")):
                fl.plan(model, x, x2=other, outputs=outputs, readout=readout, memory=2**exponent)
        except fl.FeatlearnError:
            continue
        return 2**exponent
    raise AssertionError("no budget is enough")


# The audit sends a parameter whose rule is wrong to the exact fallback: kernels alone would not show a broken rule.
FALLBACK = {
    "samples_along_a_spatial_axis",
    "packed_sequences",
    "batch_in_two_halves",
    "even_and_odd_samples",
    "samples_reversed_inside",
    "samples_rolled_inside",
    "loop_over_samples",
    "loop_over_samples_of_unequal_length",
    "cholesky_weight",
    "dot_per_sample",
    "embedding_bag_sum_and_mean",
    "embedding_bag_max",
    "parameter_lookups",
    "samples_written_into_a_parameter_canvas",
    "where_between_parameters",
    "parameter_as_exponent",
    "custom_function",
    "experts_top1",
    "experts_top2_over_tokens",
    "fourier_layer_real",
    "fourier_layer_complex",
    "complex_linear_layer",
    "mixtral",
    "t5_encoder",
}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*CASES, *FAMILIES) if c.name not in FALLBACK])
def test_every_other_model_is_read_by_rules(case: Case):
    with default_dtype(torch.float64):
        model, x, _, readout = on("cpu", case)
        with eval_mode(model), torch.no_grad():
            outputs_of(model, x, readout)  # some rescale their weights in their first call in eval mode
        assert fl.plan(model, x, readout=readout).fallbacks == {}
