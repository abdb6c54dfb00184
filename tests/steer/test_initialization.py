"""The scale of the first weights."""

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.steer import scale_init


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 4, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_it_multiplies_weights_and_leaves_biases_and_gains():
    model = network()
    before = state(model)
    assert scale_init(model, 0.25) is model
    for name, p in model.named_parameters():
        factor = 0.25 if name in ("0.weight", "4.weight", "6.weight") else 1.0
        torch.testing.assert_close(p, factor * before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layers", "changed"),
    [
        ("0", {"0.weight"}),
        (["0", "6"], {"0.weight", "6.weight"}),
        ("*.bias", {"0.bias", "2.bias", "4.bias", "6.bias"}),
        (["4", "4.bias"], {"4.weight", "4.bias"}),
        ("2.weight", {"2.weight"}),
    ],
)
def test_layers_are_chosen_by_globs(layers, changed):
    model = network()
    torch.nn.init.normal_(model[2].bias)
    before = state(model)
    scale_init(model, 3.0, layers)
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == changed


def test_a_homogeneous_network_scales_by_its_degree():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 9, bias=False), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.LeakyReLU(), nn.Linear(7, 2, bias=False)
    ).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    before = model(x).detach()
    torch.testing.assert_close(scale_init(model, 0.3)(x), 0.3**3 * before, rtol=1e-12, atol=0)


def test_redrawn_weights_have_the_variance_of_their_fan_in():
    generator = torch.Generator().manual_seed(3)
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(400, 300),
            "conv": nn.Conv2d(60, 80, 5, groups=2),
            "up": nn.ConvTranspose1d(90, 70, 6),
            "embedding": nn.Embedding(300, 200),
        }
    )
    biases = [model["linear"].bias.detach().clone(), model["conv"].bias.detach().clone()]
    scale_init(model, 0.7, redraw=True, generator=generator)
    for name, inputs in {"linear": 400, "conv": 30 * 25, "up": 90 * 6, "embedding": 1}.items():
        weight = model[name].weight.detach().double()
        wanted = 0.49 / inputs
        # the variance of n normal numbers has the relative error sqrt(2 / n)
        assert abs(float(weight.var()) / wanted - 1) < 4 * (2 / weight.numel()) ** 0.5
        assert abs(float(weight.mean())) < 4 * (wanted / weight.numel()) ** 0.5
    assert torch.equal(biases[0], model["linear"].bias)
    assert torch.equal(biases[1], model["conv"].bias)
    first = model["linear"].weight.detach().clone()
    scale_init(model, 0.7, redraw=True, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, model["linear"].weight)


def test_tied_weights_are_changed_once_and_frozen_ones_not_at_all():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"].weight.requires_grad_(False)
    before = state(model)
    scale_init(model, 2.0)
    torch.testing.assert_close(model["a"].weight, 2 * before["a.weight"])
    torch.testing.assert_close(model["c"].weight, before["c.weight"], rtol=0, atol=0)


def test_what_cannot_be_scaled_is_refused():
    with pytest.raises(fl.errors.InputValueError, match=r"'nothing' chooses no trainable weight.* 0, 2, 4, 6"):
        scale_init(network(), 2.0, ["0", "nothing"])
    with pytest.raises(fl.errors.InputValueError, match="sigma=0"):
        scale_init(network(), 0)
    with pytest.raises(fl.errors.InputValueError, match="no trainable weight"):
        scale_init(nn.BatchNorm1d(3), 2.0)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    with pytest.raises(fl.errors.InputValueError, match="computed from"):
        scale_init(normed, 2.0)
    scale_init(normed, 2.0, "1")
