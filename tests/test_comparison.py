"""`fl.compare`: every number against the single call, and against a dense computation."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_jacobian, dense_ntk

P, C = 11, 3


def network(hidden_layers: int = 2) -> nn.Sequential:
    widths = [4, 7, *[5] * (hidden_layers - 1)]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], C)).double()


def states(hidden_layers: int = 2) -> tuple[nn.Sequential, nn.Sequential]:
    """Two states of one network, far apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = network(hidden_layers)
        after = copy.deepcopy(before)
        with torch.no_grad():
            for parameter in after.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
    return before, after


X = torch.randn(P, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(P, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
H = torch.eye(P, dtype=torch.float64) - 1 / P


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_numbers_are_those_of_the_single_calls():
    before, after = states()
    found = fl.compare(before, after, X, Y, loss="mean-half")
    kernels = [fl.ntk(model, X) for model in (before, after)]
    assert found.gap == pytest.approx(fl.linearization_gap(after, X, before.state_dict()))
    assert found.layers == pytest.approx(fl.linearization_gap(after, X, before.state_dict(), by="layer"))
    assert found.turning == pytest.approx(float(fl.metrics.kernel_distance(*kernels, centered=True)))
    assert found.growth == pytest.approx(float(kernels[1].norm() / kernels[0].norm()))
    assert found.alignment == pytest.approx([float(fl.metrics.centered_alignment(kernel, Y)) for kernel in kernels])
    assert found.loss == pytest.approx([float((model(X) - Y).square().sum()) / (2 * P) for model in (before, after)])
    grams = [fl.quantities.representation_kernels(model, X, of="output") for model in (before, after)]
    expected = {k: 1 - float(fl.metrics.kernel_distance(grams[0][k], grams[1][k], centered=True)) for k in grams[0]}
    assert found.representations == pytest.approx(expected)


def test_numbers_are_those_of_the_dense_jacobian():
    before, after = states()
    found = fl.compare(before, after, X, Y)
    kernels = [dense_ntk(model, X) for model in (before, after)]
    assert found.turning == pytest.approx(1 - cosine(H @ kernels[0] @ H, H @ kernels[1] @ H), rel=1e-9)
    assert found.growth == pytest.approx(float(kernels[1].norm() / kernels[0].norm()), rel=1e-9)
    task = H @ Y @ Y.T @ H
    assert found.alignment == pytest.approx([cosine(H @ kernel @ H, task) for kernel in kernels], rel=1e-9)
    moved = {name: p.detach() - dict(before.named_parameters())[name].detach() for name, p in after.named_parameters()}
    linear = sum(rows @ moved[name].flatten() for name, rows in dense_jacobian(before, X).items())
    change = H @ (after(X) - before(X)).detach()
    assert found.gap == pytest.approx(float((change - H @ linear).norm() / change.norm()), rel=1e-9)
    assert sum(found.layers.values()) == pytest.approx(found.gap, rel=1e-9)
    for name, similarity in found.representations.items():
        first, last = (H @ model[: int(name) + 1](X).detach() for model in (before, after))
        hsic = float((first.T @ last).square().sum() / ((first.T @ first).norm() * (last.T @ last).norm()))
        assert similarity == pytest.approx(hsic, rel=1e-9)


def test_state_dicts_modules_and_wrapped_names_are_the_same():
    before, after = states()
    expected = fl.compare(before, after, X, Y)
    wrapped = {f"module.{name}": value for name, value in before.state_dict().items()}
    for first, last, model in (
        (before.state_dict(), after.state_dict(), network()),
        (before.state_dict(), after, None),
        (before, after.state_dict(), None),
        (wrapped, after, None),
    ):
        found = fl.compare(first, last, X, Y, model=model)
        assert (found.gap, found.turning, found.alignment) == (expected.gap, expected.turning, expected.alignment)
        assert (found.layers, found.representations) == (expected.layers, expected.representations)


def test_nothing_changes():
    before, after = states()
    before.train()
    kept = [{name: value.clone() for name, value in model.state_dict().items()} for model in (before, after)]
    random = torch.get_rng_state()
    fl.compare(before, after, X, Y, loss="mse").figure()
    for model, state in zip((before, after), kept, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
    assert (before.training, after.training) == (True, True)
    assert torch.equal(torch.get_rng_state(), random)


def test_labels_are_classes_and_a_readout_chooses_outputs():
    before, after = states()
    labels = torch.arange(P) % C
    rows = nn.functional.one_hot(labels).double()
    found = fl.compare(before, after, X, labels, loss="cross-entropy")
    assert found.alignment == pytest.approx(fl.compare(before, after, X, rows).alignment)
    assert found.loss == pytest.approx([float(nn.functional.cross_entropy(m(X), labels)) for m in (before, after)])

    def first(output: Tensor) -> Tensor:
        return output[:, 0]

    column = fl.compare(before, after, X, readout=first)
    assert column.gap == pytest.approx(fl.linearization_gap(after, X, before.state_dict(), readout=first))
    assert column.alignment is None
    assert column.loss is None


@pytest.mark.parametrize("hidden_layers", [2, 14])
def test_the_text_has_at_most_15_lines(hidden_layers: int):
    found = fl.compare(*states(hidden_layers), X, Y, loss="mse")
    lines = str(found).splitlines()
    assert len(lines) <= 15
    assert lines[0].startswith(f"A linear model around the first state misses {found.gap:.0%}")
    assert all(len(line) <= 100 for line in lines)
    shown = [line.split()[0] for line in lines[5:] if line.split()[0] in found.layers]
    assert len(shown) == min(hidden_layers + 1, 8)
    parts = sorted(found.layers.values(), reverse=True)
    assert max(found.layers[name] for name in shown) == parts[0]


def test_the_figure_has_a_bar_for_each_layer():
    figure = fl.compare(*states(), X).figure()
    assert isinstance(figure, Figure)
    assert [len(axes.patches) for axes in figure.axes] == [3, 3]


def test_equal_states_have_learned_nothing():
    before, _ = states()
    found = fl.compare(before, copy.deepcopy(before), X)
    assert found.turning == pytest.approx(0.0, abs=1e-12)
    assert found.growth == pytest.approx(1.0)
    assert str(found).startswith("The outputs did not change")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"before": "step0.pt"}, "before is str, expected a torch.nn.Module or a state dict"),
        ({"before": network().state_dict(), "after": network().state_dict()}, "pass model="),
        ({"loss": "mse"}, "without y"),
        ({"loss": "msee", "y": Y}, "did you mean 'mse'"),
        ({"before": {"weight": torch.ones(2)}}, "does not fit the model"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, Any], message: str):
    before, after = states()
    given: dict[str, Any] = {"before": before, "after": after, "x": X, **arguments}
    with pytest.raises(fl.FeatlearnError, match=message):
        fl.compare(**given)


def test_a_state_that_moved_along_is_refused():
    _, after = states()
    moved = after.state_dict()
    for first, last in ((moved, after), (after, moved), (moved, moved), (after, after)):
        with pytest.raises(fl.FeatlearnError, match="before shares its memory with after: it has moved along with it"):
            fl.compare(first, last, X, model=network())
    before, _ = states()
    assert fl.compare(before.state_dict(), moved, X, model=after).gap > 0


def test_layers_without_a_sample_axis_have_no_similarity():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.stack([self.inner(sample).tanh() for sample in x]))

    torch.manual_seed(0)
    before, after, x = Loop().double(), Loop().double(), torch.randn(7, 5, dtype=torch.float64)
    found = fl.compare(before, after, x)
    outputs = [network(x).detach() for network in (before, after)]
    grams = [f @ f.T for f in outputs]
    expected = 1 - float(fl.metrics.kernel_distance(*grams, centered=True))
    assert math.isnan(found.representations["inner"])
    assert found.representations["head"] == pytest.approx(expected)
    assert found.gap == fl.linearization_gap(after, x, before.state_dict())
    assert "nan" in str(found)
