"""One mode of a balanced linear network: closed forms against reference values, mpmath, ODEs and real networks."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

import featlearn as fl
from featlearn.theory import deep_linear

DEPTHS = [1, 2, 3, 4, 5, 9]
# teacher, start: below, above, against, mirrored, nearly there, tiny
STARTS = [(1.5, 1e-3), (1.5, 4.0), (1.2, -0.5), (-0.7, -0.02), (-0.7, -30.0), (-0.7, 0.3), (2.0, 1.99), (0.3, 1e-6)]


def integrated(times: Tensor, s: float, c0: float, depth: int) -> np.ndarray:
    """dc/dt = L |c|^(2 - 2/L) (s - c), straight from the sheet."""

    def velocity(_: float, c: np.ndarray) -> np.ndarray:
        return depth * np.abs(c) ** (2 - 2 / depth) * (s - c)

    span = (0.0, float(times[-1]))
    return solve_ivp(velocity, span, [c0], "DOP853", times.numpy(), rtol=1e-12, atol=1e-14 * abs(c0)).y[0]


def primitive(c: float, s: float, depth: int) -> mpmath.mpf:
    """The antiderivative of 1 / (L |c|^p (s - c)) as the sheet has it, with mpmath's hypergeometric function."""
    c, s = mpmath.mpf(c), mpmath.mpf(s)
    if depth == 1:
        return -mpmath.log(abs(s - c))
    if depth == 2:
        return mpmath.sign(c) * mpmath.log(abs(c / (s - c))) / (2 * s)
    p = 2 - mpmath.mpf(2) / depth
    value = abs(c) ** (1 - p) / (1 - p) * mpmath.re(mpmath.hyp2f1(1, 1 - p, 2 - p, c / s))
    return mpmath.sign(c) * value / (depth * s)


def test_two_layers_at_the_reference_times():
    c = deep_linear.strength([1.0, 2.0, 3.0, 4.0], 1.5, 1e-4, 2)
    expected = [0.002006001318170373, 0.039288815962243914, 0.526126817367109, 1.3734288601081583]
    np.testing.assert_allclose(c, expected, rtol=1e-13)
    assert float(deep_linear.half_time(1.5, 1e-4, 2)) == pytest.approx(2.911455074725272, rel=1e-13)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(2, 3.169926025146273), (3, 6.6453930825088925), (4, 10.741927471541539), (5, 14.263246343076315)],
)
def test_reference_times(depth: int, expected: float):
    assert float(deep_linear.time_to(1.35, 1.5, 1e-3, depth)) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("depth", "half", "leading"),
    [
        (3, 5.93448514454326, 6.666666666666667),
        (4, 32.993105028653396, 33.33333333333333),
        (5, 222.03220009842246, 222.2222222222222),
    ],
)
def test_reference_half_times(depth: int, half: float, leading: float):
    assert float(deep_linear.half_time(1.5, 0.1**depth, depth)) == pytest.approx(half, rel=1e-11)
    assert float(deep_linear.half_time_scaling(1.5, 0.1**depth, depth)) == pytest.approx(leading, rel=1e-12)


def test_four_layers_have_the_closed_form_of_the_sheet():
    s, c0, c = 1.3, 0.02, 0.9
    roots = [math.sqrt(x / s) for x in (c, c0)]
    expected = (c0**-0.5 - c**-0.5 + s**-0.5 * (math.atanh(roots[0]) - math.atanh(roots[1]))) / (2 * s)
    assert float(deep_linear.time_to(c, s, c0, 4)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("s", "c0"), STARTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_strength_is_the_flow(depth: int, s: float, c0: float):
    horizon = (
        3 * abs(c0) ** (2 / depth - 1) / (abs(s) * depth) if depth > 2 else 4 / abs(s) * math.log(10 + 1 / abs(c0))
    )
    times = torch.linspace(0, min(horizon, 4000.0), 60, dtype=torch.float64)
    found = deep_linear.strength(times, s, c0, depth)
    expected = integrated(times, s, c0, depth)
    np.testing.assert_allclose(found, expected, rtol=2e-9, atol=1e-12)
    np.testing.assert_allclose(deep_linear.remaining(times, s, c0, depth), s - found, rtol=1e-9, atol=1e-13)
    assert float(found[0]) == c0


@pytest.mark.parametrize(("s", "c0"), STARTS)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_times_are_those_of_the_hypergeometric_function(depth: int, s: float, c0: float, share: float):
    end = s if c0 * s > 0 or depth == 1 else 0.0
    c = c0 + share * (end - c0)
    with mpmath.workdps(50):
        expected = float(primitive(c, s, depth) - primitive(c0, s, depth))
    found = deep_linear.time_to(c, s, c0, depth)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    # the rounding of t alone moves c by its speed times t eps
    speed = depth * abs(c) ** (2 - 2 / depth) * abs(s - c)
    slack = 1e-14 * (abs(c) + speed * float(found))
    assert float(deep_linear.strength(found, s, c0, depth)) == pytest.approx(c, abs=slack)


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_what_is_left_keeps_its_digits(depth: int):
    """s - c decays as exp(-L s^(2-2/L) t) with the right prefactor, far below the rounding of c."""
    s, c0, gap = 1.4, 0.01, 1e-90
    with mpmath.workdps(120):
        left = mpmath.mpf(gap)
        p = 2 - mpmath.mpf(2) / depth
        target = mpmath.mpf(s) - left
        if depth == 2:
            t = primitive(target, s, 2) - primitive(c0, s, 2)
        else:
            parts = [
                c ** (1 - p) / (1 - p) * mpmath.hyp2f1(1, 1 - p, 2 - p, c / mpmath.mpf(s))
                for c in (target, mpmath.mpf(c0))
            ]
            t = (parts[0] - parts[1]) / (depth * mpmath.mpf(s))
    found = deep_linear.remaining(float(t), s, c0, depth)
    assert float(found) == pytest.approx(gap, rel=1e-10)


def test_early_growth_and_its_end():
    times = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    for depth, c0 in ((2, 1e-9), (3, 1e-6), (5, 1e-7)):
        exact = deep_linear.strength(times, 1.5, c0, depth)
        off = deep_linear.early_strength(times, 1.5, c0, depth) / exact - 1
        assert bool((off.abs() <= 1e-12 + 3 * exact / 1.5).all())  # what is left out is c / s
        assert float(off[-1]) > 0
    assert float(deep_linear.early_strength(1e3, 1.5, 1e-3, 3)) == math.inf
    # sheet: 3e-3 at c / s = .0025
    t = deep_linear.time_to(0.0025, 1.0, 1e-5, 3)
    assert float(deep_linear.early_strength(t, 1.0, 1e-5, 3)) == pytest.approx(0.0025, rel=5e-3)


@pytest.mark.parametrize(
    ("depth", "sigma", "expected"), [(3, 0.1, 0.890), (3, 0.03, 0.967), (3, 0.01, 0.989), (4, 0.1, 0.990)]
)
def test_half_time_comes_to_its_scaling(depth: int, sigma: float, expected: float):
    ratio = deep_linear.half_time(1.5, sigma**depth, depth) / deep_linear.half_time_scaling(1.5, sigma**depth, depth)
    assert float(ratio) == pytest.approx(expected, abs=6e-4)


def test_half_time_of_two_layers_is_logarithmic():
    c0 = torch.tensor([1e-4, 1e-8, 1e-12], dtype=torch.float64)
    times = deep_linear.half_time(2.0, c0, 2)
    np.testing.assert_allclose(times.diff() / -c0.log().diff(), 1 / 4, rtol=1e-4)  # 1 / (2s) per factor e
    np.testing.assert_allclose(times, deep_linear.half_time_scaling(2.0, c0, 2), rtol=1e-4)


def test_a_balanced_network_takes_that_time():
    """Sheet 2.21: with the factor L, not without; real weights, real gradients."""
    depth, s, c0, width = 3, 1.5, 0.02, 4
    generator = torch.Generator().manual_seed(0)
    units = [torch.randn(width, dtype=torch.float64, generator=generator) for _ in range(depth)]
    units = [unit / unit.norm() for unit in units]
    u = c0 ** (1 / depth)
    weights = [u * torch.outer(units[i + 1], units[i]) for i in range(depth - 1)] + [u * units[-1][None]]
    target = s * units[0]
    t, steps = float(deep_linear.time_to(1.0, s, c0, depth)), 5000
    for _ in range(steps):
        weights = [w.detach().requires_grad_() for w in weights]
        product = weights[2] @ weights[1] @ weights[0]
        gradients = torch.autograd.grad((product[0] - target).square().sum() / 2, weights)
        weights = [w - t / steps * g for w, g in zip(weights, gradients, strict=True)]
    reached = (weights[2] @ weights[1] @ weights[0]).detach()[0] @ units[0]
    assert float(reached) == pytest.approx(1.0, abs=1e-3)  # steps of t / 5000, first order


@given(
    depth=st.integers(1, 12),
    s=st.floats(0.05, 20),
    share=st.floats(1e-6, 0.9),
    sign=st.sampled_from([-1.0, 1.0]),
    t=st.floats(0, 50),
    more=st.floats(0, 50),
)
def test_two_stretches_of_time_are_one(depth: int, s: float, share: float, sign: float, t: float, more: float):
    s, c0 = sign * s, sign * s * share
    between = float(deep_linear.strength(t, s, c0, depth))
    assert abs(between) >= abs(c0) * (1 - 1e-12)
    if abs(s - between) > 1e-9 * abs(s):
        found, expected = deep_linear.strength(more, s, between, depth), deep_linear.strength(t + more, s, c0, depth)
        assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_extreme_values_are_finite_and_right():
    times = torch.tensor([0.0, 1e6, 1e300, math.inf], dtype=torch.float64)
    for depth in (2, 3, 7):
        np.testing.assert_allclose(deep_linear.strength(times, 1.0, 1e-8, depth)[2:], 1.0, rtol=1e-14)
        assert float(deep_linear.remaining(math.inf, 1.0, 1e-8, depth)) == 0.0
        assert float(deep_linear.strength(1e6, 1.0, 1e-300, depth)) == pytest.approx(
            1.0 if depth == 2 else 1e-300, rel=1e-12
        )
    assert float(deep_linear.strength(1e-3, 1e-9, 1e9, 3)) > 0
    assert float(deep_linear.strength(1.0, 1e100, 1e-3, 3)) == pytest.approx(1e100)
    assert float(deep_linear.strength(1e6, 2.0, 1e6, 4)) == pytest.approx(2.0)


def test_fixed_points_and_a_missing_teacher():
    for depth in (2, 3):
        assert float(deep_linear.strength(10.0, 2.0, 0.0, depth)) == 0.0
        assert float(deep_linear.strength(10.0, 2.0, 2.0, depth)) == 2.0
        assert float(deep_linear.strength(math.inf, 2.0, -0.5, depth)) == 0.0
        assert float(deep_linear.time_to(0.0, 2.0, -0.5, depth)) == math.inf
        expected = integrated(torch.tensor([0.0, 5.0], dtype=torch.float64), 0.0, -0.6, depth)[-1]
        assert float(deep_linear.strength(5.0, 0.0, -0.6, depth)) == pytest.approx(expected, rel=1e-9)
        assert float(deep_linear.time_to(expected, 0.0, -0.6, depth)) == pytest.approx(5.0, rel=1e-8)
    assert float(deep_linear.strength(2.0, 2.0, 0.0, 1)) == pytest.approx(2 - 2 * math.exp(-2))
    assert float(deep_linear.time_to(2.0, 2.0, 0.5, 3)) == math.inf
    assert float(deep_linear.time_to(0.5, 2.0, 0.5, 3)) == 0.0
    assert math.isnan(deep_linear.time_to(2.5, 2.0, 0.5, 3))
    assert math.isnan(deep_linear.time_to(0.4, 2.0, 0.5, 3))
    assert math.isnan(deep_linear.half_time(2.0, 1.0, 3))


def test_shapes_broadcast():
    times, s = torch.linspace(0, 3, 5)[:, None], torch.tensor([1.0, -2.0, 0.5])
    c = deep_linear.strength(times, s, s * 0.1, 3)
    assert c.shape == (5, 3)
    assert c.dtype == torch.float64
    for k in range(3):
        np.testing.assert_array_equal(c[:, k], deep_linear.strength(times[:, 0], s[k], s[k] * 0.1, 3))


def test_modes_of_two_layers_are_learned_at_half_a_logarithm():
    s = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)
    np.testing.assert_allclose(deep_linear.mode_times(s, 1e-6, 2), (s / 1e-6).log() / (2 * s), rtol=1e-14)
    # there c has reached half of s: exactly at log(s / c0 - 1) / 2s
    halfway = deep_linear.time_to(s / 2, s, 1e-6, 2)
    np.testing.assert_allclose(deep_linear.mode_times(s, 1e-6, 2), halfway, rtol=1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_mode_times_are_those_of_early_growth(depth: int):
    s, c0 = torch.tensor([3.0, 0.5], dtype=torch.float64), 1e-5
    times = deep_linear.mode_times(s, c0, depth)

    def velocity(_: float, c: np.ndarray) -> np.ndarray:
        return depth * c ** (2 - 2 / depth) * s.numpy()[k]

    for k in range(2):
        reached = solve_ivp(velocity, (0, float(times[k]) * (1 - 1e-7)), [c0], "DOP853", rtol=1e-12, atol=1e-18).y[
            0, -1
        ]
        assert reached == pytest.approx(float(s[k]), rel=1e-3)
    assert float(deep_linear.mode_times(torch.tensor([0.5]), 2.0, depth)) == 0.0


def test_all_modes_align_first_only_from_very_small_weights_and_with_two_layers():
    s = torch.tensor([2.0, 1.0], dtype=torch.float64)
    wide, narrow = deep_linear.separation(s, 1e-2, 2), deep_linear.separation(s, 1e-12, 2)
    assert float(narrow.ratio) == pytest.approx(math.log(2e12) / 4)  # log(s_max / c0) / (2 s_max) over 1 / s_min
    assert narrow.holds
    assert float(narrow.ratio) > float(wide.ratio)
    deep = [float(deep_linear.separation(s, sigma**3, 3).ratio) for sigma in (1e-2, 1e-4)]
    assert deep[0] == pytest.approx(deep[1], rel=2e-2)
    assert max(deep) <= 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: deep_linear.strength(-1.0, 1.0, 0.1, 2),
        lambda: deep_linear.strength(1.0, 1.0, 0.1, 0),
        lambda: deep_linear.strength(1.0, 1.0, 0.1, 2.5),
        lambda: deep_linear.strength(1.0, math.nan, 0.1, 2),
        lambda: deep_linear.strength(1.0, "1", 0.1, 2),
        lambda: deep_linear.strength(1.0, True, 0.1, 2),
        lambda: deep_linear.half_time_scaling(1.0, -0.1, 3),
        lambda: deep_linear.early_strength(1.0, 0.0, 0.1, 3),
        lambda: deep_linear.mode_times(torch.tensor([1.0, 0.0]), 0.1, 2),
    ],
)
def test_wrong_numbers_are_refused(call):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        call()


def test_one_layer_keeps_its_digits_at_the_start():
    found = deep_linear.strength(torch.tensor([1e-173, 1e-9], dtype=torch.float64), -3.0, -3e-6, 1)
    assert found.tolist() == pytest.approx([-3e-6, -3e-6 - 3e-9 * (1 - 1e-6)], rel=1e-12)
