"""000 Fig. 1: its numbers against dense Jacobians in double, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import scipy.linalg
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import acceleration, fig1, mnist

SETUP = mnist.Setup(data="digits", samples=12, test_samples=7, width=9, lr=10.0, steps=12, growth=1.5, few=5)
SIZE = 120


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    found = mnist.measure(SETUP, Context(seed=1, folder=tmp_path_factory.mktemp("seed")))
    return {name: as_array(values, name) for name, values in found.items()}


@pytest.fixture(scope="module")
def given():
    return mnist.task(SETUP, Context(seed=1, folder=None))


def plain(given, name):
    """The same training without the library: outputs (T, P C) and whole kernels (T, P C, P C), in double."""
    generator = Context(seed=1, folder=None).generator(2)
    weights = [torch.randn(shape, generator=generator).double() for shape in ((9, 64), (9, 9), (10, 9))]
    scales = [(1 / 64) ** 0.5, (2 / 9) ** 0.5, (1 / 9) ** 0.5]
    x, y = given.x.double(), given.y.double()

    def network(first, second, readout):
        hidden = ((x * scales[0]) @ first.T).relu()
        return ((((hidden * scales[1]) @ second.T).relu() * scales[2]) @ readout.T).flatten()

    moments, kernels = [], []
    for step in range(SETUP.steps + 1):
        jacobian = torch.cat([j.flatten(1) for j in torch.func.jacrev(network, (0, 1, 2))(*weights)], 1)
        f = network(*weights)
        if step in SETUP.moments:
            moments.append(f)
            kernels.append(jacobian @ jacobian.T)
        if name == "mse":
            pull = 10.0 * 2 * (f - y.flatten()) / y.numel()
        else:
            pull = 10.0 * 2 / 120 * (f.view(12, 10).softmax(1) - y).flatten()
        change = jacobian.T @ pull
        parts = change.split([w.numel() for w in weights])
        weights = [w - part.view_as(w) for w, part in zip(weights, parts, strict=True)]
    return torch.stack(moments).numpy(), torch.stack(kernels).numpy()


def mean_kernel(kernel):
    """Over outputs, (P, P)."""
    return numpy.einsum("icjc->ij", kernel.reshape(12, 10, 12, 10)) / 10


def test_the_moments_grow_and_end_with_the_last_step():
    assert SETUP.moments == [0, 1, 2, 3, 4, 6, 9, 12]
    assert mnist.Setup().window == (10, 300)


@pytest.mark.parametrize("name", ["mse", "ce"])
def test_curves_are_those_of_plain_training(numbers, given, name):
    f, kernels = plain(given, name)
    Y = given.y.double().numpy()
    assert numbers[f"{name}/loss"] == pytest.approx(((f - Y.flatten()) ** 2).mean(1), rel=1e-4)
    logits = f.reshape(-1, 12, 10)
    entropy = -(Y * (logits - scipy.special.logsumexp(logits, axis=2, keepdims=True))).sum(2).mean(1)
    assert numbers[f"{name}/cross_entropy"] == pytest.approx(entropy, rel=1e-4)
    H = numpy.eye(12) - 1 / 12
    for i, kernel in enumerate(kernels):
        K, own = mean_kernel(kernel), kernel.reshape(12, 10, 12, 10)[:, 3, :, 3]
        assert numbers[f"{name}/norm"][i] == pytest.approx(numpy.linalg.norm(K), rel=1e-4)
        task = Y @ Y.T
        aligned = (K * task).sum() / numpy.linalg.norm(K) / numpy.linalg.norm(task)
        assert numbers[f"{name}/alignment"][i] == pytest.approx(aligned, rel=1e-4)
        for target in numpy.flatnonzero(Y.any(0)):  # not every class is among so few
            y = Y[:, target]
            expected = y @ own @ y / numpy.linalg.norm(own) / (y @ y)
            assert numbers[f"{name}/classes"][i, 0, 3, target] == pytest.approx(expected, rel=1e-3)
            expected = y @ H @ own @ H @ y / numpy.linalg.norm(H @ own @ H) / (y @ H @ y)
            assert numbers[f"{name}/centered_classes"][i, 0, 3, target] == pytest.approx(expected, rel=1e-3)
        squares = (kernel.reshape(12, 10, 12, 10)[:5, :, :5] ** 2).sum((0, 2))
        assert numbers[f"{name}/interference"][i] == pytest.approx(1 - numpy.trace(squares) / squares.sum(), rel=1e-3)


def test_frozen_kernels_are_exponentials_of_the_whole_kernel(numbers, given):
    f, kernels = plain(given, "mse")
    y, rate, steps = given.y.double().flatten().numpy(), 2 * 10.0 / SIZE, numpy.array(SETUP.moments)
    first, last = mean_kernel(kernels[0]), mean_kernel(kernels[-1])
    faster = numpy.linalg.norm(last) / numpy.linalg.norm(first)

    def run(kernel, time, start):
        return y + scipy.linalg.expm(-rate * time * kernel) @ (start - y)

    for name, speed in (("kgd", 1.0), ("akgd", faster)):
        whole = [((run(kernels[0], speed * t, f[0]) - y) ** 2).mean() for t in steps]
        assert numbers[f"mse/{name}"] == pytest.approx(whole, rel=1e-4)
        # one kernel for all outputs; rows of f are samples
        shared = numpy.kron(first, numpy.eye(10))
        mean = [((run(shared, speed * t, f[0]) - y) ** 2).mean() for t in steps]
        assert numbers[f"mse/mean_{name}"] == pytest.approx(mean, rel=1e-4)
    for name, kernel in (("early_error", kernels[0]), ("late_error", kernels[-1])):
        errors = [
            abs(numpy.log(((run(kernel, steps[-1] - t, now) - y) ** 2).sum() / ((f[-1] - y) ** 2).sum()))
            for t, now in zip(steps[:-1], f[:-1], strict=True)
        ]
        assert numbers[f"mse/{name}"] == pytest.approx(errors, rel=5e-3)
    start = f[0].reshape(12, 10)
    for _ in range(SETUP.steps):  # cross-entropy, step by step
        pull = scipy.special.softmax(start, 1) - given.y.double().numpy()
        start = start - rate * (kernels[0] @ pull.flatten()).reshape(12, 10)
    logs = start - scipy.special.logsumexp(start, axis=1, keepdims=True)
    assert numbers["ce/kgd"][-1] == pytest.approx(-(given.y.numpy() * logs).sum(1).mean(), rel=1e-4)


def test_parity_is_one_output_on_squared_error(tmp_path):
    """Plain descent with one output; loss averaged over samples alone."""
    setup = replace(SETUP, labels="parity", lr=1.0)
    context = Context(seed=1, folder=tmp_path)
    found = {name: as_array(values, name) for name, values in mnist.measure(setup, context).items()}
    labels = context.dataset("digits", samples=12, generator=context.generator(0)).labels
    given = mnist.task(setup, context)
    assert given.y[:, 0].tolist() == [1.0 if label % 2 else -1.0 for label in labels]
    assert not any(name.startswith("ce/") for name in found)
    assert found["mse/classes"].shape == (8, 3, 1, 1)
    assert found["mse/classes"][:, 0, 0, 0] == pytest.approx(found["mse/alignment"], rel=1e-5)
    generator = Context(seed=1, folder=None).generator(2)
    weights = [torch.randn(shape, generator=generator).double() for shape in ((9, 64), (9, 9), (1, 9))]
    x, y, losses = given.x.double(), given.y.double(), []
    for _ in range(setup.steps + 1):
        for weight in weights:
            weight.requires_grad_()
        hidden = ((x @ weights[0].T / 8).relu() @ weights[1].T * (2 / 9) ** 0.5).relu()
        loss = (hidden @ weights[2].T / 3 - y).square().sum() / 12
        losses.append(loss.item())
        weights = [w.detach() - g for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)]
    assert found["mse/loss"] == pytest.approx([losses[step] for step in setup.moments], rel=1e-4)


def test_the_network_is_that_of_the_paper():
    model = MLP(784, 10, width=mnist.Setup().width, hidden_layers=2)
    assert [tuple(p.shape) for p in model.parameters()] == [(500, 784), (500, 500), (10, 500)]
    rate = fl.dynamics.rate(mnist.Setup().lr, "mean-over-outputs", 1000, 10)
    assert rate == pytest.approx(20 * 2 / 10_000)  # the loss is averaged over the batch and the ten classes


def made_up(**changes):
    """A run in which all claims hold."""
    steps = numpy.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
    late = numpy.concatenate([numpy.linspace(1.0, 0.5, 5), [0.05] * 4])
    rise = numpy.array([0.0, 0.1, 0.3, 0.6, 0.85, 0.97, 1.0, 1.0, 1.0, 1.0])
    loss = numpy.array([1.0, 1.0, 0.9, 0.7, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125])
    k = numpy.arange(1.0, 121)
    channel = numpy.zeros((10, 3, 10, 10))  # moments, parts, kernels, targets
    channel[:, 0, 3] = 0.1 + numpy.outer(rise, numpy.where(numpy.arange(10) == 3, 0.2, 0.02))
    found = {
        "steps": steps,
        "loss": loss,
        "akgd": loss**0.5,
        "kgd": loss**0.25,
        "mean_akgd": loss**0.5,
        "alignment": 0.3 + 0.1 * rise,
        "norm": 2 + rise - numpy.where(steps == 2, 0.5, 0),
        "classes": channel,
        "centered_classes": channel,
        "late_error": late,
        "eigenvalues": k ** -(1.2 - 0.2 * rise[:, None]),
        "task_power": k ** -(1.0 + 0.4 * rise[:, None]),
        "test/alignment": 0.3 + 0.05 * rise,
        "interference": 0.1,
    }
    numbers = {f"mse/{name}": value for name, value in found.items()}
    numbers |= {
        "ce/alignment": 0.3 + 0.1 * rise,
        "ce/cross_entropy": loss,
        "ce/kgd": loss**0.5,
        "ce/interference": 0.2 + rise,
    }
    numbers["mse/interference"] = 0.1 + 0 * rise
    return Runs([0], [{name: numpy.asarray(value) for name, value in (numbers | changes).items()}])


def failing(**changes):
    setup = mnist.Setup(samples=120)
    return {claim.id for claim in fig1.claims(setup, made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == set()


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"mse/akgd": lambda v: v**3}, {"network-faster"}),
        ({"mse/kgd": lambda v: v**4}, {"rescaled-faster"}),
        ({"mse/mean_akgd": lambda v: v**3}, {"network-faster-mean"}),
        ({"mse/alignment": lambda v: v[::-1]}, {"alignment-rises"}),
        ({"mse/alignment": lambda v: numpy.linspace(0.3, 0.4, 10) ** 9}, {"asymptote"}),
        ({"mse/norm": lambda v: v[::-1]}, {"norm-rises"}),
        ({"mse/norm": lambda v: numpy.sort(v)}, {"norm-falls-too"}),
        (
            {"mse/eigenvalues": lambda v: numpy.where(numpy.arange(120) < 20, 1.0, 1e-4) + 0 * v},
            {"eigenvalues-power-law"},
        ),
        ({"mse/eigenvalues": lambda v: v[::-1]}, {"eigenvalue-exponent"}),
        ({"mse/task_power": lambda v: v[::-1]}, {"task-exponent"}),
        ({"mse/classes": lambda v: v[..., [3, 1, 2, 0, 4, 5, 6, 7, 8, 9]]}, {"own-class", "own-class-only"}),
        ({"mse/classes": lambda v: v[..., [3] * 10]}, {"own-class-only"}),
        ({"mse/late_error": lambda v: v[::-1]}, {"late-kernel"}),
        ({"mse/loss": lambda v: numpy.r_[v[:6], 0.1, 0.09, 0.01, 0.009]}, {"power-law-late"}),
        ({"mse/centered_classes": lambda v: v[..., [3, 1, 2, 0, 4, 5, 6, 7, 8, 9]]}, {"own-class-centered"}),
        ({"mse/kgd": lambda v: v**4}, {"network-faster-than-first"}),
        ({"mse/loss": lambda v: v**0.1}, {"network-faster", "network-faster-mean"}),
        ({"mse/test/alignment": lambda v: v[::-1]}, {"test-kernel"}),
        ({"ce/alignment": lambda v: v[::-1]}, {"cross-entropy-aligns"}),
        ({"ce/kgd": lambda v: v**4}, {"cross-entropy-faster"}),
        ({"ce/interference": lambda v: 0.05 + 0 * v}, {"interference"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(change, broken):
    runs = made_up()
    assert broken <= failing(**{name: act(runs[name][0]) for name, act in change.items()})


def test_the_exponent_must_grow_while_the_kernel_turns():
    steps = made_up()["mse/steps"][0]
    power = numpy.where(steps > 0, 1.0 / numpy.maximum(steps, 1), 2.0)
    slowing = numpy.where(steps > 0, numpy.exp(-numpy.sqrt(numpy.log1p(steps)) * 2), 2.0)
    assert "power-law-late" not in failing(**{"mse/loss": power})
    assert "faster-than-power-law" in failing(**{"mse/loss": slowing})


def test_the_time_from_which_the_last_kernel_predicts_is_the_last_crossing():
    errors = numpy.array([0.05, 0.2, 0.05, 0.3, 0.05, 0.05, 0.01, 0.01, 0.01])
    assert acceleration.settled(made_up(**{"mse/late_error": errors}))[0] == pytest.approx(8 / 256)
    assert acceleration.settled(made_up(**{"mse/late_error": errors * 0}))[0] == 0.0
    assert acceleration.settled(made_up(**{"mse/late_error": errors + 1}))[0] == 1.0


def test_exponents_after_fewer_steps_are_the_other_choice():
    claims = {claim.id: claim for claim in fig1.claims(mnist.Setup(samples=120), made_up())}
    told = claims["task-exponent"].details()["choices"]
    # a tenth of 256 steps is nearest to step 32, a third to 64; both have the whole rise of the made-up run
    assert [one["measured"] for one in told] == pytest.approx([0.4, 0.4, 0.4])
    runs = made_up(**{"mse/task_power": made_up()["mse/task_power"][0][[0, 0, 0, 0, 0, 0, 0, 0, 0, 9]]})
    claims = {claim.id: claim for claim in fig1.claims(mnist.Setup(samples=120), runs)}
    assert [one["measured"] for one in claims["task-exponent"].details()["choices"]] == pytest.approx([0, 0, 0.4])


@pytest.mark.parametrize("name", ["mse", "ce"])
def test_class_alignments_of_the_parts_are_those_of_their_jacobians(numbers, given, name):
    """The readout's part is the Gram matrix of the last features, equal for all outputs; both parts make the kernel."""
    generator = Context(seed=1, folder=None).generator(2)
    weights = [torch.randn(shape, generator=generator).double() for shape in ((9, 64), (9, 9), (10, 9))]
    hidden = given.x.double() / 8
    hidden = (((hidden @ weights[0].T).relu() * (2 / 9) ** 0.5) @ weights[1].T).relu() / 3
    K, Y = (hidden @ hidden.T).numpy(), given.y.double().numpy()
    _, kernels = plain(given, name)
    own = kernels[0].reshape(12, 10, 12, 10)[:, 7, :, 7] - K
    for target in numpy.flatnonzero(Y.any(0)):
        y = Y[:, target]
        expected = [y @ part @ y / numpy.linalg.norm(part) / (y @ y) for part in (K, own)]
        assert numbers[f"{name}/classes"][0, 1:, 7, target] == pytest.approx(expected, rel=1e-3)
