"""Kernels where no proof replaces passes: samples are run again in parts in every call."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.errors import FeatlearnError
from featlearn.quantities.ntk import ntk_of

from ..references.jacobian import dense_ntk
from .awkward import CASES, REFUSED
from .case import Case, default_dtype
from .families import CASES as FAMILIES
from .odd_orders import COUPLED_ORDERS, ODD_ORDERS

INDEPENDENT = [*CASES, *FAMILIES, *ODD_ORDERS]
TO_BE_REFUSED = [*REFUSED, *COUPLED_ORDERS]


def sampled(cases: list[Case], step: int) -> list[Any]:
    """Return all cases, most of them marked as slow."""
    return [
        pytest.param(case, id=case.name, marks=() if k % step == 0 else pytest.mark.slow)
        for k, case in enumerate(cases)
    ]


def unproved(model: nn.Module, readout: Any) -> AuditedModel:
    return AuditedModel(model, replace(AuditedModel(model, readout=readout).request, use_proofs=False))


@pytest.mark.parametrize("case", sampled(INDEPENDENT, 8))
def test_kernels_equal_the_dense_jacobian(case: Case) -> None:
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    with default_dtype(torch.float64):
        model, x, x2, readout = case.build()
        audited = unproved(model, readout)
        for second in (x, x2):
            expected = dense_ntk(model, x, second, "full", readout=readout)
            for _ in range(2):
                kernel = ntk_of(audited, None if second is x else x2, x=x, outputs="full")
                assert isinstance(kernel, Tensor)
                assert float((kernel - expected).abs().max()) <= case.tolerance * float(expected.abs().max())


@pytest.mark.parametrize("case", sampled(TO_BE_REFUSED, 4))
def test_models_that_are_refused_are_refused(case: Case) -> None:
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    with default_dtype(torch.float64):
        model, x, _, readout = case.build()
        with pytest.raises(FeatlearnError):
            ntk_of(unproved(model, readout), x=x)


def test_proofs_are_what_saves_passes() -> None:
    calls = []
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    x, numbers = torch.randn(30, 4, dtype=torch.float64), []
    for audited in (AuditedModel(model), unproved(model, None)):
        ntk_of(audited, x=x)
        calls.clear()
        ntk_of(audited, x=x)
        numbers.append(len(calls))
    assert numbers[0] < numbers[1]
    assert sum(calls) > 2 * len(x)
