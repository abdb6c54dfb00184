"""001 Fig. 1: its experiments, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import mnist
from featlearn_papers.paper_001 import fig1, odd_even

SETUP = mnist.Setup(
    data="digits", labels="parity", samples=9, test_samples=5, width=6, lr=0.5, steps=4, growth=2.0, few=3
)


def test_odd_digits_are_one_and_even_ones_minus_one():
    given = mnist.task(SETUP, Context(seed=0, folder=None))
    digits = fl.data.digits("train")
    for x, y in zip(given.x, given.y[:, 0], strict=True):
        (place,) = torch.where((digits.x == x).all(1))[0][:1]
        assert float(y) == (1 if int(digits.labels[place]) % 2 else -1)


def test_losses_and_stability_are_those_of_plain_descent(tmp_path):
    context = Context(seed=0, folder=tmp_path)
    numbers = {name: as_array(value, name) for name, value in odd_even.ODD_EVEN.measure(SETUP, context).items()}
    given = mnist.task(SETUP, context)
    x, y = given.x.double(), given.y.double()
    model = MLP(
        64, 1, width=6, parametrization="ntk", weight_variance=(1.0, 2.0, 1.0), generator=context.generator(2)
    ).double()
    losses, kernels = [], []
    for _ in range(SETUP.steps + 1):
        rows = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(f, tuple(model.parameters()))])
                for f in (model(one[None])[0, 0] for one in x)
            ]
        )
        kernels.append((rows @ rows.T).numpy())
        residual = (model(x) - y).detach()[:, 0]
        losses.append(float(residual.square().mean()))
        change = -SETUP.lr * 2 / SETUP.samples * rows.T @ residual
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(model.parameters()).detach() + change, model.parameters()
        )
    measured = [0, 1, 2, 4]
    assert list(numbers["mse/steps"]) == measured
    assert numbers["mse/loss"] == pytest.approx([losses[step] for step in measured], rel=1e-4)
    # started at f0, flow in the eigenvectors of the first kernel
    values, vectors = numpy.linalg.eigh(kernels[0])
    rate, start = 2 * SETUP.lr / SETUP.samples, None
    with torch.no_grad():
        fresh = MLP(
            64, 1, width=6, parametrization="ntk", weight_variance=(1.0, 2.0, 1.0), generator=context.generator(2)
        ).double()
        start = vectors.T @ (fresh(x) - y)[:, 0].numpy()
    frozen = [((numpy.exp(-rate * values * step) * start) ** 2).mean() for step in measured]
    assert numbers["mse/kgd"] == pytest.approx(frozen, rel=1e-4)
    stability = fig1.first_stability(Runs([0], [numbers]))
    assert stability[0] == pytest.approx(rate * values[-1], rel=1e-4)


def test_the_three_experiments_differ_in_the_learning_rate_alone():
    for scale in Scale:
        setups = [
            vars(one.size(scale).setup)
            for one in (odd_even.ODD_EVEN_SLOW, odd_even.ODD_EVEN, odd_even.ODD_EVEN_PRINTED)
        ]
        rates = [setup["lr"] for setup in setups]
        assert numpy.array(rates) == pytest.approx(rates[0] * numpy.array([1, 5, 10]))
        assert all({**setup, "lr": 0} == {**setups[0], "lr": 0} for setup in setups)


def made_up(**changes):
    """Runs in which all claims hold."""
    steps = numpy.array([0, 1, 3, 10, 30, 100, 300, 1000])
    time = steps / 100
    rise = 1 - numpy.exp(-3 * time)
    norm = 1 + 0.5 * rise - 0.1 * (steps == 1)
    ours = {
        "mse/steps": steps,
        "mse/loss": numpy.exp(-3 * time),
        "mse/kgd": numpy.exp(-time),
        "mse/akgd": numpy.exp(-1.5 * time),
        "mse/norm": norm,
        "mse/alignment": 0.1 + 0.1 * rise,
        "mse/test/alignment": 0.1 + 0.05 * rise,
        "mse/eigenvalues": numpy.outer(norm, [3.0, 1.0]),
        "mse/stability": numpy.array(1.5),
        "ce/steps": steps,
        "ce/cross_entropy": numpy.exp(-2 * time),
        "ce/kgd": numpy.exp(-time),
        "ce/alignment": 0.1 + 0.1 * rise,
    }
    names = ("parity", "printed", "slow", "classes")
    return {name: Runs([0], [ours | changes.get(name, {})]) for name in names}


def failing(**changes):
    setups = {"parity": mnist.Setup(lr=10.0), "printed": mnist.Setup(), "slow": mnist.Setup(lr=2.0)}
    return {claim.id for claim in fig1.claims(setups, made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == set()


@pytest.mark.parametrize("coding", ["parity", "classes"])
@pytest.mark.parametrize(
    ("name", "act", "broken"),
    [
        ("mse/loss", lambda v: v**0.4, {"faster-rescaled"}),
        ("mse/loss", lambda v: v**0.3, {"faster", "faster-rescaled"}),
        ("mse/norm", lambda v: v[::-1], {"norm"}),
        ("mse/norm", lambda v: numpy.sort(v), {"norm-falls"}),
        ("mse/alignment", lambda v: v**0.1, {"aligns"}),
        ("mse/alignment", lambda v: numpy.linspace(0.1, 0.2, len(v)) + 0.1 * (v == v[-1]), {"asymptote"}),
        ("mse/test/alignment", lambda v: v[::-1], {"test-kernel"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(coding, name, act, broken):
    values = made_up()[coding][name][0]
    found = failing(**{coding: {name: act(values)}})
    assert {f"{coding}-{id}" for id in broken} <= found
    assert all(id.startswith(coding) for id in found)


def test_claims_on_cross_entropy_and_stability_can_fail():
    slow = made_up()["classes"]["ce/kgd"][0] ** 0.5
    assert failing(classes={"ce/cross_entropy": slow}) == {"cross-entropy-faster"}
    assert failing(classes={"ce/alignment": slow}) == {"cross-entropy-aligns"}
    assert failing(parity={"mse/stability": numpy.array(3.5)}) == {"starts-stable"}


def test_other_learning_rates_stand_beside_the_verdict():
    setups = {"parity": mnist.Setup(lr=10.0), "printed": mnist.Setup(), "slow": mnist.Setup(lr=2.0)}
    runs = made_up(slow={"mse/loss": made_up()["slow"]["mse/loss"][0] ** 0.4})
    (claim,) = (one for one in fig1.claims(setups, runs) if one.id == "parity-faster-rescaled")
    assert claim.holds
    verdicts = [choice["verdict"] for choice in claim.details()["choices"]]
    assert verdicts == ["holds", "fails"]
    assert [choice.other for choice in claim.choices] == ["20", "2"]
