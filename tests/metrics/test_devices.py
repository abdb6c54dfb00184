"""Metrics and dynamics on a GPU: the numbers of the CPU, left where the kernel is, summed in double."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

CLOSE = 1e-10
Given = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def given() -> Given:
    """P = 7 samples, P2 = 4 others, C = 3 outputs, T = 5 times: everything that a function takes, on the CPU."""
    rows, moved = drawn(3, 11, 9), drawn(5, 11, 9, seed=1)
    each, moving = rows @ rows.mT / 9, moved @ moved.mT / 9
    wide = drawn(11, 3, 40, seed=2)
    full = torch.einsum("acr,bdr->abcd", wide, wide[:7]) / 40
    return {
        "K": each[0, :7, :7],
        "K2": each[1, :7, :7],
        "K_test": each[0, 7:, :7],
        "each": each[:, :7, :7],
        "each_test": each[:, 7:, :7],
        "full": full[:7],
        "full_test": full[7:],
        "stack": moving[:, :7, :7],
        "stack_test": moving[:, 7:, :7],
        "y": drawn(7, seed=3),
        "Y": drawn(7, 3, seed=4),
        "Y_test": drawn(4, 3, seed=5),
        "f0": drawn(7, 3, seed=7),
        "labels": torch.eye(3, dtype=torch.float64)[[0, 1, 2, 1, 1, 0, 2]],
        "times": torch.tensor([0.0, 0.3, 0.7, 1.5, 4.0], dtype=torch.float64),
        "late": torch.tensor([1.0, 2.0, 4.5, 6.0, 7.0], dtype=torch.float64),
        "curve": torch.tensor([3.0, 2.5, 1.0, 0.4, 0.1], dtype=torch.float64),
        "x": drawn(6, 4, seed=6),
    }


def descent(g: Given, kernel: str = "K", target: str = "Y", **options: Any) -> Any:
    test = "K_test" if kernel == "K" else f"{kernel}_test"
    return fl.dynamics.kernel_descent(
        g[kernel],
        g[target],
        f0=g["f0"],
        K_test=g[test],
        f0_test=g["Y_test"],
        **{"times": g["times"], "rate": 0.3, **options},
    )


CALLS: dict[str, Callable[[Given], Any]] = {
    "alignment": lambda g: fl.metrics.alignment(g["stack"], g["y"]),
    "centered_alignment": lambda g: fl.metrics.centered_alignment(g["stack"], g["Y"]),
    "class_alignment": lambda g: fl.metrics.class_alignment(g["each"], g["Y"], centered=True),
    "specialization": lambda g: fl.metrics.specialization(g["each"], g["Y"]),
    "interference": lambda g: fl.metrics.interference(g["full_test"]),
    "eigenvalues": lambda g: fl.metrics.spectrum(g["stack"]).eigenvalues,
    "task power": lambda g: fl.metrics.spectrum(g["stack"], g["Y"]).task_power,
    "cumulative power": lambda g: fl.metrics.spectrum(g["stack"], g["Y"]).cumulative_power,
    "effective rank": lambda g: fl.metrics.effective_rank(g["stack"]),
    "participation": lambda g: fl.metrics.effective_rank(g["stack"], "participation"),
    "power_law": lambda g: fl.metrics.power_law(g["curve"], 1, 5),
    "kernel_distance": lambda g: fl.metrics.kernel_distance(g["stack"], g["K2"]),
    "kernel_velocity": lambda g: fl.metrics.kernel_velocity(g["stack"], g["times"]),
    "feature_rate": lambda g: fl.metrics.feature_rate(g["K"], g["stack"], g["y"]),
    "feature_rate of classes": lambda g: fl.metrics.feature_rate(g["each"], g["each"].flip(0), g["Y"]),
    "cosine": lambda g: fl.metrics.correlation(g["K"], g["K2"]),
    "pearson": lambda g: fl.metrics.correlation(g["K"], g["K2"], "pearson"),
    "left out": lambda g: fl.metrics.predicted_risk(g["stack"], g["Y"], 0.3).leave_one_out.value,
    "gcv": lambda g: fl.metrics.predicted_risk(g["stack"], g["y"]).gcv,
    "learning_curve": lambda g: fl.metrics.learning_curve(g["stack"], g["Y"], [2, 5, 7, 20], 0.3).error,
    "effective_dimension": lambda g: fl.metrics.effective_dimension(g["stack"], 0.3),
    "suggested ridge": lambda g: fl.metrics.condition(g["stack"], g["Y"]).suggested_ridge,
    "time_to": lambda g: fl.metrics.time_to(g["times"], g["curve"], 0.5, of="initial"),
    "log_slope": lambda g: fl.metrics.log_slope(g["late"], g["curve"]),
    "agreement": lambda g: fl.metrics.agreement(g["Y"], g["labels"]),
    "flow": lambda g: descent(g),
    "flow of each": lambda g: descent(g, "each"),
    "flow of all": lambda g: descent(g, "full"),
    "descent": lambda g: descent(g, "full", times=[0, 1, 9], discrete=True),
    "flow of cross-entropy": lambda g: descent(g, "each", "labels", loss="cross-entropy"),
    "descent of cross-entropy": lambda g: descent(
        g, "full", "labels", times=[2, 5], loss="cross-entropy", discrete=True
    ),
    "flow to its end": lambda g: descent(g, "each", times=[0.5, float("inf")]),
    "a rescaled rate": lambda g: descent(g, rate=0.3 * g["K2"].double().norm() / g["K"].double().norm()),
    "evolving": lambda g: fl.dynamics.evolving_kernel_descent(
        g["stack"], g["times"], g["Y"], kernels_test=g["stack_test"], f0=g["f0"], f0_test=g["Y_test"]
    ),
    "regression": lambda g: fl.dynamics.kernel_regression(g["K"], g["y"], g["K_test"], ridge=0.1),
    "regression of all": lambda g: fl.dynamics.kernel_regression(
        g["full"], g["Y"], g["full_test"], f0=g["labels"], f0_test=g["Y_test"]
    ),
    "infinite relu": lambda g: fl.theory.infinite_width.ntk(g["x"], g["x"][:2], hidden_layers=3),
    "infinite erf": lambda g: fl.theory.infinite_width.nngp(g["x"], hidden_layers=2, activation="erf"),
}


def parts(result: Any) -> list[Any]:
    """The tensors and numbers of a result."""
    if isinstance(result, fl.dynamics.Trajectory):
        test = [] if result.test_outputs is None else [result.test_outputs]
        return [result.times, result.outputs, result.loss, *test]
    return list(result) if isinstance(result, tuple) else [result]


def compared(found: Any, expected: Any, device: str, tolerance: float = CLOSE) -> None:
    for a, b in zip(parts(found), parts(expected), strict=True):
        if isinstance(b, Tensor):
            assert a.device.type == device
            assert a.dtype == torch.float64
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)
        else:
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", CALLS)
def test_the_gpu_gives_the_numbers_of_the_cpu(name: str):
    everything = given()
    compared(CALLS[name]({k: v.cuda() for k, v in everything.items()}), CALLS[name](everything), "cuda")


@pytest.mark.parametrize("name", CALLS)
def test_single_precision_is_summed_in_double(name: str):
    """Rounded inputs measured on the GPU against the same rounded inputs in double on the CPU."""
    rounded = {k: v.float() for k, v in given().items()}
    expected = CALLS[name]({k: v.double() for k, v in rounded.items()})
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        compared(CALLS[name]({k: v.cuda() for k, v in rounded.items()}), expected, "cuda")
    finally:
        torch.set_float32_matmul_precision(before)


KERNELS = {"K", "each", "full", "stack", "x", "times", "late"}


@pytest.mark.parametrize("kernel", ["cuda", "cpu"])
@pytest.mark.parametrize("name", CALLS)
def test_what_comes_with_the_kernel_follows_it(name: str, kernel: str):
    """Kernels (and inputs) on one device, all that is given with them on the other: the result is with the kernels."""
    if name == "a rescaled rate":
        pytest.skip("the rate is computed from two kernels before the call")
    if name == "agreement":
        pytest.skip("takes two predictors and no kernel")
    other = {"cuda": "cpu", "cpu": "cuda"}[kernel]
    first = "curve" if name == "power_law" else "full_test" if name == "interference" else None
    mixed = {k: v.to(kernel if k in KERNELS or k == first else other) for k, v in given().items()}
    compared(CALLS[name](mixed), CALLS[name](given()), kernel)


STIFF: dict[str, Callable[[Given], Any]] = {
    "cross-entropy": lambda g: descent(g, "each", "labels", times=[1.0], rate=1e5, loss="cross-entropy"),
    "evolving": lambda g: fl.dynamics.evolving_kernel_descent(
        g["stack"], g["times"], g["Y"], kernels_test=g["stack_test"], rate=1e5
    ),
}


@pytest.mark.parametrize("name", STIFF)
def test_stiff_flows_are_those_of_the_cpu(name: str):
    """Up to the tolerance of the integration, whose steps rounding may change."""
    everything = given()
    compared(STIFF[name]({k: v.cuda() for k, v in everything.items()}), STIFF[name](everything), "cuda", 1e-7)


@pytest.mark.parametrize("kernel", ["cuda", "cpu"])
def test_a_rate_may_come_from_any_device(kernel: str):
    everything = given()
    K, Y = everything["K"].to(kernel), everything["Y"]
    for device in ("cuda", "cpu"):
        rate = torch.tensor(0.3, dtype=torch.float64, device=device)
        found = fl.dynamics.kernel_descent(K, Y, times=[1.0], rate=rate)
        compared(found, fl.dynamics.kernel_descent(everything["K"], Y, times=[1.0], rate=0.3), kernel)
        stack, times = everything["stack"].to(kernel), everything["times"].to(device)
        moving = fl.dynamics.evolving_kernel_descent(stack, times, Y, rate=rate)
        expected = fl.dynamics.evolving_kernel_descent(everything["stack"], everything["times"], Y, rate=0.3)
        compared(moving, expected, kernel)


# --- with networks --------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_two_probes_from_network_to_prediction():
    """Kernels measured on the GPU, train and test, through alignment, regression and descent."""

    def measured(device: str) -> list[Tensor]:
        model = network().to(device)
        x, x_test, y = drawn(7, 4).to(device), drawn(5, 4, seed=1).to(device), drawn(7, 3, seed=2).to(device)
        K, cross = fl.ntk(model, x, outputs="full"), fl.ntk(model, x_test, x2=x, outputs="full")
        common = {"f0": model(x), "f0_test": model(x_test)}
        path = fl.dynamics.kernel_descent(K, y, times=[0.5, 2.0], rate=0.1, K_test=cross, **common)
        assert path.test_outputs is not None
        regressed = fl.dynamics.kernel_regression(K, y, cross, ridge=0.1, **common)
        test = fl.metrics.alignment(fl.ntk(model, x_test), drawn(5, 3, seed=3))
        velocity = fl.quantities.ntk_velocity(model, x, y, loss="mean", outputs="each")
        found = [path.outputs, path.test_outputs, regressed, test, velocity]
        assert {part.device.type for part in found} == {device}
        return [part.cpu() for part in found] + [torch.tensor(fl.quantities.feature_speed(model, x, y))]

    for a, b in zip(measured("cuda"), measured("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", [1, 2])
def test_taylor_models_of_a_network_on_the_gpu(order: int):
    model, x = network(), drawn(7, 4)
    found = []
    for device in ("cpu", "cuda"):
        taylor = fl.dynamics.linearize(copy.deepcopy(model).to(device), order=order)
        with torch.no_grad():
            for parameter in taylor.parameters():
                parameter.add_(0.3)
        found.append(taylor(x.to(device)))
        assert found[-1].device.type == device
    taylor = taylor.cpu()  # with its expansion point
    torch.testing.assert_close(taylor(x).detach(), found[0].detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1].detach().cpu(), found[0].detach(), rtol=1e-10, atol=1e-10)


def test_the_kernel_of_a_step_on_the_gpu():
    def measured(device: str) -> Tensor:
        model, x = network().to(device), drawn(7, 4).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return fl.ntk(model, x, outputs="each", optimizer=optimizer)

    torch.testing.assert_close(measured("cuda").cpu(), measured("cpu"), rtol=1e-9, atol=1e-10)
