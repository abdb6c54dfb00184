"""egop against closed forms (003-H), corrupted_agop against its definition and its annealed mean (003-F)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError
from featlearn.quantities.gradient_products import haar_rotation
from featlearn.quantities.layer_features import LayerFeatures
from tests.zoo.case import default_dtype


@pytest.fixture(autouse=True)
def seeded() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def chain(degree: int) -> Callable[[Tensor], Tensor]:
    def target(x: Tensor) -> Tensor:
        ring = x[:, :degree]
        return (ring * ring.roll(-1, 1)).sum(1)

    return target


def normal(dimension: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda samples, generator: torch.randn(samples, dimension, generator=generator)


EXACT = {
    1: [[4.0]],
    2: [[4.0, 0], [0, 4]],
    3: [[2.0, 1, 1], [1, 2, 1], [1, 1, 2]],
    4: [[2.0, 0, 2, 0], [0, 2, 0, 2], [2, 0, 2, 0], [0, 2, 0, 2]],
    5: [[2.0, 0, 1, 1, 0], [0, 2, 0, 1, 1], [1, 0, 2, 0, 1], [1, 1, 0, 2, 0], [0, 1, 1, 0, 2]],
}


@pytest.mark.parametrize("degree", EXACT)
def test_the_chain_monomial(degree: int):
    expected = torch.zeros(7, 7)
    expected[:degree, :degree] = torch.tensor(EXACT[degree])
    found = fl.quantities.egop(chain(degree), normal(7), samples=40_000, generator=torch.Generator().manual_seed(1))
    assert isinstance(found, fl.Estimate)
    assert found.samples == 40_000
    assert bool(((found.value - expected).abs() <= 4 * found.stderr + 1e-12).all())
    assert 0 < float(found.stderr.max()) < 0.04
    assert float(found.value[degree:].abs().max()) == 0.0
    if degree >= 3:
        eigenvalues = torch.linalg.eigvalsh(expected[:degree, :degree])
        circle = torch.sort(4 * torch.cos(2 * math.pi * torch.arange(degree) / degree) ** 2).values
        assert float((eigenvalues - circle).abs().max()) < 1e-12


@pytest.mark.parametrize("degree", [3, 5])
def test_on_given_inputs_it_is_the_average_over_them(degree: int):
    """Inputs whose second moments are exactly the identity give the expectation exactly."""
    x = torch.linalg.qr(torch.randn(60, 6))[0] * math.sqrt(60)
    found = fl.quantities.egop(chain(degree), x)
    assert isinstance(found, Tensor)
    expected = torch.zeros(6, 6)
    expected[:degree, :degree] = torch.tensor(EXACT[degree])
    assert float((found - expected).abs().max()) < 1e-12
    data = fl.data.chain_monomial(30, 6, degree)
    assert torch.equal(data.egop, fl.data.chain_monomial(4, 6, degree).egop)
    assert float((fl.quantities.egop(data.target, x) - data.egop).abs().max()) < 1e-12


def test_outputs_are_summed():
    A, B = torch.randn(4, 4), torch.randn(4, 4)

    def target(x: Tensor) -> Tensor:
        return torch.stack([((x @ A) * x).sum(1), torch.sin(x @ B[0])], 1)

    x = torch.randn(9, 4)
    first, second = x @ (A + A.T), torch.cos(x @ B[0])[:, None] * B[0]
    expected = (first.T @ first + second.T @ second) / 9
    assert float((fl.quantities.egop(target, x) - expected).abs().max()) < 1e-12
    whole = fl.quantities.egop(target, lambda samples, generator: x[:samples], samples=9)
    each = first[:, :, None] * first[:, None] + second[:, :, None] * second[:, None]
    assert float((whole.value - expected).abs().max()) < 1e-12
    assert float((whole.stderr - each.std(0) / 3).abs().max()) < 1e-12


def test_errors_are_calibrated():
    """The true value lies within one standard error about two times of three."""
    inside = [
        float((found.value[0, 0] - 2).abs() <= found.stderr[0, 0])
        for seed in range(60)
        for found in [
            fl.quantities.egop(chain(5), normal(5), samples=300, generator=torch.Generator().manual_seed(seed))
        ]
    ]
    assert 0.5 <= sum(inside) / 60 <= 0.85


def test_more_samples_than_are_held_at_once():
    first = fl.quantities.egop(chain(3), normal(3), samples=2500, generator=torch.Generator().manual_seed(2))
    x = normal(3)(1, generator := torch.Generator().manual_seed(2))
    generator.manual_seed(2)
    x = torch.cat([normal(3)(size, generator) for size in (1024, 1024, 452)])
    assert float((first.value - fl.quantities.egop(chain(3), x)).abs().max()) < 1e-12
    gradient = torch.stack([x[:, 1] + x[:, 2], x[:, 0] + x[:, 2], x[:, 0] + x[:, 1]], 1)
    each = gradient[:, :, None] * gradient[:, None]
    assert float((first.stderr - each.std(0) / 50).abs().max()) < 1e-9


def test_without_a_generator_the_draw_is_the_same_and_global_numbers_are_not_touched():
    before = torch.get_rng_state()
    first, second = (fl.quantities.egop(chain(3), normal(4), samples=100) for _ in range(2))
    assert torch.equal(first.value, second.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_as_target():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(9, 4)
    assert float((fl.quantities.egop(model, x) - fl.neural_features(model, x)["0"].agop).abs().max()) < 1e-12
    assert all(weight.grad is None for weight in model.parameters())


def test_inputs_that_need_gradients_get_none():
    x = torch.randn(6, 3, requires_grad=True)
    assert torch.equal(fl.quantities.egop(chain(3), x), fl.quantities.egop(chain(3), x.detach()))
    assert x.grad is None
    assert fl.quantities.egop(chain(3), x.detach().float()).dtype == torch.float64


def test_wrong_arguments_are_refused():
    with pytest.raises(InputTypeError, match="got list, expected inputs"):
        fl.quantities.egop(chain(3), [[1.0, 2.0, 3.0]])  # type: ignore[call-overload]
    with pytest.raises(InputValueError, match=r"shape \(3,\).*expected floating point \(n, d\)"):
        fl.quantities.egop(chain(3), torch.randn(3))
    with pytest.raises(InputValueError, match="int64"):
        fl.quantities.egop(chain(3), torch.ones(4, 3, dtype=torch.long))
    with pytest.raises(InputValueError, match=r"shape \(3,\) for 5 inputs, expected a tensor \(n,\) or \(n, C\)"):
        fl.quantities.egop(lambda x: x.sum(0), torch.randn(5, 3))
    with pytest.raises(InputValueError, match="samples=1, expected at least 2"):
        fl.quantities.egop(chain(3), normal(3), samples=1)


def test_a_sampler_that_draws_another_number_is_refused():
    with pytest.raises(InputValueError):
        fl.quantities.egop(chain(3), lambda samples, generator: torch.randn(50, 3, generator=generator), samples=1000)


@pytest.mark.parametrize(
    "target",
    [lambda x: torch.ones(len(x)), lambda x: 3.0, nn.Linear(3, 2, dtype=torch.float32)],
    ids=["constant", "a number", "float32"],
)
def test_targets_that_cannot_be_differentiated_are_refused(target: Any):
    with pytest.raises(fl.FeatlearnError):
        fl.quantities.egop(target, torch.randn(5, 3))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_under_any_grad_mode(context: Callable[[], Any]):
    x = torch.randn(5, 3)
    expected = fl.quantities.egop(chain(3), x)
    with context():
        assert torch.equal(fl.quantities.egop(chain(3), x), expected)


def test_memory_is_that_of_the_result(monkeypatch: pytest.MonkeyPatch):
    """784 inputs: (1024, 784, 784) doubles would be 5 GB; here no tensor may be a hundred times the result."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        fl.quantities.egop(chain(3), normal(20), samples=1024)
    assert largest < 100 * 20**2


# ---------------------------------------------------------------------------------------------------------------------
# corrupted AGOP
# ---------------------------------------------------------------------------------------------------------------------


def layer(units: int = 5, inputs: int = 7) -> LayerFeatures:
    rows = torch.randn(11, units) * torch.linspace(0.1, 3, units)
    return LayerFeatures(torch.randn(units, inputs), rows.T @ rows / 11)


def test_the_spectrum_is_kept_and_the_eigenvectors_are_not():
    features = layer()
    found = fl.quantities.corrupted_agop(features, torch.Generator().manual_seed(3))
    inverse = torch.linalg.pinv(features.weight)  # (inputs, units), W W^+ = 1
    corrupted = inverse.T @ found @ inverse
    expected = torch.linalg.eigvalsh(features.ptk_covariance)
    assert float((torch.linalg.eigvalsh(corrupted) - expected).abs().max()) < 1e-12
    assert float((corrupted - features.ptk_covariance).norm()) > 0.3 * float(expected.norm())
    assert float((found - found.T).abs().max()) < 1e-12
    again = fl.quantities.corrupted_agop(features, torch.Generator().manual_seed(3))
    assert torch.equal(found, again)
    assert not torch.equal(found, fl.quantities.corrupted_agop(features, torch.Generator().manual_seed(4)))


def test_rotations_are_uniform():
    """Moments of the Haar measure: E O = 0, E O_ij^2 = 1/n, E O_ij^4 = 3/(n(n+2)), E O_11^2 O_12^2 = 1/(n(n+2))."""
    size, generator = 4, torch.Generator().manual_seed(0)
    draws = torch.stack([haar_rotation(size, generator) for _ in range(4000)])
    assert float((draws @ draws.mT - torch.eye(size)).abs().max()) < 1e-12
    for values, expected in (
        (draws, 0.0),
        (draws**2, 1 / 4),
        (draws**4, 3 / 24),
        (draws[:, 0, :1] ** 2 * draws[:, 0, 1:] ** 2, 1 / 24),
        (draws[:, 0, 0] * draws[:, 1, 1] * draws[:, 0, 1] * draws[:, 1, 0], -1 / (3 * 4 * 6)),
        (torch.linalg.det(draws), 0.0),
        (draws.diagonal(dim1=1, dim2=2).sum(1) ** 2, 1.0),
    ):
        error = values.std(0) / math.sqrt(len(draws))
        assert bool(((values.mean(0) - expected).abs() <= 4.5 * error).all())


def test_the_mean_over_rotations_is_a_multiple_of_the_nfm():
    features, generator = layer(), torch.Generator().manual_seed(0)
    draws = torch.stack([fl.quantities.corrupted_agop(features, generator) for _ in range(3000)])
    expected = features.nfm * float(features.ptk_covariance.trace()) / 5
    error = draws.std(0) / math.sqrt(3000)
    assert bool(((draws.mean(0) - expected).abs() <= 4.5 * error).all())


def test_reference_case_f_and_the_annealed_mean():
    weight, spectrum = torch.tensor([[1.0, 2], [0, 1], [-1, 0.5]]), torch.tensor([0.2, 0.5, 2.8])
    annealed = float(fl.theory.early.annealed_corruption(weight, spectrum))
    assert annealed == pytest.approx(0.8078089150283798, abs=1e-12)
    features, generator = LayerFeatures(weight, torch.diag(spectrum)), torch.Generator().manual_seed(0)
    draws = torch.stack([fl.quantities.corrupted_agop(features, generator) for _ in range(4000)])
    nfm = features.nfm
    numerator = (draws * nfm).sum((1, 2)).mean()
    denominator = nfm.norm() * draws.square().sum((1, 2)).mean().sqrt()  # averaged before the ratio is taken
    assert float(numerator / denominator) == pytest.approx(annealed, abs=0.01)


def test_one_unit_cannot_be_corrupted():
    features = layer(1)
    assert float((fl.quantities.corrupted_agop(features) - features.agop).abs().max()) < 1e-12


def test_what_is_no_layer_is_refused():
    with pytest.raises(InputTypeError, match="features is Tensor, expected the features of one layer"):
        fl.quantities.corrupted_agop(torch.eye(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("generator", [3, "a"])
def test_what_is_no_generator_is_refused(generator: Any):
    with pytest.raises(fl.FeatlearnError):
        fl.quantities.corrupted_agop(layer(), generator)
