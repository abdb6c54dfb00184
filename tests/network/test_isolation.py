"""Measuring leaves no trace: everything is as before, bit for bit, also when the call raises."""

import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

import featlearn as fl
from featlearn.errors import UnsupportedModelError
from featlearn.network.isolation import undisturbed
from featlearn.network.state import Inventory

from ..references.jacobian import dense_ntk
from ..zoo.case import Net

Measure = Callable[[nn.Module, Tensor], object]

MEASURES: dict[str, Measure] = {
    "the mean kernel": lambda model, x: fl.ntk(model, x),
    "all outputs, verified": lambda model, x: fl.ntk(model, x, outputs="full", by="parameter", verify=True),
    "a cross kernel": lambda model, x: fl.ntk(model, x[:4], x2=x[4:], outputs="each", by="layer"),
    "one sample": lambda model, x: fl.ntk(model, x[:1]),
    "in double": lambda model, x: fl.ntk(model, x, dtype=torch.float64),
    "in small blocks": lambda model, x: fl.ntk(model, x, memory="60KB"),
    "random outputs": lambda model, x: fl.ntk(model, x, outputs=fl.Directions(2)),
    "a plan": lambda model, x: str(fl.plan(model, x)),
    "representations": lambda model, x: fl.quantities.representation_kernels(model, x),
    "outputs": lambda model, x: fl.quantities.representation_kernels(
        model, x[:4], x2=x[4:], of="output", dtype=torch.float64
    ),
}
each_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def bits(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return (id(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, content)


def token(value: object) -> object:
    """Something that compares equal only if nothing at all has changed."""
    if isinstance(value, nn.Parameter):
        return bits(value), value._version, value.requires_grad, bits(value.grad), token(value._backward_hooks)
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, Mapping):
        return id(value), [(key, token(part)) for key, part in value.items()]
    if isinstance(value, list | tuple | set):
        return id(value), [token(part) for part in value]
    return (id(value), value) if isinstance(value, int | float | str) else id(value)


def fingerprint(model: nn.Module, *others: object) -> object:
    modules = [(name, id(part), token(vars(part))) for name, part in model.named_modules()]
    return modules, [token(other) for other in others]


def world() -> dict[str, object]:
    backends = torch.backends
    precisions = {
        f"{name}.{part}": getattr(owner, part).fp32_precision
        for name, owner in (("cudnn", backends.cudnn), ("mkldnn", backends.mkldnn))
        for part in ("conv", "rnn", *(["matmul"] if name == "mkldnn" else []))
    }
    position = numpy.random.get_state()
    return precisions | {
        "generic precision": (backends.fp32_precision, backends.cudnn.fp32_precision, backends.mkldnn.fp32_precision),
        "cuda precision": (backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision()),
        "libraries": (torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled(), torch.get_num_threads()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
        ],
        "random": (torch.get_rng_state().tolist(), random.getstate(), position[1].tolist(), position[2:]),
        "global hooks": [
            token(getattr(module_globals, f"_global_{kind}_hooks"))
            for kind in ("forward", "forward_pre", "backward", "backward_pre")
        ],
    }


class Busy(nn.Module):
    """Writes to itself in every way a forward pass can, and draws random numbers that have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.second, self.frozen, self.head = nn.Linear(6, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.ones(3))
        self.register_buffer("nothing", None)
        self.plain = torch.zeros(2)
        self.count, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced * 2
        self.nothing = x.detach().clone()
        self.plain.add_(1)
        self.count += 1
        self.last = (float(torch.rand(())), random.random(), numpy.random.rand())
        self.memory = x
        x.mul_(2)
        hidden = torch.relu(self.drop(self.norm(self.first(x))))
        return self.head(torch.tanh(self.frozen(self.second(hidden))))


def busy() -> tuple[Busy, Tensor]:
    """In training mode but for one part, with some gradients and statistics that are not the initial ones."""
    model, x = Busy(), torch.randn(7, 4)
    model(x.clone()).square().sum().backward()
    model.second.weight.grad = None
    model.norm.eval()
    return model, x


@each_measure
def test_a_measurement_changes_nothing(measure: Measure) -> None:
    model, x = busy()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    before, around = fingerprint(model, x, *optimizer.state.values()), world()
    measure(model, x)
    assert fingerprint(model, x, *optimizer.state.values()) == before
    assert world() == around


class Unlucky(Busy):
    """Fails in one of the ways a measurement can fail, after it has written to itself."""

    def __init__(self, failure: str) -> None:
        super().__init__()
        self.failure = failure
        Unlucky.made = 0

    made: ClassVar[int] = 0  # calls; not in the model, because what a model holds starts over with every call

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        Unlucky.made += 1
        if self.failure in ("raises", "interrupted") and Unlucky.made >= 3:
            raise RuntimeError if self.failure == "raises" else KeyboardInterrupt
        if self.failure == "coupled":
            return output - output.mean(0)
        return output.log() if self.failure == "not a number" else output


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "in double"])
@pytest.mark.parametrize("failure", ["raises", "interrupted", "coupled", "not a number"])
def test_a_measurement_that_fails_changes_nothing(failure: str, dtype: torch.dtype | None) -> None:
    model, x = Unlucky(failure), torch.randn(7, 4)
    model(x.clone()).nan_to_num().square().sum().backward()
    model.head.bias.grad = None
    before, around = fingerprint(model, x), world()
    error = KeyboardInterrupt if failure == "interrupted" else fl.FeatlearnError
    with pytest.raises(error):
        fl.ntk(model, x, outputs="each", by="parameter", dtype=dtype)
    assert fingerprint(model, x) == before
    if failure in ("raises", "interrupted"):
        with pytest.raises(error):
            fl.quantities.representation_kernels(model, x, memory="20KB")
        assert fingerprint(model, x) == before
    assert world() == around


@pytest.mark.parametrize("argument", [{"outputs": 9}, {"memory": "10B"}, {"optimizer": 3}, {"parameters": "absent"}])
def test_a_bad_argument_changes_nothing(argument: dict[str, Any]) -> None:
    model, x = busy()
    before, around = fingerprint(model, x), world()
    with pytest.raises(fl.FeatlearnError):
        fl.ntk(model, x, **argument)
    assert fingerprint(model, x) == before
    assert world() == around


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.save_on_cpu(),
    ],
    ids=["no_grad", "inference", "autocast", "anomaly", "save_on_cpu"],
)
@pytest.mark.parametrize("failure", ["none", "coupled"])
def test_modes_around_the_call_are_as_before(context: Callable[[], Any], failure: str) -> None:
    model, x = Unlucky(failure), torch.randn(7, 4)
    with context():
        around = world()
        with pytest.raises(fl.FeatlearnError) if failure == "coupled" else nullcontext():
            fl.ntk(model, x)
        assert world() == around


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_float32_products_is_as_before(precision: str) -> None:
    model, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)), torch.randn(5, 2, 4)
    try:
        torch.set_float32_matmul_precision(precision)
        around = world()
        kernel = fl.ntk(model, x)
        assert world() == around
        torch.testing.assert_close(kernel.double(), dense_ntk(model.double(), x.double()), rtol=1e-5, atol=0)
    finally:
        torch.set_float32_matmul_precision("highest")


INHERITED = """
import torch, featlearn as fl
torch.backends.fp32_precision = "tf32"
fl.ntk(torch.nn.Linear(2, 1), torch.ones(3, 2))
torch.backends.fp32_precision = "ieee"
b = torch.backends
print(*{o.fp32_precision for o in (b.cuda.matmul, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn, b.cudnn.conv)})
"""


def test_a_precision_inherited_before_is_still_inherited_after() -> None:
    # In a process of its own: what a backend inherits cannot be told, or put back, from within.
    found = subprocess.run([sys.executable, "-c", INHERITED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ieee"]


def test_libraries_switched_off_for_recurrent_layers_are_on_again() -> None:
    model = Net(lambda self, x: self.head(self.body(x)[0][:, -1]), body=nn.GRU(3, 4, batch_first=True))
    model.head = nn.Linear(4, 2)
    x, around = torch.randn(5, 6, 3), world()
    fl.ntk(model, x)
    assert world() == around
    with torch.backends.mkldnn.flags(enabled=False):
        around = world()
        fl.ntk(model, x)
        assert world() == around


def test_lists_and_dictionaries_that_the_model_fills_are_as_before() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        self.lengths.append(len(x))
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.seen.add(len(x))
        return self.body(x)

    model = Net(forward, body=nn.Linear(4, 2), lengths=[9], table={}, seen=set())
    before = fingerprint(model)
    fl.ntk(model, torch.randn(5, 4))
    fl.quantities.representation_kernels(model, torch.randn(5, 4))
    assert fingerprint(model) == before


def test_flags_that_the_model_sets_are_as_before() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        self.body.requires_grad_(False)
        self.head.train()
        return self.head(self.body(x))

    model = Net(forward, body=nn.Linear(4, 3), head=nn.Linear(3, 2)).eval()
    fl.ntk(model, torch.randn(5, 4))
    assert [part.training for part in model.modules()] == [False] * 3
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), -0.0], ids=["not a number", "negative zero"])
def test_a_buffer_keeps_its_bits_and_is_written_only_where_the_model_did(value: float) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        self.written.zero_()
        return self.body(x)

    model = Net(forward, body=nn.Linear(4, 2), kept=torch.full((3,), value), written=torch.full((3,), value))
    before, version = fingerprint(model), model.kept._version
    fl.ntk(model, torch.randn(5, 4))
    assert fingerprint(model) == before
    assert model.kept._version == version


@pytest.mark.parametrize("scale", [1.0, float("nan")], ids=["ordinary", "with a NaN that is not used"])
def test_a_backward_pass_of_the_user_is_not_disturbed(scale: float) -> None:
    def trained(measured: bool) -> list[object]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
        scales = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, scale]))
        whole = Net(lambda self, x: self.body(x) * self.scales[:3], body=model, scales=scales)
        x = torch.randn(7, 4)
        whole(x).sum().backward()
        loss = whole(x).square().sum()
        if measured:
            for measure in MEASURES.values():
                measure(whole, x)
        loss.backward()
        return [bits(parameter.grad)[1:] for parameter in whole.parameters()]  # type: ignore[index]

    assert trained(measured=True) == trained(measured=False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_a_training_run_that_is_measured_is_the_run_that_is_not(kind: Callable[..., torch.optim.Optimizer]) -> None:
    def trained(measured: bool) -> list[object]:
        torch.manual_seed(2)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3)]
        model, x, y = nn.Sequential(*layers), torch.randn(9, 4), torch.randint(3, (9,))
        optimizer = kind(model.parameters(), lr=0.05)
        found: list[object] = []
        for step in range(8):
            batch = torch.randperm(9)[:6]
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            if measured and step % 3 == 1:
                fl.ntk(model, x, optimizer=optimizer, by="layer")
            optimizer.step()
            if measured and step % 3 == 0:
                for measure in MEASURES.values():
                    measure(model, x)
            found.append(loss.item())
        tensors = [*model.state_dict().values()]
        tensors += [value for state in optimizer.state.values() for value in state.values() if value is not None]
        return found + [bits(tensor)[1:] for tensor in tensors]  # type: ignore[index]

    assert trained(measured=True) == trained(measured=False)


def test_backward_hooks_neither_fire_nor_change_the_kernel_and_still_work_afterwards() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, fired = torch.randn(5, 4, dtype=torch.float64), []
    expected = dense_ntk(plain, x, outputs="full")

    def changing(name: str) -> Callable[..., Any]:
        def hook(*arguments: Any) -> Any:
            fired.append(name)
            given = arguments[-1] if len(arguments) < 3 else arguments[1]
            return tuple(3 * g for g in given if g is not None) if isinstance(given, tuple) else 3 * given

        return hook

    handles = [
        plain[0].register_full_backward_hook(changing("module")),
        plain[0].register_full_backward_hook(changing("second")),
        plain[2].register_full_backward_pre_hook(changing("before")),
        plain[0].weight.register_hook(changing("weight")),
        plain[0].weight.register_hook(changing("weight again")),
        nn.modules.module.register_module_full_backward_hook(changing("everywhere")),
        plain[2].weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated")),
    ]
    try:
        before = fingerprint(plain)
        kernel = fl.ntk(plain, x, outputs="full", verify=True)
        assert fired == []
        torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=1e-12)
        assert fingerprint(plain) == before
        plain(x.clone().requires_grad_()).sum().backward()
        assert {"module", "second", "before", "weight", "everywhere", "accumulated"} <= set(fired)
        assert fired.index("weight") < fired.index("weight again")
    finally:
        for handle in handles:
            handle.remove()
    fired.clear()
    plain(x).sum().backward()
    assert fired == []


def test_gradients_that_a_refused_model_accumulates_reach_no_hook() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        self.body(x).square().sum().backward()
        return self.body(x)

    model = Net(forward, body=nn.Linear(4, 3))
    fired: list[Tensor] = []
    model.body.weight.register_hook(fired.append)
    model.body.weight.register_post_accumulate_grad_hook(fired.append)
    before = fingerprint(model)
    with pytest.raises(fl.FeatlearnError):
        fl.ntk(model, torch.randn(5, 4))
    assert fired == []
    assert fingerprint(model) == before


def test_forward_hooks_keep_their_place_and_stay_part_of_the_function() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(5, 4).double()
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    before = fingerprint(model)
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x), rtol=1e-12, atol=1e-12)
    fl.quantities.representation_kernels(model, x)
    assert fingerprint(model) == before


class ManyTensors(nn.Module):
    """Weights and buffers of all kinds, one of which a forward pass may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.register_buffer("plain", torch.randn(3))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer("coarse", torch.randn(3).bfloat16())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.ones(3, dtype=torch.int8))
        self.register_buffer("turned", torch.randn(3, 2).T)
        self.register_buffer("empty", torch.zeros(0))
        self.write: Callable[[nn.Module], object] = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


WRITES: dict[str, Callable[[Any], object]] = {
    "one of several": lambda model: model.plain.add_(1),
    "through data": lambda model: model.plain.data.mul_(-1),
    "a sign of zero": lambda model: model.odd[1].zero_(),
    "another bit of nan": lambda model: model.odd.view(torch.int32)[0].add_(1),
    "half precision": lambda model: model.coarse.zero_(),
    "a counter": lambda model: model.count.add_(1),
    "bytes": lambda model: model.small.add_(1),
    "a transposed one": lambda model: model.turned.zero_(),
    "another shape": lambda model: setattr(model.plain, "data", torch.zeros(5)),
    "another type": lambda model: setattr(model.plain, "data", torch.zeros(3, dtype=torch.float16)),
    "longer": lambda model: model.empty.resize_(4),
    "a flag": lambda model: model.layers[1].weight.requires_grad_(False),
}


def stored(model: nn.Module) -> list[tuple[object, ...]]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        (t.shape, t.dtype, t.requires_grad, t.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for t in tensors
    ]


@pytest.mark.parametrize("name", WRITES)
def test_tensors_that_are_kept_together_are_put_back_one_by_one(name: str):
    torch.manual_seed(0)
    model = ManyTensors()
    before, held = stored(model), list(map(id, model.buffers()))
    with undisturbed(Inventory(model)) as isolation:
        for _ in range(2):
            isolation.rewind()
            WRITES[name](model)
            assert stored(model) != before
    assert stored(model) == before
    assert list(map(id, model.buffers())) == held


@pytest.mark.parametrize("number", [0, 4])
def test_a_weight_among_many_that_is_written_to_is_refused_and_put_back(number: int):
    torch.manual_seed(0)
    model, x = ManyTensors(), torch.randn(9, 4)
    session = fl.Session(model, x)
    session.ntk()
    before = stored(model)
    model.write = lambda model: model.layers[number].weight.data.mul_(1.5)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            session.ntk()
        assert stored(model) == before


class Aliasing(nn.Module):
    """A forward pass that lets one tensor lie in the memory of another, or changes its form."""

    def __init__(self, act: Callable[["Aliasing"], object]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), act
        self.register_buffer("previous", torch.zeros(3, 3))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]).expand(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.layer(x * self.scale[0])


ALIASES: dict[str, Callable[[Aliasing], object]] = {
    "a buffer in a weight": lambda net: setattr(net.previous, "data", net.layer.weight.data),
    "a buffer set to a weight": lambda net: net.previous.set_(net.layer.weight.data),
    "a buffer in a buffer": lambda net: setattr(net.previous, "data", net.scale.data),
    "an expanded buffer": lambda net: net.scale.data[:1].add_(1.0),
    "strides": lambda net: setattr(net.layer.weight, "data", net.layer.weight.data.t().contiguous().t()),
    "a transposed weight": lambda net: net.layer.weight.data.t_(),
    "a weight in a buffer": lambda net: setattr(net.layer.weight, "data", net.previous.data),
    "another type": lambda net: net.layer.double().float().half(),
}


@pytest.mark.parametrize("measure", [fl.ntk, fl.layer_alignment, fl.neural_features], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ALIASES)
def test_tensors_are_back_in_their_own_memory(name: str, measure: Measure) -> None:
    torch.manual_seed(0)
    model, x = Aliasing(ALIASES[name]), torch.randn(6, 3)
    model.layer(x).sum().backward()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {key: (one.detach().clone(), one.data_ptr(), one.stride(), one.dtype) for key, one in tensors.items()}
    gradients = [weight.grad for weight in model.parameters()]
    try:
        measure(model, x)
    except fl.FeatlearnError:
        assert name in ("a weight in a buffer", "another type", "an expanded buffer")
    for key, one in tensors.items():
        value, *form = before[key]
        assert torch.equal(one, value), key
        assert [one.data_ptr(), one.stride(), one.dtype] == form
    assert all(weight.grad is grad for weight, grad in zip(model.parameters(), gradients, strict=True))


class Counted(OrderedDict[str, int]):
    """Cannot be made without an argument, which `copy` would do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class Stubborn(dict[str, int]):
    """Cannot be emptied by its own method."""

    def clear(self) -> None:
        raise TypeError("never emptied")


class Recording(nn.Module):
    """Writes to what it holds."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held, self.later = nn.Linear(3, 1), held, [1]

    def forward(self, x: Tensor) -> Tensor:
        self.later.append(2)
        if isinstance(self.held, dict):
            self.held["calls"] = self.held.get("calls", 0) + 1
        else:
            self.held += 1.0
            self.held.flags.writeable = False
        return self.layer(x)


def test_containers_of_a_class_of_ones_own_are_as_before() -> None:
    model = Recording(Counted(3))
    model.held["calls"] = 7
    fl.ntk(model, torch.randn(4, 3))
    assert dict(model.held) == {"calls": 7}
    assert model.held.size == 3


def test_containers_that_cannot_be_emptied_are_as_before() -> None:
    model = Recording(Stubborn(calls=1))
    fl.ntk(model, torch.randn(4, 3))
    assert dict(model.held) == {"calls": 1}


def test_gradients_are_as_before_where_something_cannot_be_put_back() -> None:
    held = numpy.zeros(3)
    model = Recording(held)
    model(torch.randn(4, 3)).sum().backward()
    held.flags.writeable = True
    model.later = [1]
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(Exception, match="read-only"):
        fl.ntk(model, torch.randn(4, 3))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert model.later == [1]
