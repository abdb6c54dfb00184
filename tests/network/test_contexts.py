"""The kernel is the same wherever it is measured: under any mode, wrapper, precision or thread."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import featlearn as fl

from ..references.jacobian import dense_ntk
from ..zoo.case import Net, default_dtype


def model_and_probe(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, Tensor]:
    """A convolution, a normalization that has seen data and two linear layers, in eval mode; 7 samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)
        )
        x = torch.randn(7, 2, 5)
        model(x)
    return model.to(dtype).eval(), x.to(dtype)


def expected_kernel() -> Tensor:
    model, x = model_and_probe()
    kernel = dense_ntk(model, x)
    assert isinstance(kernel, Tensor)
    return kernel


def assert_same(kernel: Tensor, expected: Tensor | None = None, tolerance: float = 1e-12) -> None:
    expected = expected_kernel() if expected is None else expected
    assert kernel.shape == expected.shape
    assert (kernel - expected).abs().max() <= tolerance * expected.abs().max()


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def saved_elsewhere() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda packed: packed[0])


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "saved_tensors_hooks": saved_elsewhere,
    "default dtype": lambda: default_dtype(torch.float16),
    "default device": lambda: default_device("cpu"),
    "default device meta": lambda: default_device("meta"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_the_kernel_does_not_depend_on_the_mode_it_is_measured_in(context: Callable[[], Any]) -> None:
    model, x = model_and_probe()
    with context():
        kernel = fl.ntk(model, x, verify=True)
        cross = fl.ntk(model, x[:4], x2=x[4:], outputs="each", by="parameter", memory="90KB")
    assert_same(kernel)
    assert_same(sum(cross.values()).mean(0), expected_kernel()[:4, 4:])
    assert not kernel.requires_grad
    assert not kernel.is_inference()


def test_the_default_dtype_may_be_double_while_the_model_is_not() -> None:
    model, x = model_and_probe(torch.float32)
    plain = fl.ntk(model, x)
    with default_dtype(torch.float64):
        kernel = fl.ntk(model, x)
    assert kernel.dtype == torch.float32
    assert torch.equal(kernel, plain)


@pytest.mark.parametrize("measured_inside", [False, True])
@pytest.mark.parametrize("made_inside", ["x", "buffers", "parameters", "all"])
def test_tensors_made_in_inference_mode_are_measured(made_inside: str, measured_inside: bool) -> None:
    model, x = model_and_probe()
    with torch.inference_mode():
        if made_inside in ("x", "all"):
            x = x.clone()
        if made_inside in ("buffers", "all"):
            model[1].running_mean = model[1].running_mean.clone()
        if made_inside in ("parameters", "all"):
            model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    assert model[4].weight.is_inference() == (made_inside in ("parameters", "all"))
    with torch.inference_mode(measured_inside):
        kernel = fl.ntk(model, x)
        parts = fl.ntk(model, x, by="parameter", dtype=torch.float64)
        features = fl.quantities.representation_kernels(model, x)
    assert_same(kernel)
    assert list(parts) == [name for name, _ in model.named_parameters()]
    assert_same(sum(parts.values()))
    torch.testing.assert_close(features["0"], x.flatten(1) @ x.flatten(1).T)


def test_weights_cast_before_by_an_autocast_without_gradients_do_not_hide_theirs() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x).float()

    model, x = model_and_probe(torch.float32)
    whole = Net(forward, body=model)
    expected = fl.ntk(whole, x)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            whole(x)
        assert torch.equal(fl.ntk(whole, x), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_measured_under_its_own_names(backend: str) -> None:
    model, x = model_and_probe()
    compiled = torch.compile(model, backend=backend)
    compiled(x).sum().backward()
    assert_same(fl.ntk(compiled, x))
    parts = fl.ntk(compiled, x, by="parameter")
    assert list(parts) == [name for name, _ in compiled.named_parameters()]
    layers = fl.ntk(compiled, x, by="layer")
    assert set(layers) <= {name for name, _ in compiled.named_modules()}
    assert_same(sum(layers.values()))
    assert_same(
        fl.ntk(compiled, x, parameters="_orig_mod.4.*"), parts["_orig_mod.4.weight"] + parts["_orig_mod.4.bias"]
    )
    assert {plan.name for plan in fl.plan(compiled, x).parameters} == set(parts)


def test_representations_of_a_compiled_model_have_the_names_of_what_was_passed() -> None:
    model, x = model_and_probe()
    compiled = torch.compile(model, backend="eager")
    kernels = fl.quantities.representation_kernels(compiled, x)
    assert set(kernels) <= {name for name, _ in compiled.named_modules()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modules_compiled_in_place_are_measured(backend: str) -> None:
    model, x = model_and_probe()
    model[4].compile(backend=backend)
    model[0] = torch.compile(model[0], backend=backend)
    model.compile(backend=backend)
    model(x).sum().backward()
    assert_same(fl.ntk(model, x))
    parts = fl.ntk(model, x, by="layer")
    assert set(parts) <= {name for name, _ in model.named_modules()}
    assert_same(sum(parts.values()))
    assert set(fl.quantities.representation_kernels(model, x)) >= {"4", "6"}


def test_code_that_was_compiled_runs_compiled_again_after_a_measurement() -> None:
    torch.compiler.reset()  # other tests may have used up how often the same code is compiled
    runs = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            runs.append(1)
            return graph(*arguments)

        return run

    model, x = model_and_probe()
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    assert len(runs) == 1
    fl.ntk(compiled, x)
    assert len(runs) == 1
    compiled(x)
    assert len(runs) == 2


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_distributed_model_is_measured_under_its_own_names() -> None:
    model, x = model_and_probe()
    wrapped = DistributedDataParallel(model)
    before = [bytes(parameter.detach().numpy().tobytes()) for parameter in model.parameters()]
    assert_same(fl.ntk(wrapped, x))
    parts = fl.ntk(wrapped, x, by="parameter", dtype=torch.float64)
    assert list(parts) == [name for name, _ in wrapped.named_parameters()]
    assert_same(sum(parts.values()))
    assert [bytes(parameter.detach().numpy().tobytes()) for parameter in model.parameters()] == before
    wrapped(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def measure_on_a_rank(rank: int, store: str, out: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, x = model_and_probe()
    wrapped = DistributedDataParallel(model)
    # Ranks measure probes of their own, and one of them more often: no collective may be waited for.
    kernels = [fl.ntk(wrapped, x[: 4 + rank]) for _ in range(1 + rank)]
    wrapped(x).sum().backward()
    torch.save(kernels[-1], f"{out}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_measure_without_waiting_for_each_other(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(measure_on_a_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        count = 4 + rank
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected_kernel()[:count, :count])


def test_the_kernel_is_the_same_in_another_thread() -> None:
    (model, x), kernels = model_and_probe(), []
    thread = threading.Thread(target=lambda: kernels.append(fl.ntk(model, x, verify=True)))
    thread.start()
    thread.join()
    assert_same(kernels[0])


@pytest.fixture
def precisions() -> Iterator[Callable[[], list[str]]]:
    backends = torch.backends
    owners: list[Any] = [backends.cuda.matmul, backends.mkldnn.matmul]
    owners += [getattr(part, kind) for part in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn")]
    before = [owner.fp32_precision for owner in owners]
    yield lambda: [owner.fp32_precision for owner in owners]
    for owner, precision in zip(owners, before, strict=True):
        owner.fp32_precision = precision


def test_two_threads_that_measure_at_a_time_leave_the_settings_as_they_were(precisions: Callable[[], Any]) -> None:
    entered, overlapping, finished = threading.Event(), threading.Event(), threading.Event()
    given, kernels = [model_and_probe() for _ in range(2)], {}

    def first(*_: Any) -> None:
        entered.set()
        overlapping.wait(0.5)

    def second(*_: Any) -> None:
        overlapping.set()
        finished.wait(5.0)

    def work(number: int) -> None:
        kernels[number] = fl.ntk(*given[number])
        if number == 0:
            finished.set()

    given[0][0].register_forward_pre_hook(first)
    given[1][0].register_forward_pre_hook(second)
    before, state = precisions(), torch.get_rng_state()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    threads[0].start()
    assert entered.wait(10.0)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert precisions() == before
    assert torch.equal(torch.get_rng_state(), state)
    for number in range(2):
        assert_same(kernels[number])


def test_the_bits_of_a_kernel_do_not_depend_on_the_names_of_the_layers() -> None:
    model, x = model_and_probe(torch.float32)

    def renamed(names: str) -> nn.Sequential:
        return nn.Sequential(OrderedDict(zip(names, model, strict=True)))

    kernels = [fl.ntk(renamed(names), x) for names in ("abcdefg", "gfedcba", "tuvwxyz", "hijklmn", "opqrstu")]
    assert all(torch.equal(kernel, kernels[0]) for kernel in kernels)


def weight_normed() -> nn.Module:
    model, _ = model_and_probe(torch.float32)
    model[4] = nn.utils.weight_norm(model[4])
    return model


def tied() -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        return (self.decoder(torch.tanh(self.encoder(x))) * self.scale).mean(2)

    torch.manual_seed(0)
    model = Net(forward, encoder=nn.Linear(5, 5), decoder=nn.Linear(5, 5), scale=torch.rand(2, 5))
    model.decoder.weight = model.encoder.weight
    return model


def parametrized() -> nn.Module:
    model, _ = model_and_probe(torch.float32)
    nn.utils.parametrizations.orthogonal(model[6])
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [lambda: model_and_probe(torch.float32)[0], weight_normed, tied, parametrized],
    ids=["plain", "old weight_norm", "tied", "parametrized"],
)
def test_double_is_the_kernel_of_the_model_in_double_and_leaves_the_model_single(
    make: Callable[[], nn.Module],
) -> None:
    model, (_, x) = make().eval(), model_and_probe(torch.float32)
    model(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kernels = fl.ntk(model, x, x2=x[:3], outputs="full", by="parameter", dtype=torch.float64)
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.float32}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model(x).dtype == torch.float32
    twin = make().double().eval()
    twin.load_state_dict(state)
    expected = dense_ntk(twin, x.double(), x[:3].double(), "full", by="parameter")
    assert list(kernels) == list(expected) == [name for name, _ in model.named_parameters()]
    scale = sum(expected.values()).abs().max()
    for name, kernel in kernels.items():
        assert kernel.dtype == torch.float64
        assert (kernel - expected[name]).abs().max() <= 1e-12 * scale


def test_single_is_close_to_double() -> None:
    model, x = model_and_probe(torch.float32)
    kernel, double = fl.ntk(model, x), fl.ntk(model, x, dtype=torch.float64)
    assert (kernel.dtype, double.dtype) == (torch.float32, torch.float64)
    assert_same(kernel.double(), double, tolerance=1e-5)


def test_a_double_model_can_be_measured_in_single() -> None:
    model, x = model_and_probe()
    kernel = fl.ntk(model, x, dtype=torch.float32)
    assert kernel.dtype == torch.float32
    assert_same(kernel.double(), tolerance=1e-5)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_model_in_half_precision_is_accumulated_in_single(dtype: torch.dtype) -> None:
    model, x = model_and_probe(dtype)
    kernel = fl.ntk(model, x)
    assert kernel.dtype == torch.float32
    double = fl.ntk(model, x, dtype=torch.float64)
    assert_same(kernel.double(), double, tolerance=20 * torch.finfo(dtype).eps)
    # The sum over 400 positions of equal terms: in bfloat16 it would stop at 256.
    wide = nn.Linear(400, 1, bias=False).to(dtype)
    assert fl.ntk(wide, torch.ones(3, 400, dtype=dtype)).tolist() == [[400.0] * 3] * 3
