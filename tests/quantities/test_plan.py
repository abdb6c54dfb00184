"""What fl.plan says, and that it is what fl.ntk does."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.contraction.hardware import elementwise_cost
from featlearn.errors import MemoryBudgetError
from featlearn.measurement import Measurement
from featlearn.planning import plan as planning
from featlearn.planning.memory import byte_budget, readable_bytes, readable_count
from tests.zoo.case import Net


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def test_the_plan_of_a_gpt2_is_a_table_a_person_can_read():
    model = gpt2()
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    plan = fl.plan(model, {"input_ids": ids}, readout=fl.readouts.last_token, outputs=0)
    lines = str(plan).splitlines()
    assert lines[0].split() == ["parameter", "shape", "uses", "route", "multiply-adds", "bytes/sample", "why"]
    assert len(lines) == 2 + 2 + 10 + 2 + 5  # blocks are folded: two embeddings, ten kinds in a block, the last norm
    embedding = next(line for line in lines if line.startswith("transformer.wte.weight"))
    assert "50 x 16" in embedding
    assert "Embedding" in embedding
    assert "Mm" in embedding
    attention = next(line for line in lines if line.startswith("transformer.h.{0..1}.attn.c_attn.weight (2)"))
    assert "16 x 48" in attention
    assert "7 positions" in attention
    assert lines[-1] == "no parameters through the fallback"
    assert re.match(r"4 x 4 samples -> kernel 4 x 4 \(64 B\), about \d+ KiB at most, budget ", lines[-4])
    assert lines[-3].startswith("1 forward pass of 4 samples and 1 backward pass, checked by 4 forward passes ")
    assert lines[-2] == "each sample runs 3 times forward and once backward"
    assert max(map(len, lines)) <= 130
    assert repr(plan) == str(plan)


class Own(nn.Module):
    """Does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_is_held_at_most_is_counted_by_hand():
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    plan = fl.plan(model, torch.randn(100, 6))
    activations, arriving = 5 + 5 + 3, 3 * (5 + 3)  # of one sample; what arrives has three directions
    formed = max(6 + 3 * 5, 5 + 3 * 3)  # one layer's rows and gradients
    weights = 6 * 5 + 5 * 3  # copied, to be put back
    assert plan.peak == 4 * (100 * 100 + 100 * (activations + arriving + formed) + weights)
    few = fl.plan(model, torch.randn(100, 6), memory=60_000)
    assert few.kernel_bytes < few.peak < few.memory


def test_many_outputs_are_planned_without_a_square_of_them():
    plan = fl.plan(nn.Linear(3, 20_000, bias=False), torch.randn(4, 3), outputs=7)
    assert plan.passes == plan.backward_passes == 1
    every = fl.plan(nn.Linear(3, 20_000, bias=False), torch.randn(4, 3))
    assert max(group.directions for group in every.groups) * 20_000 <= 2**24
    assert every.backward_passes == 20_000
    assert "20000 outputs: outputs=fl.Directions(16)" in str(every)


class Awkward(nn.Module):
    """One parameter for every route."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.many = nn.Conv1d(1, 2, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3, bias=False))
        self.exponent = nn.Parameter(torch.ones(1, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.normed(self.many(self.one(x)[:, None]).flatten(1)).square()) ** self.exponent


def test_every_route_is_named():
    plan = fl.plan(Awkward(), torch.randn(30, 6))
    routes = {p.name: p.route for p in plan.parameters}
    assert routes["one.weight"] == "pairs"
    assert routes["one.bias"] == "direct"
    assert routes["many.weight"] == "gradients"
    assert routes["normed.parametrizations.weight.original1"] == "pulled back"
    assert routes["exponent"] == "fallback"
    assert routes["unused"] == "unused"
    assert plan.fallbacks == {"exponent": "no rule for PowBackward1"}
    assert "1 parameter through the fallback" in str(plan)


def test_the_cost_is_that_of_the_contraction():
    """P^2 (n + m + elementwise) for one position."""
    plan = fl.plan(nn.Linear(30, 20, bias=False), torch.randn(50, 30), outputs="sum")
    (only,) = plan.parameters
    assert only.operations == 50 * 50 * (30 + 20 * 20 + elementwise_cost(torch.device("cpu")))
    assert only.kept == (30 + 20 * 20) * 4


def test_a_plan_runs_only_a_few_samples():
    model, seen = nn.Linear(3, 1), []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    fl.plan(model, torch.randn(1000, 3))
    assert seen
    assert sum(seen) <= 20


def test_a_kernel_that_cannot_fit_is_refused_with_the_bytes_and_two_ways_out():
    x = torch.randn(100_000, 3)
    with pytest.raises(
        MemoryBudgetError, match=r"37.3 GiB, expected at most .*out=.*NTKOperator.*Sketch.*or pass a larger"
    ):
        fl.ntk(nn.Linear(3, 1), x, memory="4GiB")
    with pytest.raises(MemoryBudgetError, match="for 2 parts"):
        fl.ntk(nn.Linear(3, 1), x[:1000], by="parameter", memory="5MB")


def test_a_parameter_that_cannot_fit_is_refused_by_name():
    model = Net(lambda self, x: x @ torch.tanh(self.weight), weight=nn.Parameter(torch.randn(900, 900)))
    with pytest.raises(MemoryBudgetError, match=r"weight needs about .* for a single sample"):
        fl.ntk(model, torch.randn(2, 900), memory="4MB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("500MB", 500 * 10**6), ("1.5 KiB", 1536), ("100", 100), ("7b", 7), (12345, 12345)],
)
def test_sizes_are_read(text: str | int, size: int):
    assert byte_budget(text, torch.device("cpu")) == size


def test_the_default_budget_is_part_of_what_is_free():
    assert 2**20 < byte_budget(None, torch.device("cpu")) < 2**50


def test_numbers_are_written_as_people_write_them():
    assert [readable_bytes(n) for n in (12, 2048, 3.5 * 2**30)] == ["12 B", "2.0 KiB", "3.5 GiB"]
    assert [readable_count(n) for n in (12, 2500, 3.2e9, 1e17)] == ["12", "2.5k", "3.2G", "100.0P"]


PEAK = """
import resource, sys, torch, featlearn as fl
from torch import nn
torch.set_num_threads(1)
name, budget = sys.argv[1], int(sys.argv[2])
if name == "mlp":
    model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1))
    x = torch.randn(int(sys.argv[3]), 784)
elif name == "cnn":
    model = nn.Sequential(nn.Conv2d(3, 33, 5), nn.ReLU(), nn.Conv2d(33, 33, 5), nn.ReLU(), nn.AvgPool2d(24),
                          nn.Flatten(), nn.Linear(33, 10))
    x = torch.randn(int(sys.argv[3]), 3, 32, 32)
elif name == "wide":
    model = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 8, 1),
                          nn.Flatten(), nn.Linear(8 * 256, 10))
    x = torch.randn(int(sys.argv[3]), 3, 16, 16)
fl.ntk(model, x[:3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fl.ntk(model, x, memory=budget)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    ("name", "budget", "samples"), [("mlp", 200 * 2**20, 4000), ("cnn", 100 * 2**20, 60), ("wide", 76 * 2**20, 50)]
)
def test_the_peak_stays_within_the_budget(name: str, budget: int, samples: int):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, name, str(budget), str(samples)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= budget


@pytest.mark.slow
def test_ten_thousand_samples_of_a_scalar_network_fit_into_4_gib():
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "mlp", str(4 * 2**30), "10000"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 4 * 2**30


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("memory", ["1GB", "40kB", "24kB"])
def test_forward_passes_are_counted_right(memory: str, second: bool):
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    x, x2 = torch.randn(40, 6), (torch.randn(30, 6) if second else None)
    plan = fl.plan(model, x, x2=x2, memory=memory)
    chunks = []
    original = Measurement.chunk

    def counted(self: object, *args: object) -> object:
        chunks.append(args)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurement, "chunk", counted)
        fl.ntk(model, x, x2=x2, memory=memory)
    assert plan.passes == len(chunks)


def test_progress_shows_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(planning.time, "monotonic", lambda: float(next(now)))
    for terminal in (False, True):
        monkeypatch.setattr(planning.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with planning.ProgressLine("kernel", 4) as line:
            for _ in range(3):
                line.advance()
        shown = capsys.readouterr().err
        assert ("kernel  75%, about 2 s left" in shown) == terminal
        assert shown.endswith("\r") == terminal


def test_chunks_have_not_as_many_samples_as_the_pass_that_proves_them_apart():
    layers = [Own(), nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 9)]
    plans = [fl.plan(nn.Sequential(*layers), torch.randn(64, 3, 16, 16), memory=f"{n}MiB") for n in range(20, 34)]
    assert {group.chunk for plan in plans for group in plan.groups} == {5, 6, 8}  # 7 would be run twice
    assert all("each sample runs once forward" in str(plan) for plan in plans)
