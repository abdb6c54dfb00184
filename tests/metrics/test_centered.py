"""What is left of a kernel without its constant: every measure with `centered=True` is that of H K H."""

import pytest
import torch
from torch import Tensor

from featlearn import metrics
from featlearn.errors import InputTypeError, InputValueError

P = 9
H = torch.eye(P, dtype=torch.float64) - 1 / P


def kernel(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(P, 5, generator=generator, dtype=torch.float64)
    return rows @ rows.T + 30.0


K0, K1 = kernel(0), kernel(1)
Y = torch.randn(P, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_distance_and_velocity():
    expected = metrics.kernel_distance(H @ K1 @ H, H @ K0 @ H)
    assert metrics.kernel_distance(K1, K0, centered=True) == pytest.approx(float(expected), rel=1e-12)
    assert float(expected) > 10 * float(metrics.kernel_distance(K1, K0))  # the constant hid it
    times = torch.tensor([0.0, 4.0])
    velocity = metrics.kernel_velocity(torch.stack([K0, K1]), times, centered=True)
    assert velocity.tolist() == pytest.approx([float(expected) / 4], rel=1e-12)


@pytest.mark.parametrize("kind", ["entropy", "participation"])
def test_rank(kind: str):
    expected = metrics.effective_rank(H @ K0 @ H, kind)  # type: ignore[arg-type]
    assert metrics.effective_rank(K0, kind, centered=True) == pytest.approx(float(expected), rel=1e-10)  # type: ignore[arg-type]


def test_spectrum_keeps_the_task_as_it_is():
    found = metrics.spectrum(K0, Y, centered=True)
    expected = metrics.spectrum(H @ K0 @ H, Y)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, atol=1e-10, rtol=0)
    assert found.task_power is not None
    assert float(found.task_power.sum()) == pytest.approx(float(Y.square().sum()), rel=1e-12)


def test_feature_rate_takes_the_constant_off_both():
    found = metrics.feature_rate(K0, K1, Y, centered=True)
    assert found == pytest.approx(float(metrics.feature_rate(H @ K0 @ H, H @ K1 @ H, H @ Y)), rel=1e-10)


def test_what_a_training_loop_yields_is_answered_with_what_to_do():
    with pytest.raises(InputTypeError, match=r"K is list, expected a tensor; stack them: torch\.stack\(K\)"):
        metrics.alignment([K0, K1], Y)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=r"choose one of its entries, such as K\['0'\]"):
        metrics.alignment({"0": K0}, Y)  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [4, P])
def test_a_full_kernel_is_not_taken_for_a_stack(outputs: int):
    full = torch.ones(P, P, outputs, outputs, dtype=torch.float64)
    with pytest.raises(InputValueError, match=r"\(P, P, C, C\) for all pairs of outputs, expected \(\.\.\., P, P\)"):
        metrics.alignment(full, torch.randn(P, outputs, dtype=torch.float64))
