"""What only a GPU can show: its random numbers, its precision settings, its memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import featlearn as fl
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.errors import CoupledSamplesError, InputValueError
from tests.distributed.sharded import Block
from tests.references.jacobian import dense_ntk

pytestmark = pytest.mark.gpu


def network(width: int = 64, classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, classes)]
        return nn.Sequential(*layers).cuda()


def inputs(samples: int) -> Tensor:
    return torch.randn(samples, 10, generator=torch.Generator().manual_seed(1)).cuda()


def test_random_numbers_of_the_gpu_are_as_before():
    model, x = network(), inputs(6)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    fl.ntk(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_training_step_is_the_same_with_and_without():
    def run(measured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = network(), inputs(8)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            if measured:
                fl.ntk(model, x, outputs="full")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_tensor_cores_do_not_round_the_kernel(precision: str):
    model, x = network(512), inputs(100)
    reference = fl.ntk(model, x, dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with torch.autocast("cuda"):
            kernel = fl.ntk(model, x)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((kernel - reference).norm() / reference.norm()) < 3e-6


def test_double_equals_the_dense_jacobian():
    model, x = network().double(), inputs(5).double()
    torch.testing.assert_close(fl.ntk(model, x, outputs="full"), dense_ntk(model, x, outputs="full"))


def test_nothing_common_falls_back_in_single_precision():
    """Sums in no fixed order must not hide the sample axis."""
    transformers = pytest.importorskip("transformers")
    image = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=4, stride=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).cuda()
    pictures = torch.randn(40, 3, 32, 32, device="cuda")
    assert fl.plan(image, pictures).fallbacks == {}
    assert fl.ntk(image, pictures, verify=True).shape == (40, 40)
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    text = transformers.GPT2LMHeadModel(config).cuda()
    ids = {"input_ids": torch.randint(100, (20, 64), device="cuda")}
    readout = fl.readouts.last_token
    assert fl.plan(text, ids, readout=readout, outputs=0).fallbacks == {}
    assert fl.ntk(text, ids, readout=readout, outputs=fl.Directions(3), verify=True).shape == (20, 20)


def test_a_sketch_is_the_same_as_on_the_cpu():
    """The tables do not depend on the device, only the order in which bins are added to."""
    model, x = network(), inputs(40)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)).cuda()
    for one, batch in ((model, x), (conv, torch.randn(20, 3, 8, 8, device="cuda"))):
        here = fl.ntk(one, batch, sketch=fl.Sketch(256, 3))
        there = fl.ntk(one.cpu(), batch.cpu(), sketch=fl.Sketch(256, 3))
        scale = there.value.abs().max()
        assert (here.value.cpu() - there.value).abs().max() < 1e-4 * scale
        assert (here.stderr.cpu() - there.stderr).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("budget", [2**31, 2**28])
def test_the_peak_stays_within_the_budget(budget: int):
    model = nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.AvgPool2d(24),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).cuda()
    x = torch.randn(200, 3, 32, 32, device="cuda")
    fl.ntk(model, x[:20])  # what comes once in a process: workspaces of cuBLAS, rates that are measured
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fl.ntk(model, x, memory=budget)
    assert torch.cuda.max_memory_allocated() - before <= budget


@pytest.mark.parametrize("samples", [4096, 4500])
def test_many_samples_are_multiplied_in_tiles(samples: int):
    """A second call of a Session reuses its audit and plan; a third one sees other weights and samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).cuda().double()
    x = torch.randn(samples, 7, device="cuda", dtype=torch.float64)
    session = fl.Session(model, x)
    for _ in range(3):
        few = torch.cat([torch.arange(9), torch.arange(samples - 9, samples), torch.arange(1020, 1030)])
        expected = dense_ntk(model, x[few])
        for _ in range(2):
            kernel = session.ntk(x=x)
            assert torch.equal(kernel, kernel.T)
            assert float((kernel[few][:, few] - expected).abs().max() / expected.abs().max()) < 1e-12
        x = torch.randn_like(x)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))


class Switched(nn.Module):
    """Couples samples in the forward pass or in the backward pass, or breaks its outputs, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(10, 20), nn.Linear(20, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.how == "forward":
            h = h - 0.1 * h.detach().mean(0)
        if self.how == "backward":
            h.register_hook(lambda gradient: gradient.flip(0))
        out = self.last(h)
        return out / 0.0 if self.how == "infinite" else out


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of the checks of every measurement that deferred them."""
    seen: list[bool] = []
    original = DeferredChecks.hold
    monkeypatch.setattr(DeferredChecks, "hold", lambda self: seen.append(original(self)) or seen[-1])
    return seen


@pytest.mark.parametrize("outputs", ["mean", "each", "full", 1])
def test_deferred_checks_give_the_same_kernel(outputs: Any):
    torch.manual_seed(0)
    model, x = Switched().cuda().double(), inputs(40).double()
    session = fl.Session(model, x)
    expected = dense_ntk(model, x, outputs="each" if outputs == 1 else outputs)
    for _ in range(3):
        torch.testing.assert_close(session.ntk(outputs=outputs), expected[1] if outputs == 1 else expected)


@pytest.mark.parametrize(
    ("how", "error"),
    [("forward", CoupledSamplesError), ("backward", CoupledSamplesError), ("infinite", InputValueError)],
)
def test_what_deferred_checks_see_is_refused_as_without_them(how: str, error: type[Exception], held: list[bool]):
    torch.manual_seed(0)
    model = Switched().cuda()
    session = fl.Session(model, inputs(40))
    for _ in range(2):
        session.ntk()
    assert held[-1]
    model.how = how
    for _ in range(2):
        with pytest.raises(error):
            session.ntk()
    assert how == "backward" or not all(held)  # hooks are seen, and checked at once
    model.how = ""
    reference = fl.ntk(model, session.x, dtype=torch.float64)
    assert float((session.ntk() - reference).norm() / reference.norm()) < 3e-6


def test_a_later_call_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch):
    model = Switched().cuda()
    session = fl.Session(model, inputs(40))
    for _ in range(2):
        session.ntk()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            session.ntk()
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    # All checks at the end, kind by kind of their numbers, and whether the weights are what they were.
    assert len([wait for wait in waits if "synchronizing" in str(wait.message)]) <= 5


def test_a_sharded_model_is_gathered_layer_by_layer():
    def deep() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 4096), *[Block(4096) for _ in range(24)], nn.Linear(4096, 3)).cuda()

    one, model, x = deep(), deep(), inputs(6)
    whole = sum(p.nbytes for p in one.parameters())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for part in (*model[1:-1], model):
            fully_shard(part)
        for outputs in ("mean", "each"):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = fl.ntk(model, x, outputs=outputs, memory=int(1.9 * whole))
            peak = torch.cuda.max_memory_allocated() - before
            assert torch.allclose(found, fl.ntk(one, x, outputs=outputs), rtol=1e-4)
            assert peak < 0.5 * whole, (peak, whole)
            del found
        assert all(hasattr(p, "placements") for p in model.parameters())
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()
