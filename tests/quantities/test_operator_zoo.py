"""Products of fl.NTKOperator against dense Jacobians on the models of the zoo."""

from typing import Any

import pytest
import torch

import featlearn as fl
from featlearn.network.inputs import map_tensors
from tests.references.jacobian import dense_ntk
from tests.zoo.awkward import CASES
from tests.zoo.case import Case, default_dtype
from tests.zoo.families import CASES as FAMILIES

# Models whose ways to J u differ: reuse, in-place ops, recurrence, attention, bags, closures, complex numbers ...
QUICK = {
    "embedding_bag_max",
    "radial_basis_functions",
    "transformer_encoder_with_padding",
    "custom_function",
    "fourier_layer_complex",
    "complex_linear_layer",
    "bare_scale_and_shift",
    "loop_over_samples",
}
CHOSEN = [case for i, case in enumerate(CASES) if i % 7 == 0 or case.name in QUICK]
# They compute parts in float32 whatever their weights are in, and the rounding of a backward pass depends on v.
SINGLE = {"rwkv", "modernbert"}


def cases() -> list[Any]:
    rest = [case for case in (*CASES, *FAMILIES) if case not in CHOSEN]
    return [
        *(pytest.param(case, "cpu", id=case.name) for case in CHOSEN),
        *(pytest.param(case, "cpu", id=case.name, marks=pytest.mark.slow) for case in rest),
        *(
            pytest.param(case, "cuda", id=f"{case.name}-cuda", marks=[pytest.mark.gpu, pytest.mark.slow])
            for case in (*CASES, *FAMILIES)
        ),
    ]


def test_the_quick_choice_is_large_enough():
    assert len(CHOSEN) >= 30
    assert {case.name for case in CASES} >= QUICK


@pytest.mark.parametrize(("case", "device"), cases())
def test_products_quadratic_forms_and_traces_equal_the_dense_jacobian(case: Case, device: str):
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    with default_dtype(torch.float64):
        model, x, _, readout = case.build()
        model, x = model.to(device), map_tensors(x, lambda tensor: tensor.to(device))
        full = dense_ntk(model, x, outputs="full", readout=readout)
        kernel = full.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
        slack = (1e-6 if case.name in SINGLE else case.tolerance) * float(kernel.abs().max())
        op = fl.NTKOperator(model, x, readout=readout)
        v = torch.randn(len(kernel), 2, generator=torch.Generator().manual_seed(0)).to(device)
        product = kernel @ v
        assert float((op @ v - product).abs().max()) <= 10 * slack
        assert float((op.quadratic(v) - (v * product).sum(0)).abs().max()) <= 10 * slack * len(kernel)
        assert abs(float(op.trace()) - float(kernel.trace())) <= 10 * slack * len(kernel)
