"""004 Fig. 3: crops against pixels moved one by one, norms, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn.models import ResNet18
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import fig3
from papers.tests.verdicts import failing

SETUP = fig3.Setup(sigmas=(0.3, 1.0, 3.0), samples=500, epochs=2)


def test_crops_are_moved_and_mirrored_images():
    x = torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = list(fig3.crops(x, 3, 2, torch.Generator().manual_seed(1)))
    assert [len(rows) for rows, _ in found] == [3, 3, 1]
    rows, cropped = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert sorted(rows.tolist()) == list(range(7))
    seen = set()
    for row, image in zip(rows.tolist(), cropped, strict=True):
        fits = [
            (down, right, mirror)
            for down in range(5)
            for right in range(5)
            for mirror in (False, True)
            if torch.equal(image, moved(x[row], down - 2, right - 2, mirror))
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) > 4
    assert {mirror for *_, mirror in seen} == {False, True}
    assert found[0][1].is_contiguous(memory_format=torch.channels_last)


def moved(image, down, right, mirror):
    """Pixel by pixel, zero outside."""
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for line in range(height):
        for column in range(width):
            to = width - 1 - column if mirror else column
            if 0 <= line + down < height and 0 <= column + right < width:
                result[:, line, to] = image[:, line + down, column + right]
    return result


def test_the_norm_is_the_sum_over_layers_and_the_scale_multiplies_it():
    model = ResNet18(10, width=2, bias=True, generator=torch.Generator().manual_seed(0))
    weights = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    expected = sum(numpy.linalg.norm(weight.detach().numpy().ravel()) for weight in weights)
    assert fig3.weight_norm(model) == pytest.approx(expected, rel=1e-6)


def test_networks_of_all_scales_come_from_the_same_draw(tmp_path):
    setup = fig3.Setup(
        data="digits", samples=40, test_samples=20, width=2, sigmas=(1.0, 3.0), batch=16, padding=1, epochs=2
    )
    numbers = fig3.measure(setup, Context(seed=0, folder=tmp_path))
    assert numbers["test"].shape == (2, 2)
    assert numbers["initial_norm"][1] == pytest.approx(3 * numbers["initial_norm"][0], rel=1e-5)


def test_accuracy_is_measured_with_running_statistics_and_leaves_the_mode():
    model = ResNet18(10, width=2, generator=torch.Generator().manual_seed(0)).train()
    x, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    found = fig3.accuracy(model, x, labels)
    assert model.training
    one_by_one = [int(model.eval()(x[i : i + 1]).argmax()) == i for i in range(6)]
    assert found == pytest.approx(numpy.mean(one_by_one))


def test_weight_decay_alone_shrinks_as_said():
    """The recipe's 200 epochs, step by step."""
    setup = fig3.Setup(epochs=200)
    weight = 1.0
    for epoch in range(200):
        rate = 0.1 * (1 + numpy.cos(numpy.pi * epoch / 200)) / 2
        weight *= (1 - rate * 5e-4) ** 391
    assert fig3.shrinkage(setup) == pytest.approx(weight, rel=0.01)
    assert round(weight, 2) == 0.14


def test_claims_fail_on_numbers_that_break_them():
    good = {
        "test": numpy.array([[0.6, 0.9], [0.5, 0.88], [0.4, 0.8]]),
        "train": numpy.ones(3),
        "norm": numpy.array([1.0, 1.5, 2.0]),
        "alignment": numpy.array([1.3, 1.2, 1.1]),
    }

    def verdict(**changes):
        return failing(fig3, SETUP, Runs([0], [good | {name: numpy.array(value) for name, value in changes.items()}]))

    assert verdict() == []
    assert verdict(test=[[0.6, 0.9], [0.5, 0.7], [0.4, 0.8]]) == ["falls"]
    assert verdict(test=[[0.6, 0.6], [0.5, 0.9], [0.4, 0.8]]) == ["correlates"]
    assert verdict(train=[1.0, 1.0, 0.98]) == ["train"]
    assert verdict(norm=[1.0, 2.5, 2.0]) == ["norm"]
    assert verdict(norm=[1.0, 3.0, 9.9]) == ["forgets"]
    assert verdict(alignment=[1.3, 1.0, 1.1]) == ["misaligned"]
    risen = good | {"test": numpy.array([[0.6, 0.7], [0.5, 0.9], [0.4, 0.8]])}
    shown = {one.id: one for one in fig3.claims(SETUP, Runs([0], [risen]))}
    (every,) = shown["falls"].details()["choices"]
    assert (shown["falls"].verdict, every["verdict"]) == ("depends", "fails")


def test_a_few_epochs_of_the_whole_recipe_judge_no_trained_network():
    setup = fig3.Setup(sigmas=(0.3, 1.0, 3.0), epochs=6)
    numbers = {
        "test": numpy.linspace(0.9, 0.5, 18).reshape(3, 6),
        "train": numpy.linspace(0.9, 0.5, 3),
        "norm": numpy.arange(1.0, 4.0),
        "alignment": numpy.linspace(0.9, 0.5, 3),
    }
    shown = {claim.id: claim for claim in fig3.claims(setup, Runs([0], [numbers]))}
    assert [id for id, claim in shown.items() if claim.verdict == "not judged"] == [
        "correlates",
        "falls",
        "train",
        "misaligned",
    ]
    assert shown["norm"].check
