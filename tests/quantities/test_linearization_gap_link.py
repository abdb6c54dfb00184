"""The gap through the output function: generalized linear models, hidden units, and split networks by torch.func."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import featlearn as fl

P, D, C = 11, 5, 3


def centered(f: Tensor) -> Tensor:
    return f - f.mean(0)


def inputs(*shape: int) -> Tensor:
    return torch.randn(P, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def moved(model: nn.Module, size: float = 0.3) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in double after a random step of its trainable weights, and its state before."""
    model = model.double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += size * torch.rand(p.shape, generator=generator, dtype=torch.float64)
    return model, before


def split_gap(
    head: nn.Module, before: dict[str, Tensor], x: Tensor, link: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    """Through the link and of the outputs themselves, by forward derivatives of h and of g(h)."""
    now = {name: p.detach() for name, p in head.named_parameters()}
    first = {name: before[name] for name in now}
    change = {name: now[name] - first[name] for name in now}
    buffers = dict(head.named_buffers())

    def h(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(head, {**parameters, **buffers}, (x,))

    # Neither fused attention nor fused encoder layers have forward derivatives.
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        h0, along = torch.func.jvp(h, (first,), (change,))
        f0, plain = torch.func.jvp(lambda parameters: link(h(parameters)), (first,), (change,))
    torch.backends.mha.set_fastpath_enabled(True)
    f = link(h(now))
    size = centered(f - f0).norm()
    return float(centered(f - link(h0 + along)).norm() / size), float(centered(f - f0 - plain).norm() / size)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=1)


class Likelihood(nn.Module):
    """The log-probability of a class."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log_softmax(1).gather(1, torch.ones(len(x), 1, dtype=torch.long))[:, 0]


class Written(nn.Module):
    """A function of the (n, C) outputs of a layer, written op by op."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shifted_exponential(z: Tensor) -> Tensor:
    return (z - z.amax(1, keepdim=True)).exp()


def written_softmax(z: Tensor) -> Tensor:
    exponential = shifted_exponential(z)
    return exponential / exponential.sum(1, keepdim=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, C))


LINKS = {
    "log softmax": nn.LogSoftmax(1),
    "softmax": nn.Softmax(1),
    "sigmoid": nn.Sigmoid(),
    "exp": Exp(),
    "normalization": Normalize(),
    "log-probability": Likelihood(),
    "softplus": nn.Softplus(),
    "shifted exp": Written(shifted_exponential),
    "written softmax": Written(written_softmax),
    "written log softmax": Written(lambda z: z - z.exp().sum(1, keepdim=True).log()),
    "capped": nn.Sequential(nn.Tanh(), nn.LogSoftmax(1)),
}


@pytest.mark.parametrize("name", list(LINKS))
def test_generalized_linear_models_have_none(name: str):
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, C), LINKS[name]))
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap < 1e-12
    assert gap.link
    assert gap.plain > 0.02


def test_a_head_behind_a_frozen_body_has_none():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(D, 7), nn.ReLU()).requires_grad_(False)
    model, before = moved(nn.Sequential(body, nn.Linear(7, C), nn.Sigmoid()))
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap < 1e-12 < 0.05 < gap.plain


@pytest.mark.parametrize("name", list(LINKS))
@pytest.mark.parametrize("make", [perceptron, encoder])
def test_it_is_what_a_split_network_gives(make: Callable[[], nn.Module], name: str):
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(make(), LINKS[name]))
    x = inputs() if make is perceptron else inputs(4, 6)
    head = {key.removeprefix("0."): value for key, value in before.items()}
    expected, plain = split_gap(model[0], head, x, LINKS[name])
    gap = fl.linearization_gap(model, x, before)
    assert gap == pytest.approx(expected, rel=1e-8)
    assert gap.plain == pytest.approx(plain, rel=1e-8)
    assert fl.linearization_gap(model, x, before, link=False) == pytest.approx(plain, rel=1e-8)
    assert abs(expected - plain) > 1e-3


@pytest.mark.parametrize("name", ["log softmax", "log-probability"])
def test_parts_of_layers_add_up_to_it(name: str):
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(perceptron(), LINKS[name]))
    parts = fl.linearization_gap(model, inputs(), before, by="layer")
    assert set(parts) == {"0.0", "0.2"}
    assert sum(parts.values()) == pytest.approx(fl.linearization_gap(model, inputs(), before), rel=1e-9)


def test_a_readout_is_part_of_the_output_function():
    torch.manual_seed(0)
    model, before = moved(perceptron())
    expected, _ = split_gap(model, before, inputs(), Likelihood())
    gap = fl.linearization_gap(model, inputs(), before, readout=Likelihood())
    assert gap == pytest.approx(expected, rel=1e-10)
    assert gap.link == ("LogSoftmax",)


def test_the_mean_log_probability_of_a_sequence_is_an_output_function():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, C)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x).log_softmax(-1)
            targets = (torch.arange(4) % C).expand(len(x), 4)
            return logits.gather(-1, targets[..., None])[..., 0].mean(1)

    torch.manual_seed(0)
    model, before = moved(Tokens())
    assert fl.linearization_gap(model, inputs(4, 6), before) < 1e-12


MASKS = {
    "where": lambda h: torch.where(h > 0, h, 0.0),
    "product": lambda h: h * (h > 0),
    "filled": lambda h: h.masked_fill(h < 0, 0.0),
    "detached": lambda h: h * h.detach().sigmoid(),
}


def written_relu(h: Tensor, kind: str) -> Tensor:
    """Units whose mask depends on the weights without a gradient."""
    return MASKS.get(kind, torch.relu)(h)


class Committee(nn.Module):
    """Hidden units that are added up without a trained weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(D, 7), kind
        self.register_buffer("fixed", torch.randn(7, C))
        self.frozen = nn.Linear(7, C).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.kind == "quadratic":
            return hidden.square().sum(1)
        units = written_relu(hidden, self.kind)
        if self.kind == "picked":
            return units[:, 0] + units[:, 1] - units[:, 2]
        if self.kind in ("mean", *MASKS):
            return units.mean(1)
        return units @ self.fixed if self.kind == "buffer" else self.frozen(units)


@pytest.mark.parametrize("kind", ["mean", "buffer", "frozen", "quadratic", "picked", *MASKS])
def test_hidden_units_are_no_output_function(kind: str):
    torch.manual_seed(0)
    model, before = moved(Committee(kind))
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap == gap.plain > 0.05
    assert gap.link == ()
    # What follows the sum is one.
    behind = nn.Sequential(model, nn.Sigmoid())
    head = {f"0.{key}": value for key, value in before.items()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    expected, _ = split_gap(model, before, inputs(), torch.sigmoid)
    assert fl.linearization_gap(behind, inputs(), head) == pytest.approx(expected, rel=1e-10)
    assert trained == {name: p.requires_grad for name, p in model.named_parameters()}


def test_masks_of_the_inputs_and_labels_are_part_of_the_output_function():
    def masked(output: Tensor, x: Tensor) -> Tensor:
        chosen = output.log_softmax(-1).gather(-1, (x[..., :1] > 0).long())[..., 0]
        return (chosen * (x[..., 1] > -0.5)).sum(1)

    torch.manual_seed(0)
    model, before = moved(nn.Linear(6, C))
    gap = fl.linearization_gap(model, inputs(4, 6), before, readout=masked)
    assert gap < 1e-12
    assert gap.link == ("LogSoftmax",)


def test_a_mask_alone_is_a_link():
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return torch.where(h > 0, h, 0.1 * h)

    torch.manual_seed(0)
    model, before = moved(Leaky())
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap < 1e-12 < gap.plain
    assert gap.link == ("Where",)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.softmax(1).cumsum(1),
        torch.special.log_ndtr,
        lambda z: z.amax(1, keepdim=True),
        lambda z: z.exp() / z.sigmoid().sum(1, keepdim=True),
        lambda z: z.abs() / z.abs().sum(1, keepdim=True),
    ],
)
def test_other_functions_get_the_plain_gap(function: Callable[[Tensor], Tensor]):
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, C), Written(function)), size=1.0)
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap == gap.plain > 0.01
    assert gap.link == ()


def test_parameters_that_enter_behind_it_are_linearized():
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(D, C), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).softmax(1) * self.scale

    torch.manual_seed(0)
    model, before = moved(Tempered())
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap == gap.plain
    assert gap.link == ()


def test_results_written_in_place_are_followed_or_left_alone():
    class InPlace(nn.Module):
        def __init__(self, ignored: bool) -> None:
            super().__init__()
            self.layer, self.ignored = perceptron(), ignored

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if self.ignored:
                h.sigmoid_()
                return h
            h = h.mul_(2.0)
            return torch.sigmoid(h)

    torch.manual_seed(0)
    for ignored, link in ((False, lambda h: torch.sigmoid(2 * h)), (True, torch.sigmoid)):
        model, before = moved(InPlace(ignored))
        head = {key.removeprefix("layer."): value for key, value in before.items()}
        through, plain = split_gap(model.layer, head, inputs(), link)
        gap = fl.linearization_gap(model, inputs(), before)
        assert gap == pytest.approx(through if gap.link else plain, rel=1e-10)
    assert not gap.link


def test_many_samples_are_taken_in_parts_of_more_than_one():
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(perceptron(), nn.LogSoftmax(1)))
    x = torch.randn(257, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    head = {key.removeprefix("0."): value for key, value in before.items()}
    expected, _ = split_gap(model[0], head, x, LINKS["log softmax"])
    assert fl.linearization_gap(model, x, before) == pytest.approx(expected, rel=1e-10)


def test_half_precision_is_measured_in_single():
    """Behind an output factor of 100 the rounding of bfloat16 is larger than the change."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return 100 * self.layer(x)

    torch.manual_seed(0)
    model = Scaled().bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p += 0.01 * torch.randn_like(p)
    single, x = copy.deepcopy(model).float(), inputs().bfloat16()
    expected = fl.linearization_gap(single, x.float(), {key: value.float() for key, value in before.items()})
    gap = fl.linearization_gap(model, x, before)
    assert gap == pytest.approx(expected, rel=1e-6)
    assert gap.rounding < 1e-3
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_the_rounding_error_is_that_of_another_precision():
    torch.manual_seed(0)
    model = nn.Sequential(perceptron(), nn.Linear(C, C)).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p += 1e-5 * torch.randn_like(p)
    x = inputs().float()
    gap = fl.linearization_gap(model, x, before)
    double = fl.linearization_gap(
        copy.deepcopy(model).double(), x.double(), {key: value.double() for key, value in before.items()}
    )
    assert 0.1 * gap.rounding < abs(gap - double) < gap.rounding
    assert gap.estimate.stderr >= gap.rounding
