"""Sizes, powers and updates against closed forms and other libraries."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

import featlearn as fl
from featlearn.widths.attention import record_attention
from featlearn.widths.fits import power, product_power
from featlearn.widths.passes import call_traced
from featlearn.widths.size_runs import rms, spectral_norm, tangent_kernel, train_and_measure
from featlearn.widths.uses import find_uses, module_entries


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_power_law_is_found_without_error():
    widths = (8, 24, 100)
    values = torch.tensor([[3.0 * width**-0.7] * 2 for width in widths], dtype=torch.float64)
    found = power(values, widths)
    assert float(found) == pytest.approx(-0.7, abs=1e-12)
    assert float(found.stderr) < 1e-7
    assert float(product_power([(2.0, values), (-1.0, values)], widths)) == pytest.approx(-0.7, abs=1e-12)


def test_power_and_its_error_are_those_of_a_regression():
    widths = (8, 24, 100, 150)
    values = numbers(4, 3).exp()
    found = power(values, widths)
    at = [math.log(width) for width in widths for _ in range(3)]
    expected = stats.linregress(at, values.log().flatten().tolist())
    assert float(found) == pytest.approx(expected.slope, rel=1e-9)
    assert float(found.stderr) == pytest.approx(expected.stderr, rel=1e-9)


def test_zeros_and_lost_runs_have_no_power():
    values = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert math.isnan(float(power(values, (2, 4, 8))))
    values = torch.tensor([[1.0, 1.0], [2.0, math.nan], [4.0, math.inf]])
    assert float(power(values, (2, 4, 8))) == pytest.approx(1.0)


def test_spectral_norms():
    weight = numbers(5, 3, 2, 2)
    assert spectral_norm(weight) == pytest.approx(float(torch.linalg.matrix_norm(weight.flatten(1), 2)), rel=1e-10)
    tall = numbers(9, 4)
    assert spectral_norm(tall) == pytest.approx(float(torch.linalg.svdvals(tall)[0]), rel=1e-10)
    assert spectral_norm(tall[0]) == pytest.approx(float(tall[0].norm()), rel=1e-10)


def test_the_tangent_kernel_is_that_of_fl_ntk():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = numbers(5, 4)
    direction = torch.randn(3, generator=torch.Generator().manual_seed(0)).double()
    expected = fl.ntk(model, x, readout=lambda output: (output * direction).sum(-1))
    found = tangent_kernel(model, x, dict.fromkeys(dict(model.named_parameters()), 1.0))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.25 * self.last(torch.tanh(self.first(x)))


def uses_of(model: nn.Module, *x: torch.Tensor):
    tensors = dict(model.named_parameters())
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    with module_entries(model) as entries:
        output, inputs = call_traced(model, x)
    return find_uses(output, {n: names[id(p)] for n, p in tensors.items()}, tensors, inputs, entries)


def test_sizes_of_one_step_are_those_of_the_equations():
    torch.manual_seed(3)
    net, x, y, lr = Net(), numbers(5, 4), numbers(5, 3, seed=1), 0.07
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    run = train_and_measure(net, torch.optim.SGD(net.parameters(), lr), x, y, nn.MSELoss(), 1, proportional=True)

    w, b, u = before["first.weight"], before["first.bias"], before["last.weight"]
    z = x @ w.T + b
    h = torch.tanh(z)
    f = 0.25 * h @ u.T
    at_f = 2 * (f - y) / (5 * 3)
    at_u, at_h = 0.25 * at_f, 0.25 * at_f @ u
    at_z = at_h * (1 - h.square())
    gradient_u, gradient_w = at_u.T @ h, at_z.T @ x
    last, first, bias = (run.sizes[name] for name in ("last.weight", "first.weight", "first.bias"))
    assert last["descent"] == pytest.approx(lr * float(gradient_u.square().sum()), rel=1e-9)
    assert first["descent"] == pytest.approx(lr * float(gradient_w.square().sum()), rel=1e-9)
    moved = -lr * x @ gradient_w.T
    expected = abs(float((moved * at_z).sum())) / float(at_z.norm()) / at_z.numel() ** 0.5
    assert first["effect"] == pytest.approx(expected, rel=1e-9)
    at_output = -0.25 * lr * h @ gradient_u.T
    expected = abs(float((at_output * at_f).sum())) / float(at_f.norm()) / at_f.numel() ** 0.5
    assert last["effect"] == pytest.approx(expected, rel=1e-9)
    # the factor behind the readout belongs to it: gain m s sqrt(n), rate m^2 lr n
    assert last["factor"] == pytest.approx(0.25, rel=1e-12)
    assert last["gain"] == pytest.approx(0.25 * rms(u) * 6**0.5, rel=1e-9)
    assert last["rate_gradient"] == pytest.approx(0.0625 * lr * 6, rel=1e-9)
    assert first["gain"] == pytest.approx(rms(w) * 2, rel=1e-9)
    assert (first["rate_gradient"], bias["rate_gradient"]) == pytest.approx((4 * lr, lr), rel=1e-9)
    assert first["update"] == pytest.approx(float(torch.linalg.matrix_norm(lr * gradient_w, 2)), rel=1e-8)
    assert run.network["output"] == pytest.approx(rms(f), rel=1e-9)
    assert (first["activation"], last["activation"]) == pytest.approx((rms(z), rms(f)), rel=1e-9)

    after = {name: p.detach() for name, p in net.named_parameters()}
    hidden = torch.tanh(x @ after["first.weight"].T + after["first.bias"])
    change = 0.25 * hidden @ after["last.weight"].T - f
    assert run.network["output_change"] == pytest.approx(rms(change), rel=1e-9)
    assert last["change"] == pytest.approx(rms(change), rel=1e-9)
    assert last["own_change"] == pytest.approx(rms(0.25 * hidden @ (after["last.weight"] - u).T), rel=1e-9)
    assert last["inherited_change"] == pytest.approx(rms(0.25 * (hidden - h) @ u.T), rel=1e-9)
    # of the first layer, the weight's own part is without that of the bias, and the inputs hand nothing down
    assert first["own_change"] == pytest.approx(rms(x @ (after["first.weight"] - w).T), rel=1e-9)
    assert first["inherited_change"] == pytest.approx(rms((after["first.bias"] - b).expand(5, 6)), rel=1e-9)
    grams = z @ z.T, (x @ after["first.weight"].T + after["first.bias"])
    motion = float((grams[1] @ grams[1].T - grams[0]).norm() / grams[0].norm())
    assert first["kernel_motion"] == pytest.approx(motion, rel=1e-9)


def test_rates_of_adam_and_muon_follow_from_their_rules():
    x, y = numbers(9, 4), numbers(9, 3, seed=1)
    torch.manual_seed(3)
    net = Net()
    adam = train_and_measure(net, torch.optim.Adam(net.parameters(), 0.002), x, y, nn.MSELoss(), 1, proportional=False)
    assert adam.sizes["last.weight"]["rate_signs"] == pytest.approx(0.25 * 0.002 * 6, rel=1e-5)
    assert adam.sizes["last.weight"]["along_signs"] == pytest.approx(1, rel=1e-5)
    torch.manual_seed(3)
    net = Net()
    before = net.last.weight.detach().clone()
    muon = torch.optim.Muon([net.first.weight, net.last.weight], lr=0.002, weight_decay=0.0)
    sizes = train_and_measure(net, muon, x, y, nn.MSELoss(), 1, proportional=False).sizes["last.weight"]
    spectral = float(torch.linalg.matrix_norm(net.last.weight.detach() - before, 2))
    assert sizes["rate_spectral"] == pytest.approx(0.25 * spectral * (6 / 3) ** 0.5, rel=1e-8)


class Theory(nn.Module):
    """Bare parameters with factors before, on and after them, a readout by a product and a sum."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        sizes = {"A": (width, 4), "B": (width, width), "D": (width, width), "V": (width,), "unused": (2,)}
        for name, shape in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(*shape, dtype=torch.float64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh((3 * x) @ self.A.T)
        h = torch.relu(torch.einsum("ij,bj->bi", 0.5 * self.B, h) / 5)
        h = torch.tanh(h @ self.D) + h
        return 7 * (self.V * h).mean(-1)


def test_every_bare_parameter_is_a_row_with_its_factors_and_sides():
    rows = {name: (u.op, u.fan_in, u.fan_out, u.factor) for name, u in uses_of(Theory(), numbers(5, 4)).items()}
    assert {name: row[1:3] for name, row in rows.items()} == {"A": (4, 6), "B": (6, 6), "D": (6, 6), "V": (6, 1)}
    factors = {"A": 3.0, "B": 0.1, "D": 1.0, "V": 7 / 6}
    assert {name: row[3] for name, row in rows.items()} == pytest.approx(factors, rel=1e-6)
    assert (rows["A"][0], rows["V"][0]) == ("Mm", "Mul")


def test_readouts_branches_and_vectors_are_told_apart():
    uses = uses_of(Theory(), numbers(5, 4))
    assert [name for name, use in uses.items() if use.is_readout] == ["V"]
    uses = uses_of(Residual().double(), numbers(5, 4))
    assert [name for name, use in uses.items() if use.closes_branch] == ["block.weight", "block.bias"]
    assert uses["block.weight"].factor == pytest.approx(0.125)
    assert [name for name, use in uses.items() if use.is_vector] == ["norm.weight", "norm.bias", "block.bias"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.block(self.norm(x)) / 8)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + torch.relu(self.a(x)) / 8  # the factor of a branch
        h = torch.relu(self.b(h)) / 4  # a factor on the inputs of c
        return (self.c(h) / 2).log_softmax(-1)


def test_factors_behind_an_activation_belong_to_a_branch_or_to_the_next_weight():
    uses = uses_of(Activated().double(), numbers(5, 4))
    assert {name: use.factor for name, use in uses.items()} == pytest.approx(
        {"a.weight": 1 / 8, "a.bias": 1 / 8, "b.weight": 1.0, "c.weight": 1 / 8}
    )
    assert [name for name, use in uses.items() if use.closes_branch] == ["a.weight", "a.bias"]
    assert [name for name, use in uses.items() if use.is_readout] == ["c.weight"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.readout = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.readout(torch.tanh(self.tokens(tokens)))


def test_gradients_of_the_uses_of_a_tied_weight_add_up_to_its_gradient():
    torch.manual_seed(0)
    model, tokens = Tied().double(), torch.tensor([[0, 3, 3], [5, 6, 1]])
    uses = uses_of(model, tokens)
    assert {name: (use.op, use.fan_in, use.fan_out) for name, use in uses.items()} == {
        "tokens.weight": ("Embedding", 1, 6),
        "readout.weight": ("Mm", 6, 7),
    }
    output, _ = call_traced(model, (tokens,))
    uses = find_uses(output, {"t": ["t", "r"]}, {"t": model.tokens.weight}, (tokens,), set())
    nodes = [node for use in uses.values() for _, node in use.calls]
    cotangent = numbers(2, 3, 7)
    arriving = torch.autograd.grad(
        output, [torch.autograd.graph.GradientEdge(node, 0) for node in nodes], cotangent, retain_graph=True
    )
    parts = [use.gradient(model.tokens.weight, dict(zip(nodes, arriving, strict=True))) for use in uses.values()]
    (whole,) = torch.autograd.grad(output, model.tokens.weight, cotangent)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-12)
    hidden = torch.tanh(model.tokens(tokens)).detach()
    torch.testing.assert_close(parts[1], torch.einsum("pti,ptj->ij", cotangent, hidden), rtol=1e-10, atol=1e-12)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(x)[0][:, -1])


def test_a_recurrent_weight_is_one_use_of_many_calls():
    uses = uses_of(Recurrent().double(), numbers(3, 5, 4))
    assert (uses["cell.weight_ih_l0"].fan_in, uses["cell.weight_ih_l0"].fan_out) == (4, 24)
    assert (uses["cell.weight_hh_l0"].fan_in, len(uses["cell.weight_hh_l0"].calls)) in ((6, 5), (6, 4))


def test_a_readout_of_zero_is_looked_at_until_gradients_come():
    torch.manual_seed(0)
    net, x, y = Net(), numbers(5, 4), numbers(5, 3, seed=1)
    nn.init.zeros_(net.last.weight)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = train_and_measure(net, optimizer, x, y, nn.MSELoss(), 2, proportional=True)
    assert run.sizes["first.weight"]["effect"] > 0
    assert run.sizes["last.weight"]["weight"] == 0
    assert run.sizes["last.weight"]["factor"] == pytest.approx(0.25)


class Attention(nn.Module):
    def __init__(self, fused: bool, before: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.fused, self.before = fused, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.query(x), self.key(x), x))
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        scores = (0.3 * q) @ k.transpose(-1, -2) if self.before else 0.3 * (q @ k.transpose(-1, -2))
        mask = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(mask, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("before", [True, False])
def test_a_factor_on_the_queries_is_part_of_the_scale_of_attention(before: bool):
    torch.manual_seed(0)
    model, x = Attention(False, before), numbers(3, 5, 8)
    with record_attention(model) as found:
        model(x)
    q, k = (one(x).detach() for one in (model.query, model.key))
    assert (found[""].queries, found[""].keys) == pytest.approx((rms(q), rms(k)), rel=1e-9)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.T

    @staticmethod
    def backward(ctx, arriving):
        x, weight = ctx.saved_tensors
        return 2 * arriving @ weight, 2 * arriving.T @ x


class Unusual(nn.Module):
    """An op of the user, a weight norm, an op with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(6, 4))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7, bias=False))
        self.both = nn.Bilinear(7, 4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.normed(Doubled.apply(x, self.own)), x)


def test_ops_without_a_rule_have_the_sides_of_their_parameter():
    net, x = Unusual().double(), numbers(5, 4)
    uses = uses_of(net, x)
    sides = {name: (use.fan_in, use.fan_out, use.is_vector) for name, use in uses.items()}
    assert sides == {
        "own": (4, 6, False),
        "normed.parametrizations.weight.original0": (1, 7, True),
        "normed.parametrizations.weight.original1": (6, 7, False),
        "both.weight": (28, 2, False),
    }
    run = train_and_measure(
        net, torch.optim.SGD(net.parameters(), 0.1), x, numbers(5, 2), nn.MSELoss(), 1, proportional=True
    )
    assert run.sizes["own"]["rate_gradient"] == pytest.approx(0.4, rel=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_logits_are_seen_fused_or_not(fused: bool):
    torch.manual_seed(0)
    model, x = Attention(fused), numbers(3, 5, 8)
    with record_attention(model) as found:
        model(x)
    q, k = (one(x).detach().unflatten(-1, (2, 4)).transpose(1, 2) for one in (model.query, model.key))
    scores = 0.3 * q @ k.transpose(-1, -2)
    seen = scores if fused else scores[..., torch.ones(5, 5).tril().bool()]
    assert found[""].size == pytest.approx(rms(seen), rel=1e-9)
    assert found[""].head == 4
    assert found[""].scale == (0.3 if fused else None)
