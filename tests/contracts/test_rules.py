"""What every built-in rule must pass: a model of the zoo uses it, and it is exact there.

Rules come from the registry and their uses from the plans of the zoo, so that a new rule is tested without being
listed: it needs a case in `tests/zoo`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

import pytest
import torch

import featlearn as fl
from featlearn.ops import registry
from featlearn.planning.plan import Plan
from tests.references.jacobian import dense_ntk
from tests.zoo.awkward import CASES
from tests.zoo.case import Case, default_dtype
from tests.zoo.odd_orders import ODD_ORDERS

OTHER_BACKENDS = {
    "ConvolutionOverrideableBackward0",
    "CudnnBatchNormBackward0",
    "CudnnConvolutionBackward0",
    "FusedRmsNormBackward0",
    "LinearBackward0",
    "MiopenBatchNormBackward0",
}
"""Nodes that a CPU never makes; the zoo meets them on a GPU, in the tests marked `gpu`."""


@cache
def readings() -> Mapping[str, tuple[tuple[Case, str], ...]]:
    """Node name -> the cases and parameters that are read by its rule, over the whole zoo."""
    found = defaultdict(list)
    for case in (*CASES, *ODD_ORDERS):
        for part in plan(case).parameters:
            if part.route not in ("fallback", "unused"):
                for use in dict.fromkeys(part.uses):
                    found[use].append((case, part.name))
    return {name: tuple(pairs) for name, pairs in found.items()}


@cache
def plan(case: Case) -> Plan:
    with default_dtype(torch.float64):
        model, x, _, readout = case.build()
        return fl.plan(model, x, readout=readout)


def without_a_case(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in readings()]


def wrong(plans: Iterable[Plan]) -> list[str]:
    """Rules that fail, or that an audit found to disagree with autograd: the fallback hides them from every number."""
    reasons = {reason for each in plans for reason in each.fallbacks.values()}
    return sorted(reason for reason in reasons if "disagree" in reason or " fail" in reason)


def test_every_rule_is_used_by_a_model_of_the_zoo():
    assert without_a_case(registry._BUILT_IN.keys() - OTHER_BACKENDS) == []


def test_rules_of_other_backends_are_not_met_here():
    assert set(without_a_case(OTHER_BACKENDS)) == OTHER_BACKENDS
    assert registry._BUILT_IN.keys() >= OTHER_BACKENDS


def test_no_rule_disagrees_with_autograd_on_the_zoo():
    assert wrong(map(plan, (*CASES, *ODD_ORDERS))) == []


@pytest.mark.parametrize("name", sorted(registry._BUILT_IN.keys() - OTHER_BACKENDS))
def test_a_rule_is_exact(name: str):
    """On the smallest two models that use it: kernels of the parameters that it reads."""
    cases: dict[str, tuple[Case, set[str]]] = {}
    for case, parameter in readings()[name]:
        cases.setdefault(case.name, (case, set()))[1].add(parameter)
    smallest = sorted(cases.values(), key=lambda one: sum(torch.Size(p.shape).numel() for p in plan(one[0]).parameters))
    for case, parameters in smallest[:2]:
        with default_dtype(torch.float64):
            model, x, x2, readout = case.build()
            kernels = fl.ntk(model, x, x2=x2, outputs="each", by="parameter", readout=readout)
            expected = dense_ntk(model, x, x2, outputs="each", by="parameter", readout=readout)
        scale = max(float(kernel.abs().max()) for kernel in expected.values())
        for parameter in parameters:
            assert float((kernels[parameter] - expected[parameter]).abs().max()) <= case.tolerance * scale


def test_a_rule_without_a_case_is_found():
    assert without_a_case(["AddmmBackward0", "NovelBackward0"]) == ["NovelBackward0"]


@pytest.mark.parametrize("broken", ["scaled", "failing"])
def test_a_wrong_rule_is_found(broken: str, monkeypatch: pytest.MonkeyPatch):
    right = registry._RULES["PreluKernelBackward0"]

    def rule(use: fl.ops.Use) -> fl.ops.Direct:
        form = right(use)
        assert isinstance(form, fl.ops.Direct)
        return fl.ops.Direct((lambda grad: 1.001 * form.gradient(grad)) if broken == "scaled" else lambda grad: 1 / 0)

    monkeypatch.setitem(registry._RULES, "PreluKernelBackward0", rule)
    cases = {case.name: case for case, _ in readings()["PreluKernelBackward0"]}
    for case in cases.values():
        with default_dtype(torch.float64):
            model, x, _, readout = case.build()
            (reason,) = wrong([fl.plan(model, x, readout=readout)])
        assert "PreluKernelBackward0" in reason
