"""`fl.scale_check`: bare parameters, phases by loss, Muon, depth, rank, transfer, patches."""

import itertools
import json
import logging
import math

import matplotlib
import pytest
import torch
from torch import nn

import featlearn as fl
from benchmarks.widths import held_out_networks as networks
from benchmarks.widths.held_out import CASES, Case, checked, located
from featlearn import widths
from featlearn.theory.phases import Phase
from featlearn.widths.networks import apply_patch
from featlearn.widths.scaling import CONTROLLED

matplotlib.use("agg")
X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :2] * X[:, 1:3]
LABELS = (X[:, 0] > 0).long()
SIZES = (32, 64, 128)


class Theory(nn.Module):
    """NTK parametrization in one module, with factors in the forward pass."""

    def __init__(self, width: int, deviation: float = 0.0) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(width, 5))
        self.B = nn.Parameter(torch.randn(width, width) * (width / 32) ** deviation)
        self.V = nn.Parameter(torch.randn(width, 2))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(torch.einsum("ij,bj->bi", self.A, x) / 5**0.5)
        h = torch.tanh(torch.einsum("ij,bj->bi", self.B, h) / self.width**0.5)
        return h @ self.V / self.width**0.5


def test_a_module_of_bare_parameters_has_a_row_for_each():
    check = fl.scale_check(Theory, (X, Y), sizes=SIZES, seeds=2, steps=2)
    assert (check.scheme, check.phase, check.problems) == ("ntk", Phase.KERNEL, ())
    assert {name: use.kind for name, use in check.uses.items()} == {"A": "input", "B": "hidden", "V": "output"}
    assert check.uses["B"].fan_in == check.uses["B"].fan_out == SIZES
    assert check.uses["V"].fan_out == (2, 2, 2)
    factors = {"A": 0.0, "B": -0.5, "V": -0.5}
    for name, use in check.uses.items():
        assert float(use.exponents["factor"]) == pytest.approx(factors[name], abs=1e-6)
        assert float(use.exponents["rate"]) == pytest.approx(0.0, abs=1e-4)


def test_an_error_in_one_bare_parameter_is_named_with_a_patch_that_was_tried():
    check = fl.scale_check(lambda width: Theory(width, 0.5), (X, Y), sizes=SIZES, seeds=2, steps=2)
    (problem,) = check.problems
    assert (problem.parameter, problem.quantity, problem.tried) == ("B", "initial scale", True)
    assert float(problem.power) == pytest.approx(0.5, abs=0.05)
    assert problem.patch == 'model.get_parameter("B").data.mul_((32 / width) ** 0.5)'
    assert problem.patch in str(check)
    assert "tried: it removes the problem" in str(check)
    document = json.loads(check.to_json())
    assert document["problems"][0]["patch"] == problem.patch
    assert document["uses"]["B"]["fan_in"] == list(SIZES)
    figure = check.plot()
    assert any("initial scale" in ax.get_title("left") for ax in figure.axes)
    matplotlib.pyplot.close(figure)


def mlp(width: int) -> nn.Sequential:
    sizes = (5, width, width, 2)
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@pytest.mark.parametrize(
    ("power", "optimizer", "under_mse", "under_entropy"),
    [
        (-1.0, torch.optim.SGD, Phase.KERNEL, Phase.KERNEL),
        (-0.75, torch.optim.SGD, Phase.UNSTABLE, Phase.KERNEL),
        (-0.5, torch.optim.SGD, Phase.UNSTABLE, CONTROLLED),
        (-0.25, torch.optim.SGD, Phase.UNSTABLE, Phase.UNSTABLE),
        (0.0, torch.optim.SGD, Phase.UNSTABLE, Phase.UNSTABLE),
        (-1.0, torch.optim.Adam, Phase.UNSTABLE, CONTROLLED),
        (-0.5, torch.optim.Adam, Phase.UNSTABLE, Phase.UNSTABLE),
    ],
)
def test_the_phase_knows_the_loss(power: float, optimizer: type, under_mse: str, under_entropy: str):
    """Haas et al. 2025: standard parametrization under cross-entropy bears rates up to n^-1/2, under Adam n^-1."""

    def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(width)
        return model, optimizer(model.parameters(), lr=0.01 * (width / 32) ** power)

    for y, loss, phase in ((Y, "mse", under_mse), (LABELS, "cross-entropy", under_entropy)):
        check = fl.scale_check(make, (X, y), sizes=SIZES, seeds=1, steps=1, loss=loss)
        assert (check.scheme, check.problems) == ("standard", ())
        assert check.phase == phase
    own = fl.scale_check(
        make, (X, LABELS), sizes=SIZES, seeds=1, steps=1, loss=lambda f, y: -f.log_softmax(1)[y == 0, 0].mean()
    )
    assert own.phase == under_entropy  # a loss without a name is tried out


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices at one of three scales, sign updates of the rest."""

    def __init__(self, groups: list, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "scale": None})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["scale"] is None:
                    p.sub_(group["lr"] * p.grad.sign())
                    continue
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                rows, columns = p.shape
                scales = {"spectral": (rows / columns) ** 0.5, "rms": max(rows, columns) ** 0.5}
                scales["0.2"] = 0.2 * scales["rms"]
                p.sub_(group["lr"] * scales[group["scale"]] * (u @ v))


def muon(scale: str, power: float = 0.0):
    def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(width)
        model = nn.Sequential(
            nn.Linear(5, width),
            nn.Tanh(),
            nn.Linear(width, 2 * width),
            nn.Tanh(),
            nn.Linear(2 * width, width),
            nn.Tanh(),
        ).append(nn.Linear(width, 2))
        hidden = [model[2].weight, model[4].weight]
        others = [p for p in model.parameters() if all(p is not h for h in hidden)]
        lr = 0.02 * (width / 32) ** power
        return model, Muon([{"params": hidden, "lr": lr, "scale": scale}, {"params": others, "lr": 0.002}], lr=0.02)

    return make


@pytest.mark.parametrize(
    ("scale", "rule", "rate"),
    [("spectral", "Muon, spectral", 0.0), ("rms", "Muon, unit RMS", 0.5), ("0.2", "Muon, 0.2 RMS", 0.5)],
)
def test_scales_of_muon_are_told_apart_without_a_false_alarm(scale: str, rule: str, rate: float):
    check = fl.scale_check(muon(scale), (X, Y), sizes=SIZES, seeds=1, steps=2)
    assert (check.scheme, check.problems) == ("standard", ())
    assert {check.uses[name].update_rule for name in ("2.weight", "4.weight")} == {rule}
    assert check.uses["0.weight"].update_rule == "signs"
    for name in ("2.weight", "4.weight"):
        assert float(check.uses[name].exponents["rate"]) == pytest.approx(rate, abs=0.05)
    assert any(f"orthogonalized ({rule})" in note for note in check.notes)


def test_an_error_in_the_rates_of_muon_is_not_told_of_the_others():
    check = fl.scale_check(muon("spectral", 1.0), (X, Y), sizes=SIZES, seeds=1, steps=2)
    problems = {problem.parameter: (problem.quantity, round(float(problem.power), 1)) for problem in check.problems}
    assert problems == {"2.weight": ("learning rate", 1.0), "4.weight": ("learning rate", 1.0)}


class Block(nn.Module):
    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.down(torch.relu(self.up(self.norm(x))))


def residual(power: float, optimizer: type, rate: float, error: float = 0.0):
    def make(depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        blocks = [Block(12, (depth / 2) ** -power) for _ in range(depth)]
        for block in blocks:
            block.up.weight.data.mul_((depth / 2) ** error)
        model = nn.Sequential(nn.Linear(5, 12), nn.Sequential(*blocks), nn.LayerNorm(12), nn.Linear(12, 2))
        groups = [
            {"params": list(model[1].parameters()), "lr": 0.01 * (depth / 2) ** rate},
            {"params": [p for k in (0, 2, 3) for p in model[k].parameters()], "lr": 0.01},
        ]
        return model, optimizer(groups)

    return make


@pytest.mark.parametrize(
    ("power", "optimizer", "rate", "scheme", "phase"),
    [
        (0.0, torch.optim.SGD, 0.0, "standard", Phase.UNSTABLE),
        (0.0, torch.optim.Adam, 0.0, "standard", Phase.UNSTABLE),
        (0.5, torch.optim.SGD, 0.0, "1/sqrt(L)", Phase.KERNEL),
        (0.5, torch.optim.Adam, 0.0, "1/sqrt(L)", Phase.UNSTABLE),
        (0.5, torch.optim.Adam, -0.5, "depth-muP", Phase.KERNEL),
        (1.0, torch.optim.Adam, 0.0, "CompleteP", Phase.LEARNING),
        (1.0, torch.optim.SGD, 1.0, "CompleteP", Phase.LEARNING),
        (1.0, torch.optim.SGD, 0.0, "1/L", Phase.FROZEN),
    ],
)
def test_schemes_of_depth(power: float, optimizer: type, rate: float, scheme: str, phase: str):
    """Branches in L^-a: gains -a; rates by Adam -a + r, by SGD -2a + r, of the last weights of branches."""
    sizes = (2, 4, 8, 16, 32)
    check = fl.scale_check(residual(power, optimizer, rate), (X, Y), sizes=sizes, along="depth", seeds=1, steps=1)
    assert (check.scheme, check.phase, check.problems) == (scheme, phase, ())
    times = 2 if optimizer is torch.optim.SGD else 1
    last, inner = check.uses["1.*.down.weight"], check.uses["1.*.up.weight"]
    assert (last.kind, inner.kind, check.uses["0.weight"].kind) == ("branch output", "branch", "outside")
    assert float(last.exponents["gain"]) == pytest.approx(-power, abs=0.05)
    assert float(last.exponents["rate"]) == pytest.approx(-times * power + rate, abs=0.05)
    assert float(inner.exponents["gain"]) == pytest.approx(0.0, abs=0.05)
    assert float(inner.exponents["rate"]) == pytest.approx(rate, abs=0.05)
    assert "powers of the depth" in str(check)
    lines = str(check).replace("\n  ", " ")
    none = (
        "problems: none relative to the standard scheme; the scheme itself is unstable. Usual remedy: divide what each"
    )
    assert (none in lines) == (scheme == "standard")
    assert ("problems: none\n" in str(check)) == (phase != Phase.UNSTABLE)


def test_layers_around_blocks_of_one_container_keep_their_names():
    def make(depth: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 12), *(Block(12, 1 / depth) for _ in range(depth)), nn.Linear(12, 2))

    check = fl.scale_check(make, (X, Y), sizes=(2, 4, 8), along="depth", seeds=1, steps=1)
    assert (check.scheme, check.problems) == ("1/L", ())
    matrices = {name: use.kind for name, use in check.uses.items() if not use.is_vector}
    branch = {"*.up.weight": "branch", "*.down.weight": "branch output"}
    assert matrices == {"0.weight": "outside", **branch, "3.weight": "outside"}


def test_an_error_along_the_depth_is_located():
    make = residual(1.0, torch.optim.Adam, 0.0, error=0.5)
    check = fl.scale_check(make, (X, Y), sizes=(2, 4, 8), along="depth", seeds=1, steps=1)
    (problem,) = check.problems
    assert (problem.parameter, problem.quantity) == ("1.*.up.weight", "initial scale")
    assert "depth^-0.5" in problem.advice


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int, power: float) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)
        self.factor = (rank / 2) ** -power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.factor * self.up(self.down(x))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("power", "scheme"), [(0.0, "plain"), (0.5, "rsLoRA"), (1.0, "1/r")])
def test_which_factor_of_adapters_keeps_the_effect_of_an_update(power: float, scheme: str, optimizer: type):
    """B's update moves the output by r^(1 - 2p) under SGD (Kalajdzievski 2023) and by r^(1 - p) under Adam."""

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Adapted(5, 24, rank, power), nn.Tanh(), Adapted(24, 2, rank, power))
        return model, optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)

    check = fl.scale_check(make, (X, Y), sizes=(2, 4, 8, 16), along="rank", seeds=1, steps=1)
    rate = 1 - power * (2 if optimizer is torch.optim.SGD else 1)
    for name in ("0.up.weight", "2.up.weight"):
        assert float(check.uses[name].exponents["rate"]) == pytest.approx(rate, abs=0.05)
    phase = Phase.UNSTABLE if rate > 0 else Phase.FROZEN if rate < 0 else Phase.LEARNING
    assert (check.scheme, check.phase, check.problems) == (scheme, phase, ())


@pytest.mark.parametrize(("power", "problems"), [(-0.5, 0), (-1.0, 0), (0.0, 2)])
def test_the_scale_of_attention_is_judged_where_heads_become_smaller(power: float, problems: int):
    def make(heads: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = networks.GPT(32, power=power)
        for block in model.blocks:
            block.attention.heads = heads
        return model, torch.optim.Adam(model.parameters(), lr=0.001)

    data = networks.batch("tokens next")
    check = fl.scale_check(
        make, data, sizes=(2, 4, 8), along="heads", seeds=1, steps=1, loss=nn.functional.cross_entropy
    )
    assert [problem.quantity for problem in check.problems] == ["attention scale"] * problems


class Experts(nn.Module):
    def __init__(self, count: int, power: float) -> None:
        super().__init__()
        self.gate = nn.Linear(5, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)) for _ in range(count))
        for expert in self.experts:
            expert[0].weight.data.mul_(count**power)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.gate(x).softmax(1)[..., None] * outputs).sum(1)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_experts_have_one_row_for_all(power: float):
    check = fl.scale_check(
        lambda count: Experts(count, power),
        (X, Y),
        sizes=(2, 4, 8),
        along="experts",
        optimizer=torch.optim.Adam,
        seeds=2,
        steps=1,
    )
    assert "experts.*.0.weight" in check.uses
    assert [problem.parameter for problem in check.problems] == ["experts.*.0.weight"] * bool(power)


def test_the_best_rate_of_the_standard_parametrization_drifts_and_that_of_mup_does_not(
    caplog: pytest.LogCaptureFixture,
):
    digits = fl.data.digits()
    data = digits.x[:64] - digits.x.mean(0), digits.labels[:64]
    drifts = {}
    for scheme in ("standard", "mup"):

        def make(width: int, scheme: str = scheme):
            model = nn.Sequential(
                nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
            )
            if scheme == "standard":
                return model, torch.optim.Adam(model.parameters(), lr=0.004)
            model, groups = fl.steer.parametrize(model, "mup", lr=0.004, base_width=32, optimizer="adam")
            return model, torch.optim.Adam(groups)

        with caplog.at_level(logging.INFO, logger="featlearn"):
            check = fl.scale_check(
                make, data, sizes=(32, 64, 128, 256), seeds=1, steps=1, transfer=True, transfer_steps=12
            )
        assert check.scheme == scheme
        drifts[scheme] = check.transfer
        assert "runs of 12 steps" in caplog.text
        assert check.transfer.losses.shape == (4, 1, len(check.transfer.factors))
        json.loads(check.to_json())
        assert "learning rate: the best one" in str(check)
        matplotlib.pyplot.close(check.transfer.plot().figure)
    assert float(drifts["standard"].drift) < -0.5
    assert not drifts["standard"].transfers
    assert abs(float(drifts["mup"].drift)) < 0.25
    assert drifts["mup"].transfers


def test_patches_change_the_optimizer_and_the_model_as_their_text_says():
    torch.manual_seed(0)
    model = mlp(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    before, x = model[2].weight.detach().clone(), X[:3]
    output = model(x).detach()
    apply_patch('{"params": [model.get_parameter("2.weight")], "lr": lr * (4 / width)}', model, optimizer, "width", 8)
    rates = {id(p): (group["lr"], group["momentum"]) for group in optimizer.param_groups for p in group["params"]}
    assert rates == {id(model[0].weight): (0.1, 0.5), id(model[2].weight): (0.05, 0.5), id(model[4].weight): (0.1, 0.5)}
    apply_patch('model.get_parameter("2.weight").data.mul_((4 / width) ** 0.5)', model, optimizer, "width", 8)
    torch.testing.assert_close(model[2].weight.detach(), before * 0.5**0.5)
    model[2].weight.data.copy_(before)
    hook = 'model.get_submodule("4").register_forward_hook(lambda m, inputs, output: output * (4 / width))'
    apply_patch(hook, model, optimizer, "width", 8)
    torch.testing.assert_close(model(x), 0.5 * output)


def test_rates_are_put_in_words_of_engineers():
    def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(width)
        nn.init.normal_(model[4].weight, std=1 / width)
        rates = {0: 0.001, 2: 0.001, 4: 0.032 / width}
        return model, torch.optim.Adam([{"params": [model[k].weight], "lr": lr} for k, lr in rates.items()])

    (problem,) = fl.scale_check(make, (X, Y), sizes=SIZES, seeds=1, steps=1).problems
    assert problem.patch == '{"params": [model.get_parameter("2.weight")], "lr": lr * (32 / width)}'
    assert "under Adam it should fall as 1/width; yours is constant" in problem.advice
    assert problem.tried


def test_directions_are_checked():
    with pytest.raises(fl.FeatlearnError, match=r"along='deep', expected width, depth.*did you mean 'depth'"):
        fl.scale_check(mlp, (X, Y), sizes=(8, 16), along="deep")
    with pytest.raises(fl.FeatlearnError, match="sizes="):
        fl.scale_check(mlp, (X, Y), sizes=(8,), along="depth")
    with pytest.raises(fl.FeatlearnError, match="no repeated module is added from depth 8 to 16"):
        fl.scale_check(mlp, (X, Y), sizes=(8, 16), along="depth", seeds=1, steps=1)


def test_width_check_is_the_case_of_the_width():
    options = {"seeds": 1, "steps": 2}
    by_width = fl.width_check(mlp, (X, Y), widths=(8, 16), **options)
    assert by_width.to_json() == fl.scale_check(mlp, (X, Y), sizes=(8, 16), **options).to_json()
    assert isinstance(by_width, widths.WidthCheck)
    assert math.isfinite(float(by_width.layers["2"].exponents["rate"]))


BY_NAME = {case.name: case for case in CASES}
SMOKE = (
    "committee, mean",
    "perceptron n^-1/2, classes",
    "gpt gated, qk-norm",
    "gpt muon",
    "resnet",
    "lstm",
    "mixture",
    "bare mean field, rate of B",
    "gpt mup, places",
    "vit, second linear",
)


def assert_right(case: Case, seeds: int) -> None:
    check = checked(case, seeds)
    assert (check.scheme, str(check.phase)) == (case.scheme, case.phase), f"{check}"
    assert located(case, check), f"{check}"


@pytest.mark.parametrize("name", SMOKE)
def test_networks_written_by_hand(name: str):
    assert_right(BY_NAME[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_network_written_by_hand(case: Case):
    assert_right(case, 3)
