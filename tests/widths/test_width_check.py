"""`fl.width_check` on networks whose parametrization is known."""

import json
import math
import random

import matplotlib
import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from benchmarks.widths.cases import SUITES, Case
from benchmarks.widths.networks import batch, made
from benchmarks.widths.run import checked, located
from featlearn import widths
from featlearn.theory.phases import Phase

matplotlib.use("agg")
CASES = {case.name: case for case in SUITES["calibration"]}
SMOKE = [
    "mlp sgd standard",
    "mlp sgd ntk",
    "mlp sgd mean_field",
    "mlp sgd mup",
    "mlp adam standard",
    "mlp adam ntk",
    "mlp adam mean_field",
    "mlp adam mup",
    "mlp sgd mup, zero readout",
    "mlp adam mup: readout drawn as 1/sqrt(n)",
    "mlp adam mup: rate of one hidden layer constant",
    "cnn sgd mup: rate of the input constant",
    "gpt adam mup: attention 1/sqrt(d)",
]
NARROW = {"mlp": (32, 64, 128, 256), "cnn": (16, 32, 64), "gpt": (16, 32, 64)}
X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :2] * X[:, 1:3]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def said_rightly(case: Case, found: widths.WidthCheck) -> bool:
    return found.scheme == case.scheme.split()[0] and located(case, found)


@pytest.mark.parametrize("name", SMOKE)
def test_schemes_are_told_and_errors_located(name: str):
    case = CASES[name]
    found = checked(case, seeds=2, widths=NARROW[case.network])
    assert said_rightly(case, found), f"{found}"


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SUITES["calibration"], *SUITES["held-out"]], ids=lambda case: case.name)
def test_every_case_of_the_benchmark(case: Case):
    found = checked(case)
    assert said_rightly(case, found), f"{found}"


@pytest.fixture(scope="module")
def standard() -> widths.WidthCheck:
    return fl.width_check(mlp, (X, Y), widths=(16, 32, 64), seeds=2, steps=3)


def test_the_powers_of_the_standard_parametrization(standard: widths.WidthCheck):
    """Under SGD at one rate: features move by 1/sqrt(n) and sqrt(n), outputs by n (Yang & Hu 2021)."""
    assert (standard.scheme, standard.phase, standard.problems) == ("standard", Phase.UNSTABLE, ())
    assert [one.kind for one in standard.layers.values()] == ["input", "hidden", "output"]
    for name, expected in {"0": -0.5, "2": 0.5, "4": 1.0}.items():
        assert abs(float(standard.layers[name].exponents["effect"]) - expected) < 0.3
    # random matrices (n, 5), (n, n) and (2, n): the first is not yet its power law
    for name, expected, within in (("0", 0.5, 0.25), ("2", 0.0, 0.1), ("4", 0.0, 0.1)):
        assert abs(float(standard.layers[name].exponents["weight"]) - expected) < within
    assert all(isinstance(one, fl.Estimate) for layer in standard.layers.values() for one in layer.exponents.values())


def test_words_numbers_and_picture(standard: widths.WidthCheck):
    said = str(standard)
    assert said.startswith("scheme: standard")
    assert "phase: unstable" in said
    assert "problems: none" in said
    document = json.loads(standard.to_json())
    assert document["uses"]["2.weight"]["exponents"]["rate"]["value"] == float(standard.layers["2"].exponents["rate"])
    figure = standard.plot()
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles == ["0 (input)", "2 (hidden)", "4 (output)", "network"]
    matplotlib.pyplot.close(figure)


def test_a_problem_says_layer_power_and_remedy():
    case = CASES["mlp adam mup: readout drawn as 1/sqrt(n)"]
    found = checked(case, seeds=2, widths=(32, 64, 128))
    (problem,) = found.problems
    assert (problem.parameter, problem.layer, problem.quantity) == ("readout.weight", "readout", "initial scale")
    assert float(problem.power) == pytest.approx(0.5, abs=0.15)
    assert "too large" in str(problem)
    assert "by width^-0.5" in str(problem)
    figure = found.plot()
    assert any("initial scale" in ax.get_title("left") for ax in figure.axes)
    matplotlib.pyplot.close(figure)


class Outside(nn.Module):
    """NTK parametrization with multipliers between layers, which no layer sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(n, m, bias=False) for n, m in ((5, width), (width, width), (width, 2)))
        self.width = width
        for layer in (self.a, self.b, self.c):
            nn.init.normal_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x) / 5**0.5)
        return self.c(torch.tanh(self.b(h) / self.width**0.5)) / self.width**0.5


def test_multipliers_may_stand_anywhere():
    found = fl.width_check(Outside, (X, Y), widths=(32, 64, 128), seeds=2, steps=2)
    assert (found.scheme, found.phase, found.problems) == ("ntk", Phase.KERNEL, ())


class Gated(nn.Module):
    """A product of two layers, both drawn with entries of order one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width, bias=False), nn.Linear(width, 2, bias=False)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        for layer in (self.gate, self.up):
            nn.init.normal_(layer.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h + self.down(torch.tanh(self.gate(h)) * self.up(h)))


def test_a_gate_is_no_multiplier():
    found = fl.width_check(
        Gated,
        (X, Y),
        widths=(32, 64, 128),
        seeds=2,
        steps=1,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 1e-3),
    )
    assert found.scheme == "standard"
    assert [(one.layer, one.quantity) for one in found.problems] == [("gate", "initial scale"), ("up", "initial scale")]
    assert all(float(one.power) == pytest.approx(0.5, abs=0.15) for one in found.problems)


class Encoder(nn.Module):
    """Parameters of its own, attention of torch, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.places = nn.Parameter(0.1 * torch.randn(6, width))
        self.block = nn.TransformerEncoderLayer(width, 2, width, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.tokens(tokens) + self.places))


def test_every_parameter_of_any_module_is_judged():
    tokens = torch.randint(11, (7, 6), generator=torch.Generator().manual_seed(0))
    found = fl.width_check(
        Encoder,
        (tokens, (2 * tokens) % 11),
        widths=(16, 32, 64),
        seeds=2,
        steps=2,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    )
    assert (found.scheme, found.problems, found.update) == ("standard", (), "normalized")
    assert {use.parameter for use in found.uses.values()} == {name for name, _ in Encoder(16).named_parameters()}
    (attention,) = found.attention.values()
    assert float(attention["scale"]) == pytest.approx(-0.5, abs=1e-6)


def test_hugging_face_models_with_tied_embeddings_and_adam():
    """GPT-2 draws weights with a deviation that does not know the width: all of them are off by 1/2."""
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(17, (5, 8), generator=torch.Generator().manual_seed(0))

    def make(width: int) -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=17, n_positions=8, n_embd=width, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)

    found = fl.width_check(
        make,
        ({"input_ids": tokens}, tokens.roll(-1, 1)),
        widths=(16, 32, 64),
        seeds=2,
        steps=2,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    )
    assert (found.scheme, found.nearest) == ("other", "standard")
    hidden = [f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert [one.layer for one in found.problems] == hidden
    assert all(one.quantity == "initial scale" and abs(float(one.power) - 0.5) < 0.1 for one in found.problems)
    assert found.layers["lm_head"].tied
    assert any("one tensor" in note for note in found.notes)


def test_the_surroundings_stay_as_they_were():
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    with torch.no_grad():
        fl.width_check(mlp, (X, Y), widths=(8, 16), seeds=1, steps=1)
        assert not torch.is_grad_enabled()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == numpy.random.get_state()[1]).all()
    assert torch.get_default_dtype() == torch.float32


def test_a_class_of_optimizers_takes_the_parameters():
    found = fl.width_check(mlp, (X, Y), widths=(8, 16), seeds=1, steps=1, optimizer=torch.optim.Adam)
    assert found.update == "normalized"


def test_an_optimizer_that_is_neither_sgd_nor_adam_is_named():
    """SLO divides the gradient of a tensor by its norm: rates are measured, and the tables may not be its own."""

    def slo(model: nn.Module) -> torch.optim.Optimizer:
        return fl.steer.SLO([{"params": [p], "speed": 1.0} for p in model.parameters()], lr=0.01)

    found = fl.width_check(mlp, (X, Y), widths=(8, 16), seeds=1, steps=1, optimizer=slo)
    assert found.update == "normalized"
    assert any("neither the gradient nor its signs" in note for note in found.notes)


def test_the_same_call_gives_the_same_numbers():
    one, other = (fl.width_check(mlp, (X, Y), widths=(8, 16), seeds=2, steps=2).to_json() for _ in range(2))
    assert one == other


def test_what_diverges_is_judged_by_its_first_step():
    found = fl.width_check(
        mlp,
        (X, Y),
        widths=(16, 32, 64),
        seeds=2,
        steps=40,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 3.0),
    )
    assert found.scheme == "standard"
    assert any("diverged" in note for note in found.notes)
    json.loads(found.to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (64,)}, "at least two"),
        ({"widths": (64, 32)}, "increase"),
        ({"steps": 0}, "steps=0"),
        ({"seeds": 1.5}, "seeds=1.5"),
        ({"loss": "crossentropy"}, "'mse', .*did you mean 'cross-entropy'"),
        ({"data": X}, r"pair \(x, y\)"),
        ({"data": (X, Y[:3])}, "12 inputs and targets"),
        ({"make_model": lambda width: "no"}, "gives str, expected a torch.nn.Module"),
        ({"make_model": lambda width: nn.Linear(5, 2)}, "no weight grows"),
        ({"make_model": lambda width: nn.Linear(width, 2)}, "network of width 8 failed"),
        ({"make_model": mlp(8)}, "make_model is Sequential, expected a function of the width"),
        ({"optimizer": torch.optim.AdamW(mlp(8).parameters())}, "optimizer is AdamW, expected a function of the model"),
        ({"optimizer": "adam"}, "optimizer is str, expected a function of the model"),
        ({"optimizer": lambda model: None}, "gives NoneType"),
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.0)}, "changes no parameter"),
        ({"loss": lambda output, y: output.detach().mean()}, "no differentiable number"),
        ({"loss": "cross-entropy"}, "one-hot rows"),
        ({"data": (X, Y[:, :1])}, "as the outputs have"),
    ],
)
def test_wrong_arguments_are_explained(change: dict, message: str):
    arguments = {"make_model": mlp, "data": (X, Y), "widths": (8, 16), "seeds": 1, "steps": 1} | change
    with pytest.raises(fl.FeatlearnError, match=message):
        fl.width_check(arguments.pop("make_model"), arguments.pop("data"), **arguments)


def test_networks_of_the_benchmark_coincide_at_the_base_width():
    """Schemes differ in how they scale, so at one width they are one network, up to entries of order one."""
    x, _ = batch("mlp", 0)
    outputs = []
    for scheme in ("standard", "ntk", "mean_field", "mup"):
        torch.manual_seed(0)
        model, _ = made("mlp", CASES[f"mlp sgd {scheme}"].setting, 64)
        outputs.append(model(x).detach())
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
    assert math.isfinite(float(outputs[0].sum()))
