"""fl.Session: audited once, exact on every call whatever has changed since, and nothing is left behind."""

import dataclasses
import gc
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import measurement
from featlearn.audit.audit import AUDITED, Audit
from featlearn.contraction import blocking, gram, kernel_sum
from featlearn.errors import (
    CoupledSamplesError,
    FeatlearnError,
    InputTypeError,
    InputValueError,
    UnsupportedModelError,
)
from featlearn.gradients.captured import Chunk
from featlearn.kernel import execution
from featlearn.ops import registry
from featlearn.planning import kernel_plan, plan
from tests.references.jacobian import dense_ntk

SAMPLES = 23


class Net(nn.Module):
    """Convolution, shared linear layer, norm and bias; a flag, a gate and a buffer to be changed between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 5, 3, padding=1), nn.LayerNorm(5)
        self.square, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 4)
        self.gate = 0.0
        self.turned = False
        self.register_buffer("scale", torch.ones(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.conv(x)).mean(2)) * self.scale
        weight = self.square.weight.permute(1, 0) if self.turned else self.square.weight.permute(0, 1)
        h = torch.tanh(h @ weight)
        return self.last(h + self.gate * h.mean(0, keepdim=True))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SAMPLES, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each audit had."""
    seen: list[int] = []
    original = measurement.audited

    def noted(chunk: Chunk, generator: torch.Generator) -> Audit:
        seen.append(len(chunk.outputs))
        return original(chunk, generator)

    monkeypatch.setattr(measurement, "audited", noted)
    return seen


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every plan that is made."""
    seen: list[int] = []
    original = execution.plan_kernel
    monkeypatch.setattr(execution, "plan_kernel", lambda *arguments: seen.append(1) or original(*arguments))
    return seen


def assert_exact(session: fl.Session, x: Any = None, **arguments: Any) -> None:
    expected = dense_ntk(session.model, session.x if x is None else x, outputs=arguments.get("outputs", "mean"))
    found = session.ntk(x=x, **arguments)
    assert float((found - expected).abs().max()) <= 1e-11 * float(expected.abs().max())


@pytest.mark.parametrize("outputs", ["mean", "sum", "each", "full"])
def test_a_graph_is_audited_and_planned_once(model: Net, x: Tensor, outputs: str, audits: list[int], plans: list[int]):
    session = fl.Session(model, x)
    for _ in range(4):
        assert_exact(session, outputs=outputs)
    assert audits == [AUDITED]
    assert len(plans) == 1


def test_other_weights_and_samples_are_measured_as_they_are(model: Net, x: Tensor, audits: list[int]):
    session = fl.Session(model, x)
    for seed in range(4):
        assert_exact(session, x + seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    assert audits == [AUDITED]


def test_the_inputs_are_those_of_the_call(model: Net, x: Tensor):
    session = fl.Session(model, x)
    torch.testing.assert_close(session.ntk(x=x[:5]), dense_ntk(model, x[:5]), rtol=1e-11, atol=1e-11)
    for _ in range(2):
        torch.testing.assert_close(session.ntk(x[:5] + 1), dense_ntk(model, x, x[:5] + 1), rtol=1e-11, atol=1e-11)
    x.add_(1)  # they are not copied
    assert_exact(session)


@pytest.mark.parametrize("outputs", ["mean", 2])
def test_passes_of_a_later_call(model: Net, x: Tensor, outputs: Any, monkeypatch: Any):
    """One over the batch, every sample once more in parts; one back for each direction and one that confirms them,
    because the graph has a mean over samples."""
    session = fl.Session(model, x)
    session.ntk(outputs=outputs)
    forward: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: forward.append(len(output)))
    backward: list[int] = []
    engine, run = torch.autograd.graph, torch.autograd.graph._engine_run_backward
    monkeypatch.setattr(engine, "_engine_run_backward", lambda *a, **k: backward.append(1) or run(*a, **k))
    session.ntk(outputs=outputs)
    assert forward[-1] == SAMPLES
    assert SAMPLES <= sum(forward[:-1]) <= SAMPLES + 2 * len(forward)
    # The norm's parameters meet no sample before their use: nothing has to be pulled back.
    assert len(backward) == session.plan(outputs=outputs).backward_passes == (5 if outputs == "mean" else 2)


@pytest.mark.parametrize("by", ["layer", "parameter"])
def test_parts(model: Net, x: Tensor, by: Any, audits: list[int]):
    session = fl.Session(model, x)
    first, second = (session.ntk(by=by) for _ in range(2))
    assert first.keys() == second.keys()
    for key, kernel in first.items():
        torch.testing.assert_close(second[key], kernel, rtol=1e-12, atol=1e-12)
    assert len(audits) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"outputs": "each"},
        {"outputs": 2},
        {"by": "layer"},
        {"verify": True},
        {"outputs": fl.Directions(3)},
    ],
)
def test_other_arguments_are_planned_for_themselves(
    model: Net, x: Tensor, other: dict[str, Any], audits: list[int], plans: list[int]
):
    session = fl.Session(model, x)
    session.ntk()
    session.ntk(**other)
    assert len(plans) == 2
    assert set(audits) == {AUDITED}


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "ntk": {"outputs": "each"},
    "plan": {"by": "layer"},
    "ntk_diagonal": {"outputs": "sum"},
    "gradients": {"by": "layer"},
    "neural_features": {"outputs": 1},
    "layer_alignment": {"norm": "fro"},
    "layer_balance": {},
    "linearization_gap": {"by": "layer"},
    "features_moved": {"by": "layer"},
    "ntk_velocity": {"outputs": "mean"},
    "feature_speed": {},
    "representation_kernels": {"of": "output"},
    "ptk": {"layer": "3"},
    "estimate_alignment": {},
    "operator": {},
}


def as_tensors(result: Any) -> list[Tensor]:
    """All the numbers of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, int | float):
        return [torch.tensor(result)]
    if isinstance(result, str | None):
        return []
    if isinstance(result, fl.NTKOperator):
        return [result @ torch.ones(result.shape[0], dtype=torch.float64)]
    if isinstance(result, Mapping):
        return [tensor for value in result.values() for tensor in as_tensors(value)]
    if isinstance(result, slice):
        return []
    if dataclasses.is_dataclass(result):
        return as_tensors(vars(result))
    return [tensor for value in result for tensor in as_tensors(value)]


METHODS = sorted(name for name in vars(fl.Session) if not name.startswith("_") and name != "model")


def test_every_method_is_compared_with_its_function():
    assert set(METHODS) == set(ARGUMENTS)


@pytest.mark.parametrize("name", METHODS)
def test_results_are_those_of_the_function_of_the_same_name(name: str, x: Tensor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Linear(6, 3))
    model.double()
    session, y = fl.Session(model, x), torch.randn(SAMPLES, 3, dtype=torch.float64)
    earlier = {key: value + 0.1 for key, value in model.state_dict().items()}
    needs = {"ntk_velocity": y, "feature_speed": y, "estimate_alignment": y}
    needs |= {"linearization_gap": earlier, "features_moved": earlier}
    needed = (needs[name],) if name in needs else ()
    public_name = {"operator": "NTKOperator"}.get(name, name)
    function = getattr(fl if public_name in dir(fl) else fl.quantities, public_name)
    for _ in range(2):
        expected = function(model, x, *needed, **ARGUMENTS[name])
        found = getattr(session, name)(*needed, **ARGUMENTS[name])
        assert type(found) is type(expected)
        if isinstance(found, Iterator):
            found, expected = list(found), list(expected)
        if name == "plan":
            assert (found.parameters, found.groups) == (expected.parameters, expected.groups)
        else:
            assert len(as_tensors(found)) == len(as_tensors(expected)) > 0
            for one, other in zip(as_tensors(found), as_tensors(expected), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"readout": lambda output: output.square()[:, :2]},
        {"parameters": "last.*"},
        {"dtype": torch.float64},
        {"memory": "20kB"},
        {"parameters": ["conv.*", "norm.bias"], "memory": "1GiB"},
    ],
)
def test_arguments_of_a_session_hold_for_all_of_its_measurements(model: Net, x: Tensor, arguments: dict[str, Any]):
    session = fl.Session(model, x, **arguments)
    for _ in range(2):
        torch.testing.assert_close(session.ntk(), fl.ntk(model, x, **arguments), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(
            session.ntk_diagonal(), fl.quantities.ntk_diagonal(model, x, **arguments), rtol=1e-11, atol=1e-11
        )


def test_a_session_says_what_it_is(model: Net, x: Tensor):
    session = fl.Session(model, x)
    assert repr(session) == f"Session(Net, {SAMPLES} samples, 0 audited graphs)"
    session.ntk()
    assert repr(session) == f"Session(Net, {SAMPLES} samples, 1 audited graph)"
    assert session.model is model


def turn(model: Net) -> None:
    model.turned = True


def rescale(model: Net) -> None:
    model.scale.mul_(3.0)


def hook(model: Net) -> None:
    model.norm.register_forward_hook(lambda module, inputs, output: output.tanh())


def freeze(model: Net) -> None:
    model.conv.weight.requires_grad_(False)


def tie(model: Net) -> None:
    model.last = nn.Linear(5, 5).double()
    model.last.weight = model.square.weight


def replace(model: Net) -> None:
    model.last.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))


def widen(model: Net) -> None:
    model.last = nn.Linear(5, 7).double()  # the same names


def restride(model: Net) -> None:
    model.conv.padding, model.conv.dilation = (2,), (2,)  # the same shapes


@pytest.mark.parametrize("change", [turn, rescale, hook, freeze, tie, replace, restride, widen])
def test_a_model_that_has_changed_in_between(model: Net, x: Tensor, change: Callable[[Net], None], audits: list[int]):
    session = fl.Session(model, x)
    assert_exact(session)
    change(model)
    for _ in range(3):
        assert_exact(session)
    assert len(audits) == (2 if change in (hook, freeze, tie, widen) else 1)  # others have the same nodes and shapes


def test_samples_that_become_coupled_are_refused(model: Net, x: Tensor):
    session = fl.Session(model, x)
    assert_exact(session)
    model.gate = 0.5
    for _ in range(2):
        with pytest.raises(CoupledSamplesError):
            session.ntk()
    model.gate = 0.0
    assert_exact(session)


@pytest.mark.parametrize("where", ["samples", "weights"])
def test_what_is_not_finite_is_refused(model: Net, x: Tensor, where: str):
    session = fl.Session(model, x)
    session.ntk()
    if where == "samples":
        x[5, 0, 0] = math.nan
    else:
        model.last.bias.data[1] = math.inf  # gradients stay finite
    with pytest.raises(InputValueError, match=r"not finite, at least for samples"):
        session.ntk()


@pytest.mark.parametrize("size", [1e-22, 1e18])
def test_factors_of_unusual_size(size: float):
    """Rows and gradients whose Gram matrices single precision cannot hold, though their product is ordinary."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 2, bias=False)), torch.randn(SAMPLES, 5)
    session = fl.Session(model, x, parameters="0.*")
    for scale in (1.0, size, size, 1.0):
        with torch.no_grad():
            model[1].weight.mul_(scale)
        found = session.ntk(x=x / scale)
        expected = x.double() @ x.double().T * (model[1].weight.double() / scale).square().sum() / 2
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        with torch.no_grad():
            model[1].weight.div_(scale)


class Writing(nn.Module):
    """A forward pass that writes to what it holds, when told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.on = nn.Linear(4, 3), how, False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.on and self.how == "weights":
            self.layer.weight.data += 0.1
        if self.on and self.how == "buffer":
            self.calls += 1
        if self.on and self.how == "attribute":
            self.extra = x
        return self.layer(x) + 0 * self.calls


@pytest.mark.parametrize("how", ["weights", "buffer", "attribute"])
def test_a_model_that_writes_is_left_as_it_was(how: str):
    torch.manual_seed(0)
    model, x = Writing(how).double(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    session = fl.Session(model, x)
    session.ntk()
    model.on = True
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(6):
        if how == "weights":
            with pytest.raises(UnsupportedModelError):
                session.ntk()
        else:
            session.ntk()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not hasattr(model, "extra")


def test_gradients_modes_and_generators_are_as_they_were(model: Net, x: Tensor):
    model.train()
    model(x).sum().backward()
    kept = [p.grad.clone() for p in model.parameters()]
    session = fl.Session(model, x)
    session.ntk()
    state = torch.get_rng_state()
    session.ntk()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept, strict=True))


def test_less_memory_than_before_is_planned_anew(model: Net, x: Tensor, plans: list[int], monkeypatch: Any):
    session = fl.Session(model, x)
    session.ntk()
    monkeypatch.setattr(plan, "LITTLE", 0)  # otherwise nobody asks for so few bytes
    available = session.plan().memory
    plans.clear()
    for module in (plan, kernel_plan):
        monkeypatch.setattr(module, "byte_budget", lambda *_: available // 2)
    for _ in range(2):
        assert_exact(session)
    assert len(plans) == 1


def test_nobody_asks_for_little_memory(model: Net, x: Tensor, plans: list[int], monkeypatch: Any):
    session = fl.Session(model, x)
    session.ntk()
    monkeypatch.setattr(plan, "byte_budget", lambda *_: 0)
    assert_exact(session)
    assert len(plans) == 1


@pytest.mark.parametrize(("memory", "kept"), [(None, 1), ("1GiB", 0)])
def test_the_c_library_keeps_memory_where_there_is_no_budget(
    model: Net, x: Tensor, memory: Any, kept: int, monkeypatch: Any
):
    asked: list[int] = []
    monkeypatch.setattr(execution, "keep_released_memory", lambda: asked.append(1))
    fl.ntk(model, x, memory=memory)
    assert len(asked) == kept


@pytest.mark.parametrize("session", [False, True])
def test_nothing_outlives_the_model(x: Tensor, session: bool):
    torch.manual_seed(0)
    model = Net()
    held = fl.Session(model, x) if session else None
    for _ in range(3):
        fl.ntk(model, x) if held is None else held.ntk()
    there = weakref.ref(model)
    del model, held
    gc.collect()
    assert there() is None


def containers() -> dict[tuple[str, str], int]:
    """How many entries every container of every module of the package has."""
    return {
        (module, name): len(value)
        for module, loaded in list(sys.modules.items())
        if module.partition(".")[0] == "featlearn"
        for name, value in vars(loaded).items()
        if not name.startswith("__") and isinstance(value, Collection) and not isinstance(value, str | type)
    }


def test_no_container_of_any_module_grows(x: Tensor):
    torch.manual_seed(0)
    fl.ntk(Net(), x)
    before = containers()
    assert len(before) > 20
    for samples in (7, 12, SAMPLES):
        fl.ntk(Net(), x[:samples], outputs="each", by="layer")
        fl.Session(Net(), x[:samples]).ntk()
    assert containers() == before


def test_errors_of_the_model_are_the_users(model: Net, x: Tensor):
    session = fl.Session(model, x)
    session.ntk()

    def fails(*_: Any) -> None:
        raise ValueError("no more")

    model.norm.register_forward_hook(fails)
    with pytest.raises(FeatlearnError, match="no more"):
        session.ntk()


def test_a_built_in_rule_that_was_replaced_is_audited(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    session = fl.Session(model, torch.randn(SAMPLES, 4, dtype=torch.float64))
    session.ntk()
    built_in = registry._RULES["AddmmBackward0"]

    def wrong(use: Any) -> Any:
        form = built_in(use)
        return dataclasses.replace(form, grads=lambda g: 2 * form.grads(g)) if hasattr(form, "grads") else form

    monkeypatch.setitem(registry._RULES, "AddmmBackward0", wrong)
    assert_exact(session)


@pytest.mark.parametrize("second", [True, 1.0])
def test_equal_arguments_of_another_type_are_refused(model: Net, x: Tensor, second: Any):
    session = fl.Session(model, x)
    session.ntk(outputs=1)
    with pytest.raises(InputTypeError):
        session.ntk(outputs=second)


def test_a_graph_that_is_written_into_is_refused():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.on = nn.Linear(4, 5), nn.Linear(5, 2), False

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            y = self.first(h)
            if self.on:
                h.add_(1)
            return self.last(torch.tanh(y))

    model = InPlace()
    session = fl.Session(model, torch.randn(SAMPLES, 4))
    session.ntk()
    model.on = True
    with pytest.raises(UnsupportedModelError):
        session.ntk()


def selected(h: Tensor, back: Tensor) -> Tensor:
    return torch.stack([h[int(i)] for i in back])


def sliced(h: Tensor, back: Tensor) -> Tensor:
    return torch.cat([h[int(i) : int(i) + 1] for i in back])


def unbound(h: Tensor, back: Tensor) -> Tensor:
    rows = h.unbind()
    return torch.stack([rows[int(i)] for i in back])


def split(h: Tensor, back: Tensor) -> Tensor:
    rows = h.split(1)
    return torch.cat([rows[int(i)] for i in back])


@pytest.mark.parametrize("put_back", [selected, sliced, unbound, split])
@pytest.mark.parametrize("samples", [24, 26])
def test_samples_put_back_one_by_one(put_back: Callable[[Tensor, Tensor], Tensor], samples: int):
    """Those that are audited stay where they are; two others change places from call to call."""

    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, key: Tensor) -> Tensor:
            order = key.argsort(stable=True)
            return put_back(self.last(torch.tanh(self.body(x[order]))), order.argsort())

    torch.manual_seed(0)
    model, x = Sorting().double(), torch.randn(samples, 4, dtype=torch.float64)
    other = torch.arange(samples)
    other[1], other[2] = 2, 1
    session = fl.Session(model, (x, other))
    for key in (torch.arange(samples), other, torch.arange(samples).flip(0), other):
        assert_exact(session, (x, key))


@pytest.mark.parametrize("name", ["ntk", "ntk_diagonal"])
def test_nothing_of_a_call_waits_for_the_collector(model: Net, x: Tensor, name: str):
    measured = getattr(fl.Session(model, x), name)

    def alive() -> int:
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        measured()
        before = alive()
        for _ in range(3):
            measured()
            fl.ntk(model, x)
        assert alive() == before
    finally:
        gc.enable()


def test_weights_that_have_shrunk_do_not_hide_coupling(x: Tensor):
    """Terms of 1e13 round by 1e-3, those of 1 do not."""

    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.on = nn.Linear(3, 5), nn.Linear(5, 2), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x))) + self.on * x.mean(0)[:2]  # gradients do not see it

    torch.manual_seed(0)
    model, x = Coupled().double(), x[:, :, 0].contiguous()
    session = fl.Session(model, x)
    model.last.weight.data.mul_(1e13)
    session.ntk()
    model.last.weight.data.div_(1e13)
    model.on = 0.05
    with pytest.raises(CoupledSamplesError):
        session.ntk()


def test_gradients_whose_squares_overflow_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    model[1].weight.data.mul_(1e160)
    with pytest.raises(InputValueError, match="not finite"):
        fl.ntk(model, torch.randn(SAMPLES, 4, dtype=torch.float64))


@pytest.mark.parametrize("samples", [12, 30])
def test_what_happens_to_the_second_output_alone_is_seen(samples: int):
    """Two branches, one for each output; in the second, samples meet in the backward pass, later."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2))
            self.on = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.two[0](x)
            if self.on:
                h.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
            return torch.cat([self.one(x), self.two[2](self.two[1](h))], 1)

    torch.manual_seed(0)
    model = Branches().double()
    session = fl.Session(model, torch.randn(samples, 4, dtype=torch.float64))
    assert_exact(session)
    model.on = True
    with pytest.raises(CoupledSamplesError):
        session.ntk()


class Tied(nn.Module):
    """A layer that is used twice, one tied to its transpose, biases, one unused, an output that skips most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(4, 7), nn.Linear(7, 7, bias=False)
        self.last, self.short, self.unused = nn.Linear(7, 3), nn.Linear(4, 2, bias=False), nn.Linear(3, 5)
        self.on = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.into(x))))))
        back = torch.tanh(h @ self.into.weight)
        if self.on:
            back.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return torch.cat([self.last(h), self.short(back), self.short(x)], 1)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Directions are captured one by one although they are few; how many there were in each capture."""
    seen: list[int] = []
    original = measurement.backpropagate

    def noted(chunk: Chunk, names: Any, directions: Tensor, **named: Any) -> Any:
        if chunk.count == SAMPLES:
            seen.append(len(directions))
        return original(chunk, names, directions, **named)

    monkeypatch.setattr(kernel_plan, "MANY_NUMBERS", 0)
    monkeypatch.setattr(measurement, "backpropagate", noted)
    return seen


@pytest.mark.parametrize("small", [False, True])
def test_directions_one_by_one(one_by_one: list[int], small: bool, monkeypatch: pytest.MonkeyPatch):
    if small:
        monkeypatch.setattr(blocking, "PANEL", 2)
        monkeypatch.setattr(gram, "MIRRORED", 3)
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    session = fl.Session(model, x)
    for seed in range(3):
        assert_exact(session, x - seed, outputs="each")
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.2 * torch.randn_like(p))
    assert one_by_one == [1] * 7 * 3
    parts = [session.ntk(outputs="each", by="parameter") for _ in range(2)]
    for key, kernel in parts[0].items():
        torch.testing.assert_close(parts[1][key], kernel, rtol=1e-12, atol=1e-13)


def test_directions_one_by_one_whose_samples_meet_later_are_refused(one_by_one: list[int]):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    session = fl.Session(model, x)
    assert_exact(session, outputs="each")
    model.on = True  # seen by two of seven outputs
    with pytest.raises(CoupledSamplesError):
        session.ntk(outputs="each")
    model.on = False
    assert_exact(session, outputs="each")
    assert set(one_by_one) >= {1}


@pytest.mark.parametrize("size", [1e-22, 1e18])
@pytest.mark.parametrize("outputs", ["each", "sum"])
def test_directions_one_by_one_of_unusual_size(size: float, outputs: Any, one_by_one: list[int]):
    """Gradients, or rows, of the last of three outputs alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 5)
    session = fl.Session(model, x, parameters="0.*")
    session.ntk(outputs=outputs)
    with torch.no_grad():
        model[1].weight[:2] = 0.0
        model[1].weight[2].mul_(size)
    found = session.ntk(x=x / size, outputs=outputs)
    expected = x.double() @ x.double().T * (model[1].weight[2].double() / size).square().sum()
    one = found[2] if outputs == "each" else found
    assert float((one - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert set(one_by_one) == ({1} if outputs == "each" else {3})


def test_directions_on_few_samples_and_several_positions_are_captured_together(
    x: Tensor, model: Net, one_by_one: list[int]
):
    assert_exact(fl.Session(model, x), outputs="each")  # convolutions
    assert one_by_one == [4]
    few = nn.Linear(4, 2).double()
    assert_exact(fl.Session(few, torch.randn(SAMPLES, 4, dtype=torch.float64)), outputs="each")  # fewer gradients
    assert one_by_one == [4, 2]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("outputs", ["each", "mean"])
def test_gradients_that_lie_in_memory_one_way_and_then_another(first: bool, outputs: str):
    """The same for all samples, by their strides, for some outputs and not for others."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.written = 0

        def written_out(self, gradient: Tensor) -> Tensor:
            self.written += 1
            return gradient.contiguous() if bool(self.written % 2) is first else gradient

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            h.register_hook(self.written_out)
            return h * 1.0 if first else h

    torch.manual_seed(0)
    session = fl.Session(Sums().double(), torch.randn(SAMPLES, 4, dtype=torch.float64))
    for _ in range(3):
        assert_exact(session, outputs=outputs)


def test_full_kernels_are_looked_through_where_they_lie(model: Net, x: Tensor):
    """An order of axes that is not that of memory would be copied first."""
    session = fl.Session(model, x)
    for _ in range(2):
        kernel = session.ntk(outputs="full")
        assert not kernel.is_contiguous()
        assert gram.in_memory_order(kernel).is_contiguous()


@pytest.mark.parametrize("outputs", ["mean", "each", 1])
def test_activations_that_have_served_are_gone_when_kernels_are_formed(outputs: Any, monkeypatch: Any):
    """What an activation function has kept for the backward pass, and no layer reads."""
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if len(x) == SAMPLES:
                kept.append(weakref.ref(h))
            return self.last(nn.functional.gelu(h))

    plain = kernel_sum.add_gram

    def counted(*arguments: Any, **named: Any) -> None:
        alive.append(sum(one() is not None for one in kept))
        plain(*arguments, **named)

    monkeypatch.setattr(kernel_sum, "add_gram", counted)
    torch.manual_seed(0)
    session = fl.Session(Bent().double(), torch.randn(SAMPLES, 4, dtype=torch.float64))
    for _ in range(3):
        session.ntk(outputs=outputs)
    assert len(kept) >= 3
    assert set(alive) == {0}


@pytest.mark.parametrize("first_seen", ["on large batches", "later"])
def test_gradients_that_a_hook_gives_to_other_samples_are_refused(first_seen: str):
    """Neither outputs nor the graph show it."""

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
            self.least = AUDITED + 1

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if len(x) >= self.least:
                h.register_hook(lambda gradient: gradient.flip(0))
            return self.last(torch.tanh(self.second(h)))

    torch.manual_seed(0)
    model = Meeting().double()
    session = fl.Session(model, torch.randn(SAMPLES, 4, dtype=torch.float64))
    if first_seen == "later":
        model.least = 2 * SAMPLES
        assert_exact(session)
        model.least = 2
    for _ in range(2):
        with pytest.raises(CoupledSamplesError):
            session.ntk()
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, session.x)


def test_directions_one_by_one_where_gradients_of_the_last_are_too_small_to_be_squared(one_by_one: list[int]):
    """Rows are of ordinary size, and their products with these gradients as well."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 5)
    session = fl.Session(model, x, parameters="0.*")
    session.ntk(outputs="each")
    with torch.no_grad():
        model[1].weight[:2] = 0.0
        model[1].weight[2].mul_(1e-22)
    x = 1e8 * x
    found = session.ntk(x=x, outputs="each")[2]
    expected = x.double() @ x.double().T * model[1].weight[2].detach().double().square().sum()
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert set(one_by_one) == {1}


@pytest.mark.parametrize("outputs", ["each", "mean", "full"])
def test_kernels_that_overflow_later_are_refused(outputs: Any):
    """Outputs, rows and gradients are of ordinary size."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(60, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 60)
    session = fl.Session(model, x, parameters="0.*")
    session.ntk(outputs=outputs)
    with torch.no_grad():
        model[1].weight.copy_(9e8 * model[1].weight.sign())
    with pytest.raises(InputValueError, match=r"the kernel is not finite"):
        session.ntk(x=9e8 * x.sign(), outputs=outputs)
