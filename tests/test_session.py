"""fl.ntk called again with arguments of the same shapes: what is known is used, every doubt leads back to the start."""

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import (
    CoupledSamplesError,
    FeatlearnError,
    InputTypeError,
    InputValueError,
    UnsupportedModelError,
)
from featlearn.gradients.chunk import Snapshot
from featlearn.linalg import cuts, gram
from featlearn.ops import registry
from featlearn.quantities import blocks, repetition
from featlearn.quantities import ntk as ntk_module
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
def anew(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every measurement that begins from the start."""
    seen: list[bool] = []
    plain = ntk_module.measuring

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(True)
        return plain(*arguments, **named)

    monkeypatch.setattr(ntk_module, "measuring", noted)
    return seen


def assert_exact(model: nn.Module, x: Any, **arguments: Any) -> None:
    expected = dense_ntk(model, x, outputs=arguments.get("outputs", "mean"))
    found = fl.ntk(model, x, **arguments)
    assert float((found - expected).abs().max()) <= 1e-11 * float(expected.abs().max())


@pytest.mark.parametrize("outputs", ["mean", "sum", "each", "full"])
def test_the_second_call_looks_for_nothing(model: Net, x: Tensor, outputs: str, anew: list[bool]):
    for _ in range(4):
        assert_exact(model, x, outputs=outputs)
    assert len(anew) == 1


def test_other_weights_and_samples_are_measured_as_they_are(model: Net, x: Tensor, anew: list[bool]):
    for seed in range(4):
        assert_exact(model, x + seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    assert len(anew) == 1


def test_two_passes_forward_and_one_back_for_each_direction_and_the_check(model: Net, x: Tensor, monkeypatch: Any):
    fl.ntk(model, x)
    forward: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: forward.append(len(output)))
    backward: list[int] = []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: backward.append(1) or plain(*a, **k))
    fl.ntk(model, x)
    assert forward == [SAMPLES, 6]
    # The norm's parameters meet no sample before their use: nothing has to be pulled back.
    assert len(backward) == 4 + 1


@pytest.mark.parametrize("by", ["layer", "parameter"])
def test_parts(model: Net, x: Tensor, by: Any, anew: list[bool]):
    first, second = (fl.ntk(model, x, by=by) for _ in range(2))
    assert first.keys() == second.keys()
    for key, kernel in first.items():
        torch.testing.assert_close(second[key], kernel, rtol=1e-12, atol=1e-12)
    assert len(anew) == 1


@pytest.mark.parametrize("other", [
    {"outputs": "each"}, {"outputs": 2}, {"by": "layer"}, {"parameters": "last.*"}, {"memory": "1GiB"},
    {"dtype": torch.float64}, {"verify": True}, {"outputs": fl.Probes(3)},
])  # fmt: skip
def test_other_arguments_are_other_calls(model: Net, x: Tensor, other: dict[str, Any], anew: list[bool]):
    fl.ntk(model, x)
    fl.ntk(model, x, **other)
    assert len(anew) == 2


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


def restride(model: Net) -> None:
    model.conv.padding, model.conv.dilation = (2,), (2,)  # the same shapes


@pytest.mark.parametrize("change", [turn, rescale, hook, freeze, tie, replace, restride])
def test_a_model_that_has_changed_in_between(model: Net, x: Tensor, change: Callable[[Net], None]):
    assert_exact(model, x)
    change(model)
    for _ in range(3):
        assert_exact(model, x)


def test_samples_that_become_coupled_are_refused_as_before(model: Net, x: Tensor):
    assert_exact(model, x)
    model.gate = 0.5
    for _ in range(2):
        with pytest.raises(CoupledSamplesError):
            fl.ntk(model, x)
    model.gate = 0.0
    assert_exact(model, x)


@pytest.mark.parametrize("where", ["samples", "weights"])
def test_what_is_not_finite_is_refused_as_before(model: Net, x: Tensor, where: str):
    fl.ntk(model, x)
    if where == "samples":
        x[5, 0, 0] = math.nan
    else:
        model.last.bias.data[1] = math.inf  # gradients stay finite
    with pytest.raises(InputValueError, match=r"not finite for samples"):
        fl.ntk(model, x)


@pytest.mark.parametrize("size", [1e-22, 1e18])
def test_factors_of_unusual_size(size: float, anew: list[bool]):
    """Rows and gradients whose Gram matrices single precision cannot hold, though their product is ordinary."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 2, bias=False)), torch.randn(SAMPLES, 5)
    for scale in (1.0, size, size, 1.0):
        with torch.no_grad():
            model[1].weight.mul_(scale)
        found = fl.ntk(model, x / scale, parameters="0.*")
        expected = x.double() @ x.double().T * (model[1].weight.double() / scale).square().sum() / 2
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        with torch.no_grad():
            model[1].weight.div_(scale)
    assert len(anew) == 4  # the second fails; it is not tried again for a while


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
    fl.ntk(model, x)
    model.on = True
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(6):
        if how == "weights":
            with pytest.raises(UnsupportedModelError):
                fl.ntk(model, x)
        else:
            fl.ntk(model, x)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not hasattr(model, "extra")


def test_gradients_modes_and_generators_are_as_they_were(model: Net, x: Tensor):
    model.train()
    model(x).sum().backward()
    kept = [p.grad.clone() for p in model.parameters()]
    fl.ntk(model, x)
    state = torch.get_rng_state()
    fl.ntk(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept, strict=True))


def test_a_call_that_never_repeats_itself_is_not_tried_for_ever(x: Tensor, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = Writing("buffer").double()
    x = x[:, :, 0].contiguous() @ torch.randn(3, 4, dtype=torch.float64)
    fl.ntk(model, x)
    model.on, tried = True, []
    plain = repetition.Call._kernels
    monkeypatch.setattr(repetition.Call, "_kernels", lambda self, known: tried.append(1) or plain(self, known))
    for _ in range(10):
        fl.ntk(model, x)
    assert len(tried) == 3  # the first, the fourth and the ninth


def test_less_memory_than_before_is_planned_anew(model: Net, x: Tensor, anew: list[bool], monkeypatch: Any):
    fl.ntk(model, x)
    monkeypatch.setattr(repetition, "LITTLE", 0)  # otherwise nobody asks for so few bytes
    monkeypatch.setattr(repetition, "byte_budget", lambda *_: 100)
    assert_exact(model, x)
    assert len(anew) == 2


def test_nobody_asks_for_little_memory(model: Net, x: Tensor, anew: list[bool], monkeypatch: Any):
    fl.ntk(model, x)
    monkeypatch.setattr(repetition, "byte_budget", lambda *_: 0)
    assert_exact(model, x)
    assert len(anew) == 1


@pytest.mark.parametrize(("memory", "kept"), [(None, 1), ("1GiB", 0)])
def test_the_c_library_keeps_memory_where_there_is_no_budget(
    model: Net, x: Tensor, memory: Any, kept: int, monkeypatch: Any
):
    asked: list[int] = []
    monkeypatch.setattr(ntk_module, "keep_released_memory", lambda: asked.append(1))
    fl.ntk(model, x, memory=memory)
    assert len(asked) == kept


def test_nothing_outlives_the_model(x: Tensor):
    torch.manual_seed(0)
    model = Net()
    for _ in range(3):
        fl.ntk(model, x)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_errors_of_the_model_are_the_users(model: Net, x: Tensor):
    fl.ntk(model, x)

    def fails(*_: Any) -> None:
        raise ValueError("no more")

    model.norm.register_forward_hook(fails)
    with pytest.raises(FeatlearnError, match="no more"):
        fl.ntk(model, x)


def test_a_built_in_rule_that_was_replaced_is_audited(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    fl.ntk(model, x)
    built_in = registry._RULES["AddmmBackward0"]

    def wrong(use: Any) -> Any:
        form = built_in(use)
        return dataclasses.replace(form, grads=lambda g: 2 * form.grads(g)) if hasattr(form, "grads") else form

    monkeypatch.setitem(registry._RULES, "AddmmBackward0", wrong)
    assert_exact(model, x)


@pytest.mark.parametrize(("first", "second"), [
    ({"outputs": 1}, {"outputs": True}), ({"outputs": 1}, {"outputs": 1.0}), ({"memory": 10**8}, {"memory": 1e8}),
])  # fmt: skip
def test_equal_arguments_of_another_type_are_refused_as_before(model: Net, x: Tensor, first: Any, second: Any):
    fl.ntk(model, x, **first)
    with pytest.raises(InputTypeError):
        fl.ntk(model, x, **second)


def test_a_graph_that_is_written_into_is_refused_as_before():
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

    model, x = InPlace(), torch.randn(SAMPLES, 4)
    fl.ntk(model, x)
    model.on = True
    with pytest.raises(UnsupportedModelError):
        fl.ntk(model, x)


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
    """Those that the pilot sees stay where they are; two others change places from call to call."""

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
    for key in (torch.arange(samples), other, torch.arange(samples).flip(0), other):
        assert_exact(model, (x, key))


def test_nothing_of_a_call_waits_for_the_collector(model: Net, x: Tensor):
    fl.ntk(model, x)

    def alive() -> int:
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        fl.ntk(model, x)
        before = alive()
        for _ in range(3):
            fl.ntk(model, x)
        assert alive() == before
    finally:
        gc.enable()


def test_arguments_that_never_repeat_do_not_keep_others_from_being_tried(model: Net, x: Tensor, anew: list[bool]):
    fl.ntk(model, x)
    fl.ntk(model, x, by="parameter")
    with torch.no_grad():
        model.last.weight.zero_()  # all kernels but two are zero, and looked at again
    for _ in range(6):
        fl.ntk(model, x)
        fl.ntk(model, x, by="parameter")
    assert len(anew) <= 2 + 6 + 1


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
    model.last.weight.data.mul_(1e13)
    fl.ntk(model, x)
    model.last.weight.data.div_(1e13)
    model.on = 0.05
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, x)


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
    model, x = Branches().double(), torch.randn(samples, 4, dtype=torch.float64)
    assert_exact(model, x)
    model.on = True
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, x)


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
    """Directions are captured one by one although they are few; how many were so in each call."""
    seen: list[int] = []
    plain = Snapshot.each_direction
    monkeypatch.setattr(repetition, "_MANY_NUMBERS", 0)
    monkeypatch.setattr(
        Snapshot, "each_direction", lambda self, names, rows: seen.append(len(rows)) or plain(self, names, rows)
    )
    return seen


@pytest.mark.parametrize("small", [False, True])
def test_directions_one_by_one(one_by_one: list[int], anew: list[bool], small: bool, monkeypatch: pytest.MonkeyPatch):
    if small:
        monkeypatch.setattr(cuts, "PANEL", 2)
        monkeypatch.setattr(gram, "MIRRORED", 3)
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    for seed in range(4):
        assert_exact(model, x - seed, outputs="each")
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.2 * torch.randn_like(p))
    assert (len(anew), one_by_one) == (1, [7, 7, 7])
    parts = [fl.ntk(model, x, outputs="each", by="parameter") for _ in range(2)]
    for key, kernel in parts[0].items():
        torch.testing.assert_close(parts[1][key], kernel, rtol=1e-12, atol=1e-13)
    assert (len(anew), one_by_one) == (2, [7, 7, 7, 7])


def test_directions_one_by_one_whose_samples_meet_later_are_refused(one_by_one: list[int]):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    assert_exact(model, x, outputs="each")
    model.on = True  # seen by two of seven outputs
    with pytest.raises(CoupledSamplesError):
        fl.ntk(model, x, outputs="each")
    model.on = False
    assert_exact(model, x, outputs="each")
    assert one_by_one == [7]


@pytest.mark.parametrize("size", [1e-22, 1e18])
@pytest.mark.parametrize("outputs", ["each", "sum"])
def test_directions_one_by_one_of_unusual_size(size: float, outputs: Any, one_by_one: list[int], anew: list[bool]):
    """Gradients, or rows, of the last of three outputs alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 5)
    fl.ntk(model, x, outputs=outputs, parameters="0.*")
    with torch.no_grad():
        model[1].weight[:2] = 0.0
        model[1].weight[2].mul_(size)
    found = fl.ntk(model, x / size, outputs=outputs, parameters="0.*")
    expected = x.double() @ x.double().T * (model[1].weight[2].double() / size).square().sum()
    one = found[2] if outputs == "each" else found
    assert float((one - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert len(anew) == 2
    assert one_by_one == ([3] if outputs == "each" else [])


def test_directions_one_by_one_on_few_samples_and_several_positions_are_not(x: Tensor, model: Net, one_by_one: Any):
    for _ in range(3):
        assert_exact(model, x, outputs="each")  # convolutions
    few = nn.Linear(4, 2).double()
    for _ in range(3):
        assert_exact(few, torch.randn(400, 4, dtype=torch.float64), outputs="each")  # more samples than gradients
    assert one_by_one == []


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
    model, x = Sums().double(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    for _ in range(3):
        assert_exact(model, x, outputs=outputs)


def test_full_kernels_are_looked_through_where_they_lie(model: Net, x: Tensor):
    """An order of axes that is not that of memory would be copied first."""
    for _ in range(2):
        kernel = fl.ntk(model, x, outputs="full")
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
            if len(x) > 6:
                kept.append(weakref.ref(h))
            return self.last(nn.functional.gelu(h))

    plain = blocks.add_gram

    def counted(*arguments: Any, **named: Any) -> None:
        alive.append(sum(one() is not None for one in kept))
        plain(*arguments, **named)

    monkeypatch.setattr(blocks, "add_gram", counted)
    torch.manual_seed(0)
    model, x = Bent().double(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    for _ in range(3):
        assert_exact(model, x, outputs=outputs)
    assert len(kept) == 3 + 3  # the reference makes passes of its own
    assert set(alive) == {0}


def test_gradients_that_are_not_confirmed_are_found_by_a_pass_of_their_own():
    """Gradients that reach other samples in larger batches alone: they are taken from samples that are run alone."""

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
            self.most = 6

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if len(x) > self.most:
                h.register_hook(lambda gradient: gradient.flip(0))
            return self.last(torch.tanh(self.second(h)))

    torch.manual_seed(0)
    model, x = Meeting().double(), torch.randn(SAMPLES, 4, dtype=torch.float64)
    found = [fl.ntk(model, x) for _ in range(2)]
    model.most = SAMPLES
    expected = dense_ntk(model, x)
    for kernel in found:
        torch.testing.assert_close(kernel, expected, rtol=1e-11, atol=1e-11)


def test_directions_one_by_one_where_gradients_of_the_last_are_too_small_to_be_squared(one_by_one: list[int]):
    """Rows are of ordinary size, and their products with these gradients as well."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 5)
    fl.ntk(model, x, outputs="each", parameters="0.*")
    with torch.no_grad():
        model[1].weight[:2] = 0.0
        model[1].weight[2].mul_(1e-22)
    x = 1e8 * x
    found = fl.ntk(model, x, outputs="each", parameters="0.*")[2]
    expected = x.double() @ x.double().T * model[1].weight[2].detach().double().square().sum()
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert one_by_one == [3]


@pytest.mark.parametrize("outputs", ["each", "mean", "full"])
def test_kernels_that_overflow_later_are_refused(outputs: Any):
    """Outputs, rows and gradients are of ordinary size."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(60, 30, bias=False), nn.Linear(30, 3, bias=False)), torch.randn(SAMPLES, 60)
    fl.ntk(model, x, outputs=outputs, parameters="0.*")
    with torch.no_grad():
        model[1].weight.copy_(9e8 * model[1].weight.sign())
    with pytest.raises(InputValueError, match=r"the kernel is not finite"):
        fl.ntk(model, 9e8 * x.sign(), outputs=outputs, parameters="0.*")
