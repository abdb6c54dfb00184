"""The gap in effective weights: factored and normalized weights, adapters; and layers in sequence, never merged."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm

import featlearn as fl
from featlearn.audited_model import AuditedModel
from featlearn.kernel import jacobian_products
from featlearn.linearization.two_states import GapMemory, TwoStates

P, D, C = 11, 5, 3


def inputs(*shape: int) -> Tensor:
    return torch.randn(P, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def moved(model: nn.Module, size: float = 0.3) -> dict[str, Tensor]:
    """Move all trainable weights; return the state before."""
    model.double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return before


class Adapted(nn.Module):
    """A frozen linear map with a low-rank adapter beside it, as libraries write it."""

    def __init__(self, base: nn.Linear, rank: int = 2, scale: float = 1.5) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return result + self.up(self.down(self.dropout(x.to(self.down.weight.dtype)))) * self.scale

    def merged(self) -> nn.Linear:
        plain = copy.deepcopy(self.base)
        plain.weight.data = self.base.weight.data + self.scale * self.up.weight.data @ self.down.weight.data
        return plain


def merged(model: nn.Module) -> nn.Module:
    """The same network with plain weights, all trainable."""
    twin = copy.deepcopy(model)
    for name, part in list(twin.named_modules()):
        if isinstance(part, Adapted):
            twin.set_submodule(name, part.merged())
    return twin.requires_grad_(True)


def at(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    start = copy.deepcopy(model)
    start.load_state_dict(state)
    return start


def adapted_network() -> nn.Module:
    return nn.Sequential(Adapted(nn.Linear(D, 7)), nn.Tanh(), Adapted(nn.Linear(7, 6)), nn.GELU(), nn.Linear(6, C))


@pytest.mark.parametrize("link", [None, nn.LogSoftmax(1)])
def test_adapters_have_the_gap_of_the_merged_network(link: nn.Module | None):
    torch.manual_seed(0)
    model = adapted_network() if link is None else nn.Sequential(adapted_network(), link)
    before = moved(model, 0.2)
    x = inputs()
    start = merged(at(model, before)).state_dict()
    expected = fl.linearization_gap(merged(model), x, start, effective=False)
    gap = fl.linearization_gap(model, x, before)
    assert gap == pytest.approx(float(expected), rel=1e-9)
    for way in ("forward_mode", "twice_backward"):
        another = TwoStates(AuditedModel(model), before, memory=GapMemory(getattr(jacobian_products, way))).gap(x)
        assert another.value == pytest.approx(float(gap), rel=1e-9)
        assert another.plain.value == pytest.approx(gap.plain, rel=1e-9)
    without = TwoStates(AuditedModel(model), before, memory=GapMemory(jacobian_products.per_sample)).gap(x)
    assert (without.value, without.division.merged) == (pytest.approx(gap.plain, rel=1e-9), ())
    assert len(gap.merged) == 2
    assert all(names[0].endswith("down.weight") and names[1].endswith("up.weight") for names in gap.merged)
    itself = fl.linearization_gap(model, x, before, link=False, effective=False)
    assert gap.plain == pytest.approx(float(itself), rel=1e-10)
    assert itself > gap + 0.05
    parts = fl.linearization_gap(model, x, before, by="layer")
    assert sum(parts.values()) == pytest.approx(float(gap), rel=1e-9)


def test_an_adapter_of_the_only_layer_has_no_gap():
    torch.manual_seed(0)
    model = Adapted(nn.Linear(D, C))
    before = moved(model)
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap < 1e-12 < 0.3 < gap.plain


@pytest.mark.parametrize("way", ["forward_mode", "twice_backward"])
def test_an_adapter_of_the_only_layer_has_no_gap_behind_an_output_function(way: str):
    """The output function begins behind the second map of the adapter."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(D, C)), nn.LogSoftmax(1))
    before = moved(model)
    gap = TwoStates(AuditedModel(model), before, memory=GapMemory(getattr(jacobian_products, way))).gap(inputs())
    assert gap.value < 1e-12 < 0.1 < gap.plain.value
    assert gap.division.link == ("LogSoftmax",)


def test_convolutions_are_adapted_too():
    class AdaptedConvolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Conv2d(2, 4, 3, padding=1).requires_grad_(False)
            self.down, self.up = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x) + 2.0 * self.up(self.down(x))).flatten(1)

    torch.manual_seed(0)
    model = AdaptedConvolution()
    before = moved(model)
    gap = fl.linearization_gap(model, inputs(2, 5, 5), before)
    assert gap < 1e-12 < 0.05 < gap.plain
    assert gap.merged == (("down.weight", "up.weight"),)


class Factored(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.randn(2, C))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        return x @ (weight / weight.norm(dim=0) if self.norm else weight)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Factored, ("a", "b")),
        (lambda: Factored(norm=True), ("a", "b")),
        (
            lambda: weight_norm(nn.Linear(D, C)),
            ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ),
        (lambda: nn.utils.weight_norm(nn.Linear(D, C)), ("weight_g", "weight_v")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_formed_before_a_sample_meets_them_are_linearized_themselves(make, names: tuple[str, ...]):
    torch.manual_seed(0)
    model = make()
    before = moved(model)
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap < 1e-12 < 0.01 < gap.plain
    assert [set(one) for one in gap.merged] == [set(names)]


def test_a_normalized_layer_of_a_network_is_what_its_weight_gives():
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(D, 7)), nn.Tanh(), nn.Linear(7, C))
    before = moved(model)

    def with_weights(network: nn.Module) -> nn.Module:
        plain = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)).double()
        for number in (0, 2):
            plain[number].weight.data = network[number].weight.detach().clone()
            plain[number].bias.data = network[number].bias.detach().clone()
        return plain

    expected = fl.linearization_gap(with_weights(model), inputs(), with_weights(at(model, before)).state_dict())
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap == pytest.approx(float(expected), rel=1e-9)
    assert gap.plain != pytest.approx(float(expected), rel=1e-3)


class Residual(nn.Module):
    """Two linear maps in sequence beside the identity, or beside a map that is trained too."""

    def __init__(self, base: bool) -> None:
        super().__init__()
        self.base = nn.Linear(D, D, bias=False) if base else nn.Identity()
        self.first, self.second = nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


class Items(nn.Module):
    """Weights that a hidden layer makes from a table: its units are features of the table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(C, 4))
        self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, D)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.last(torch.relu(self.hidden(self.table))).T


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(D, 7, bias=False), nn.Linear(7, 6, bias=False), nn.Linear(6, C, bias=False)),
        lambda: Residual(base=False),
        lambda: Residual(base=True),
        Items,
    ],
)
def test_layers_in_sequence_are_never_merged(make):
    torch.manual_seed(0)
    model = make()
    before = moved(model)
    gap = fl.linearization_gap(model, inputs(), before)
    assert gap == gap.plain > 0.05
    assert gap.merged == ()


def test_an_adapter_beside_a_map_with_another_input_stays():
    class Other(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            return self.base(torch.tanh(x)) + self.up(self.down(x))

    torch.manual_seed(0)
    model = Other(nn.Linear(D, C))
    before = moved(model)
    assert fl.linearization_gap(model, inputs(), before).merged == ()


def test_parameters_that_a_model_reaches_past_its_modules_are_not_merged():
    class Closed(Factored):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [self.a, self.b]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ (self.weights[0] @ self.weights[1]))

    torch.manual_seed(0)
    model, plain = Closed(), nn.Sequential(Factored(), nn.Tanh())
    plain[0].load_state_dict(model.state_dict())
    before = moved(model)
    moved(plain)
    assert torch.equal(model(inputs()), plain(inputs()))
    gap = fl.linearization_gap(model, inputs(), before, link=False)
    expected = fl.linearization_gap(plain, inputs(), {f"0.{name}": value for name, value in before.items()}, link=False)
    assert gap.merged == ()
    assert gap == pytest.approx(expected.plain, rel=1e-10)
    assert expected.merged == (("0.a", "0.b"),)


def test_nothing_of_the_model_changes():
    torch.manual_seed(0)
    model = adapted_network()
    before = moved(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    fl.linearization_gap(model, inputs(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert trained == {name: p.requires_grad for name, p in model.named_parameters()}


def test_attention_with_adapters_by_derivatives_of_another_kind():
    """Against forward derivatives in the merged weights by torch.func."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.v = Adapted(nn.Linear(6, 6)), Adapted(nn.Linear(6, 6))
            self.k, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, C).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x)[:, None] for part in (self.q, self.k, self.v))
            return self.head(functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))

    model = Attention()
    before = moved(model)
    now, start = merged(model), merged(at(model, before))
    x = inputs(4, 6)
    first = {name: p.detach() for name, p in start.named_parameters()}
    change = {name: p.detach() - first[name] for name, p in now.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        f0, linear = torch.func.jvp(lambda ps: torch.func.functional_call(now, ps, (x,)), (first,), (change,))
    f = now(x).detach()
    missed, size = f - f0 - linear, f - f0
    expected = float((missed - missed.mean(0)).norm() / (size - size.mean(0)).norm())
    assert fl.linearization_gap(model, x, before) == pytest.approx(expected, rel=1e-9)
