"""The model of kernels on several devices: its formulas by hand, its compute against counted operations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import featlearn as fl
from benchmarks.rank_costs import CASES, costs
from featlearn.errors import InputValueError
from featlearn.planning.exchange import SharedKernel, SharedParameter
from featlearn.planning.plan import ParameterGroup
from featlearn.planning.rank_costs import DEVICES, Device, rank_costs

SLOW = Device("slow", 1e9, 4e9, 8e6, 1e6, 1e5, 4)


def shared(samples: int, ranks: int, memory: float = 4e6, **changes) -> SharedKernel:
    """The float32 kernel of one batch."""
    kernel = SharedKernel(ranks, (samples, samples), True, samples**2, 1, 4, memory)
    return replace(kernel, **changes)


def test_few_positions_travel_around_a_ring():
    """One position, n = 30, m = 20: 50 factors against 600 / 4 entries; by hand for P = 40 on 4 ranks."""
    one = SharedParameter("w", 600, 50, 1, pair=55)
    found = rank_costs([one], shared(40, 4), SLOW, sample_operations=1e6)
    (share,) = found.parameters
    assert share.exchange == "ring"
    assert share.sent == 40 * 50 / 2
    assert share.held == 2 * 10 * 50
    assert share.operations == 40**2 / 2 / 4 * 55
    assert found.sent_bytes == 1000 * 4  # no kernel is summed
    assert found.groups == 1
    assert found.pass_seconds == pytest.approx(1e6 * 10 / 1e9)
    assert found.contraction_seconds == pytest.approx(2 * 11000 / 1e9)
    assert found.exchange_seconds == pytest.approx(4000 / 1e6)
    assert found.seconds == pytest.approx(0.01 + 2.2e-5 + 0.004)
    assert found.memory == 1000 * 4 + 400 * 4  # 10 rows of the kernel
    formed, early = (
        rank_costs([SharedParameter("w", 600, 50, 2, early=early)], shared(40, 4), SLOW, sample_operations=0)
        for early in (False, True)
    )
    assert formed.parameters[0].operations == (10 + 20) * 2 * 600 + 200 * 600  # its own samples and those that visit
    assert early.parameters[0].operations == 10 * 2 * 600 + 200 * 600
    three = rank_costs([one], shared(39, 3), SLOW, sample_operations=0).parameters[0]
    assert three.sent == 13 * 50  # of three ranks each sends to one


def test_many_positions_are_sent_as_slices():
    """64 positions of 10 + 8 numbers against 80 / 8 entries, for several parameters, which share one kernel of P^2."""
    device = replace(SLOW, memory=32e6)
    several = [SharedParameter(str(i), 80, 64 * 18, 64) for i in range(5)]
    found = rank_costs(several, shared(1000, 8, 16e6), device, sample_operations=1e6, weight_bytes=320.0)
    assert {share.exchange for share in found.parameters} == {"slices"}
    share = found.parameters[0]
    assert share.sent == share.held == 1000 * 80 / 8
    assert share.operations == 1000 / 8 * 64 * 80 + 1000**2 / 2 / 8 * 80
    assert found.sent_bytes == (5 * 10_000 + 1000**2) * 4
    assert found.exchange_seconds == pytest.approx(found.sent_bytes / 1e5)  # two nodes
    assert found.memory == 5 * 40_000 + 4e6 / 8 + 4e6 + 320
    assert found.fits
    many = rank_costs(several * 200, shared(1000, 8, 16e6), device, sample_operations=1e6)
    assert many.groups == 3  # 40 MB in halves of 32 MB
    assert many.pass_seconds == pytest.approx(3 * 125 * 1e6 / 1e9)
    assert many.memory == pytest.approx(40e6 / 3 + 4e6 / 8 + 4e6)
    assert not rank_costs(several, shared(9000, 8), device, sample_operations=0).fits
    alone = rank_costs(several, shared(1000, 1, 16e6), device, sample_operations=0)
    assert alone.sent_bytes == 0


def test_which_exchange_is_taken():
    """By hand for P = 1000 on 8 ranks, 125 samples each: what slices of a parameter save, against 1000^2 once."""
    kernel = shared(1000, 8, 16e6)
    one = SharedParameter("w", 80, 64 * 18, 64)
    # ring 4 x 125 x (1152 + 80) + 125 x 80, slices 125 x (80 + 80), where 64 products take as long as a number sent
    gain = 4 * 125 * (1152 + 80) + 125 * 80 - 125 * 160
    assert gain < 1000**2 < 2 * gain
    assert kernel.sliced([one]) == set()
    assert kernel.sliced([one, replace(one, name="v")]) == {"v", "w"}
    pair = [one, replace(one, name="v")]
    assert kernel.reserved == 4e6
    assert replace(kernel, memory=15.9e6).reserved == 0
    assert replace(kernel, memory=15.9e6).sliced(pair) == set()
    assert replace(kernel, kernels=2, memory=64e6).sliced(pair) == set()  # both would be added up
    assert kernel.sliced([*pair, replace(one, name="u", pair=1.0)]) == {"v", "w"}
    assert kernel.sliced([*pair, SharedParameter("few", 800, 50, 0, early=True)]) == {"v", "w"}
    blocks = [ParameterGroup(("v",), 124, 1, 10), ParameterGroup(("w", "u"), 125, 1, 10)]
    assert kernel.sliced([*pair, replace(one, name="u")], blocks) == {"u", "w"}
    crossed = replace(kernel, samples=(1000, 80), symmetric=False, entries=80_000)
    # ring 7 x 10 x (1152 + 80) + 125 x 80 = 96,240, slices 135 x 160 = 21,600
    assert crossed.sliced([one]) == set()
    assert crossed.sliced(pair) == {"v", "w"}
    assert shared(1000, 1, 16e6).sliced(pair * 10) == set()


def test_precisions_have_their_rates():
    assert DEVICES["H100"].rate(torch.bfloat16) == 400e12
    assert DEVICES["H100"].rate(torch.float32) == 50e12
    assert DEVICES["H100"].rate(torch.float64) == 25e12


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimates_on_paper_are_within_a_factor(case):
    found = costs(case)
    assert 1 / 1.7 < found.seconds / case.paper < 1.7
    assert found.fits


def test_the_compute_is_that_of_counted_operations():
    """An MLP and a CNN on one device: passes and contraction against what torch counts while the kernel is made.

    Both halves of a symmetric kernel may be multiplied there, and passes over a few samples audit the network.
    """
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 70), nn.ReLU(), nn.Linear(70, 1))
    cnn = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 10, 3), nn.Flatten(), nn.Linear(360, 1)
    )
    for model, x in ((mlp, torch.randn(300, 40)), (cnn, torch.randn(500, 3, 8, 8))):
        found = fl.plan(model, x, ranks=1).rank_costs
        with FlopCounterMode(display=False) as counter:
            model(x)
        forward = counter.get_total_flops()
        assert found.sample_operations * len(x) == pytest.approx(2 * forward, rel=0.02)
        with FlopCounterMode(display=False) as counter:
            fl.ntk(model, x)
        modeled = found.sample_operations * len(x) + 2 * sum(p.operations for p in found.parameters)
        assert 0.5 < counter.get_total_flops() / modeled < 2.0


def test_the_plan_prints_the_model_and_says_what_it_is():
    model = nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 3))
    x = torch.randn(64, 40)
    plan = fl.plan(model, x, ranks=64, device="A100", memory="1GiB")  # free memory changes from call to call
    found = plan.rank_costs
    assert (found.ranks, found.device.name, found.samples) == (64, "A100", 64)
    # For a single sample of each rank pairs of positions are multiplied in the weights.
    assert {p.name: p.exchange for p in found.parameters} == {
        "0.weight": "ring",
        "0.bias": "slices",
        "2.weight": "ring",
        "2.bias": "slices",
    }
    small = fl.plan(model, x, ranks=64, device="A100", memory="60kB").rank_costs  # the kernel takes 16 kB of it
    assert {p.exchange for p in small.parameters} == {"ring"}
    assert found.weight_bytes == 2 * 4 * (40 * 90 + 90 + 270 + 3)  # the weights, and the copy that is put back
    said = str(plan)
    assert "on 64 A100 (a model that was not run on several GPUs): about" in said
    assert "per rank: 1 samples, 1 sweep over them" in said
    assert fl.plan(model, x).rank_costs is None
    assert str(fl.Session(model, x, memory="1GiB").plan(ranks=64, device="A100")) == said


def test_what_is_not_modeled_is_refused():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    with pytest.raises(InputValueError, match="expected one of V100, A100, H100, H200, B200"):
        fl.plan(model, x, ranks=2, device="H1000")
    with pytest.raises(InputValueError, match="ranks=0, expected a number of devices"):
        fl.plan(model, x, ranks=0)
    with pytest.raises(InputValueError, match="ranks= with sketch= or x2"):
        fl.plan(model, x, x2=x, ranks=2)
    assert math.isfinite(fl.plan(model, x, ranks=2, device=SLOW).rank_costs.seconds)
