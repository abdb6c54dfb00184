"""What any tangent kernel must satisfy, on random networks and sizes."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import featlearn as fl

SIZES = st.integers(1, 6)
ACTIVATIONS = st.sampled_from([nn.Tanh, nn.ReLU, nn.GELU, nn.Identity, nn.Softplus])
QUICK = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    """A random multilayer or convolutional network with a shared layer, its inputs and a second batch."""
    samples, samples2, width, classes, seed = draw(st.tuples(SIZES, SIZES, SIZES, SIZES, st.integers(0, 10**6)))
    activation, convolutional, bias = draw(ACTIVATIONS), draw(st.booleans()), draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared = nn.Linear(width, width, bias=bias)
        body = [shared, activation(), shared, activation(), nn.Linear(width, classes, bias=bias)]
        if convolutional:
            head = [nn.Conv1d(2, width, 2, bias=bias), activation(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
        else:
            head = [nn.Flatten(), nn.Linear(2 * 4, width, bias=bias), activation()]
        model = nn.Sequential(*head, *body).double()
    x, x2 = (torch.randn(n, 2, 4, generator=generator, dtype=torch.float64) for n in (samples, samples2))
    return model, x, x2


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 * (1 + float(b.abs().max())))


@QUICK
@given(networks())
def test_the_kernel_is_symmetric_and_positive(built: tuple[nn.Module, Tensor, Tensor]):
    model, x, _ = built
    full = fl.ntk(model, x, outputs="full")
    matrix = full.transpose(1, 2).reshape(2 * (full.shape[0] * full.shape[2],))
    assert_close(matrix, matrix.T)
    assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-10 * float(matrix.trace())


@QUICK
@given(networks())
def test_layers_and_parameters_add_up(built: tuple[nn.Module, Tensor, Tensor]):
    model, x, x2 = built
    whole = fl.ntk(model, x, x2=x2, outputs="each")
    for by in ("layer", "parameter"):
        assert_close(torch.stack([*fl.ntk(model, x, x2=x2, outputs="each", by=by).values()]).sum(0), whole)


@QUICK
@given(networks())
def test_a_cross_kernel_is_a_block_of_the_joint_one(built: tuple[nn.Module, Tensor, Tensor]):
    model, x, x2 = built
    joint = fl.ntk(model, torch.cat([x, x2]), outputs="full")
    assert_close(fl.ntk(model, x, x2=x2, outputs="full"), joint[: len(x), len(x) :])
    assert_close(fl.ntk(model, x2, x2=x, outputs="full"), joint[len(x) :, : len(x)])


@QUICK
@given(networks(), st.randoms(use_true_random=False))
def test_permuted_samples_permute_the_kernel(built: tuple[nn.Module, Tensor, Tensor], random):
    model, x, x2 = built
    order = list(range(len(x)))
    random.shuffle(order)
    assert_close(fl.ntk(model, x[order], x2=x2), fl.ntk(model, x, x2=x2)[order])


@QUICK
@given(networks(), st.floats(0.1, 10.0))
def test_a_scaled_output_scales_the_kernel_by_the_square(built: tuple[nn.Module, Tensor, Tensor], scale: float):
    model, x, x2 = built
    assert_close(fl.ntk(model, x, x2=x2, readout=lambda out: scale * out), scale**2 * fl.ntk(model, x, x2=x2))


@QUICK
@given(networks())
def test_output_modes_agree(built: tuple[nn.Module, Tensor, Tensor]):
    model, x, x2 = built
    full = fl.ntk(model, x, x2=x2, outputs="full")
    classes = full.shape[-1]
    each = torch.einsum("pqcc->cpq", full)
    assert_close(fl.ntk(model, x, x2=x2, outputs="each"), each)
    assert_close(fl.ntk(model, x, x2=x2, outputs="sum"), each.sum(0))
    assert_close(fl.ntk(model, x, x2=x2, outputs="mean"), each.mean(0))
    assert_close(fl.ntk(model, x, x2=x2, outputs=classes - 1), each[-1])


@QUICK
@given(networks())
def test_one_small_step_moves_the_outputs_as_the_kernel_says(built: tuple[nn.Module, Tensor, Tensor]):
    """f(theta - h J^T v) - f(theta) = -h K v + O(h^2): no backward pass of the library is involved on the left."""
    model, x, _ = built
    kernel = fl.ntk(model, x, outputs="full")
    v = torch.linspace(-1, 1, kernel.shape[0] * kernel.shape[2], dtype=torch.float64).reshape(-1, kernel.shape[2])
    step = 1e-6

    def moved(sign: float) -> Tensor:
        twin = copy.deepcopy(model)
        gradients = torch.autograd.grad(twin(x), list(twin.parameters()), v)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter += sign * step * gradient
        return twin(x)

    difference = (moved(1.0) - moved(-1.0)).detach() / (2 * step)
    predicted = torch.einsum("pqcd,qd->pc", kernel, v)
    # ReLU has kinks; a step this small crosses one rarely, and then by little.
    assert float((difference - predicted).norm()) <= 1e-4 * (1e-3 + float(predicted.norm()))


def test_random_directions_are_unbiased():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact, generator = fl.ntk(model, x, outputs="sum"), torch.Generator().manual_seed(1)
    draws = torch.stack([fl.ntk(model, x, outputs=fl.Directions(3, generator)) for _ in range(200)])
    spread = draws.std(0) / len(draws) ** 0.5
    assert float(((draws.mean(0) - exact).abs() / spread).max()) < 4.5
    assert float((draws[0] - draws[1]).abs().max()) > 0
    torch.testing.assert_close(fl.ntk(model, x, outputs=fl.Directions(3)), fl.ntk(model, x, outputs=fl.Directions(3)))
