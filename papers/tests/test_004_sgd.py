"""004/sgd: descent by hand against automatic gradients, and claims that must fail on made-up numbers."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import noise, sgd

LINE = noise.LineSetup(width=7, samples=11, directions=3, lr=0.03, steps=40, growth=1.5)


def test_steps_are_those_of_torch_on_the_mean_and_on_single_samples(tmp_path):
    context = Context(seed=2, folder=tmp_path)
    numbers = noise.measure_line(LINE, context)
    generator = context.generator()
    a, error = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    y = 2 * a + error
    starts, firsts, off = noise.started(LINE, generator)
    order = torch.randint(11, (41,), generator=context.generator(1))
    for method in (0, 1):
        for i in range(len(noise.STARTS) - 1):
            u, w = (part[i].clone().requires_grad_() for part in (starts, firsts))
            optimizer = torch.optim.SGD([u, w], lr=LINE.lr)
            for step in range(40):
                rows = slice(None) if method == 0 else order[step : step + 1]
                optimizer.zero_grad()
                (u @ w / 7**0.5 * a[rows] - y[rows]).square().mean().backward()
                optimizer.step()
            u, w = u.detach(), w.detach()
            assert float(numbers["alignment"][method, i, -1]) == pytest.approx(float(u @ w / (u.norm() * w.norm())))
            assert float(numbers["off"][method, i, -1]) == pytest.approx(float((u @ off / 7**0.5).square().mean()))
            loss = (u @ w / 7**0.5 * a - y).square().mean()
            assert float(numbers["loss"][method, i, -1]) == pytest.approx(float(loss))
            balance = (u.square() - w.square()).norm() / (starts[i].square() - firsts[i].square()).norm()
            assert float(numbers["product"][method, i, -1]) == pytest.approx(float(balance))


def test_p_q_falls_by_the_squares_of_the_steps_and_the_saddle_is_kept(tmp_path):
    numbers = noise.measure_line(LINE, Context(seed=2, folder=tmp_path))
    fall = -torch.log(numbers["product"][1, :4, -1]) / numbers["spent"][1, :4, -1]
    assert fall[1].item() == pytest.approx(1, abs=0.1)  # log(1 - c^2) for small c
    assert torch.allclose(numbers["alignment"][:, 4], torch.tensor(-1.0, dtype=torch.float64), atol=1e-12)


def test_slow_steps_follow_the_exact_solution(tmp_path):
    slow = noise.LineSetup(width=7, samples=11, lr=1e-4, steps=4000, growth=1.5)
    numbers = noise.measure_line(slow, Context(seed=2, folder=tmp_path))
    assert torch.allclose(numbers["alignment"][0, :4], numbers["theory"], atol=2e-3)


def test_alignment_of_networks_is_the_norm_of_the_product(tmp_path):
    numbers = noise.measure_images(
        noise.ImageSetup(data="digits", samples=20, test_samples=10, pooling=1, width=6, batch=5, steps=8, checks=2),
        Context(seed=0, folder=tmp_path),
    )
    assert numbers["test"].shape == (2, 4)
    assert numbers["start"][0] == pytest.approx(numbers["start"][1])
    assert numbers["start"][0] == pytest.approx(numbers["start"][0][0], rel=1e-4)  # scales do not matter
    assert (numbers["alignment"] != numbers["start"]).all()


def made_up():
    setup = noise.LineSetup(steps=100)
    rate = 4 * setup.lr**2 / setup.width
    zeta = numpy.zeros((2, 5, 4))
    zeta[0, :4, -1], zeta[1, :4, -1], zeta[:, 4] = [0.9, 0.1, 0.8, 0.8], 0.97, -1.0
    spent = numpy.zeros((2, 5, 4))
    spent[1, 1] = [0, 20 * rate, 60 * rate, 100 * rate]
    line = {
        "steps": numpy.array([0, 20, 60, 100]),
        "alignment": zeta,
        "theory": zeta[0, :4].copy(),
        "spent": spent,
        "product": numpy.exp(-spent),
        "loss": numpy.tile([9.0, 1.5, 1.0, 1.0], (2, 5, 1)),
        "off": numpy.concatenate([numpy.ones((1, 5, 4)), numpy.full((1, 5, 4), 0.9)]),
    }
    line["off"][1, 1] = 0.3
    images = {
        "test": numpy.array([[0.9, 0.9, 0.9, 0.8], [0.9, 0.9, 0.9, 0.82]]),
        "alignment": numpy.array([[1.0, 1, 1, 1], [1, 1, 1, 1.2]]),
    }
    return {"line": setup, "images": noise.ImageSetup()}, line, images


def verdict(name=None, where=None, value=None, part="line"):
    setups, line, images = made_up()
    if name is not None:
        {"line": line, "images": images}[part][name][where] = value
    runs = {"line": Runs([0], [line]), "images": Runs([0], [images])}
    return [claim.id for claim in sgd.claims(setups, runs) if not claim.holds]


def test_claims_fail_on_numbers_that_break_them():
    assert verdict() == []
    assert verdict("theory", (2, -1), 0.7) == ["theory"]
    assert verdict("alignment", (1, 1, -1), 0.85) == ["aligned", "independent"]
    assert "depends" in verdict("alignment", (0, 1, -1), 0.75)
    assert verdict("spent", (1, 1, -1), 1e-2) == ["law", "rate"]
    assert verdict("alignment", (1, 4, 1), -0.5) == ["saddle"]
    assert verdict("loss", (0, 3, [1, 2]), 9.0) == ["no-faster"]
    assert verdict("off", (1, 1), 0.8) == ["poor-start"]
    assert verdict("off", (1, 0), 0.1) == ["most-significant"]
    assert verdict("test", (1, 3), 0.803, "images") == ["images-poor"]
    assert verdict("test", (1, 1), 0.95, "images") == ["images-most"]
    assert verdict("alignment", (1, 3), 1.0, "images") == ["images-aligned"]
