"""Cases of known parametrization, and planted errors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.widths.networks import Setting

Activation = Callable[[Tensor], Tensor]
RATES = {"sgd": 0.05, "adam": 0.003}


@dataclass(frozen=True)
class Case:
    """A network, and what the check should say of it."""

    name: str
    network: str
    setting: Setting
    scheme: str
    layer: str | None = None
    """where the error is planted, None where there is none"""
    sign: int = 0
    seed: int = 0


def _attention(scheme: str) -> float:
    return -1.0 if scheme.startswith("mup") else -0.5


def _schemes(depth: dict[str, int], activation: Activation, seed: int) -> list[Case]:
    cases = []
    for network in ("mlp", "cnn", "gpt"):
        for update in ("sgd", "adam"):
            for scheme in ("standard", "ntk", "mean_field", "mup"):
                setting = Setting(
                    scheme,
                    update,
                    RATES[update],
                    attention=_attention(scheme),
                    depth=depth[network],
                    activation=activation,
                )
                cases.append(Case(f"{network} {update} {scheme}", network, setting, scheme, seed=seed))
    return cases


def _known(seed: int, depth: int) -> list[Case]:
    """Cases that look like errors and are none."""
    mup = Setting("mup", "adam", 0.003, attention=-1.0, depth=depth)
    sgd = Setting("mup", "sgd", 0.05, attention=-1.0, depth=depth)
    tied = Setting("mup multiplier", "adam", 0.003, attention=-1.0, tied=True, depth=depth)
    return [
        Case("mlp sgd mup, zero readout", "mlp", replace(sgd, zero_readout=True), "mup", seed=seed),
        Case("mlp adam mup, zero readout", "mlp", replace(mup, zero_readout=True), "mup", seed=seed),
        Case("gpt sgd mup, zero readout", "gpt", replace(sgd, zero_readout=True), "mup", seed=seed),
        Case("gpt adam mup, zero readout", "gpt", replace(mup, zero_readout=True), "mup", seed=seed),
        Case("gpt adam mup, tied", "gpt", tied, "mup", seed=seed),
        Case("gpt adam mup, more heads", "gpt", replace(mup, head=16, attention=0.0), "mup", seed=seed),
        Case(
            "gpt adam standard, 1/d",
            "gpt",
            Setting("standard", "adam", 0.003, attention=-1.0, depth=depth),
            "standard",
            seed=seed,
        ),
        Case("mlp sgd mup, one rate", "mlp", Setting("mup one rate", "sgd", 0.05, depth=depth), "mup", seed=seed),
        Case("mlp adam mup, multiplier", "mlp", replace(tied, tied=False), "mup", seed=seed),
    ]


def _case(name: str, network: str, setting: Setting, layer: str, powers: tuple[float, float, float], seed: int) -> Case:
    sign = 1 if sum(powers) > 0 else -1
    planted = replace(setting, planted={layer: powers})
    said = f"{network} {setting.update} {setting.scheme}: {name}"
    return Case(said, network, planted, setting.scheme, layer, sign, seed)


def _planted(depth: int, activation: Activation, seed: int) -> list[Case]:
    mup = Setting("mup", "adam", 0.003, attention=-1.0, depth=depth, activation=activation)
    sgd = Setting("mup", "sgd", 0.05, attention=-1.0, depth=depth, activation=activation)
    tied = replace(mup, scheme="mup multiplier", tied=True)
    ntk, standard = Setting("ntk", "sgd", 0.05, depth=depth), Setting("standard", "adam", 0.003, depth=depth)
    last = depth - 1
    errors = [
        ("readout drawn as 1/sqrt(n)", "mlp", mup, "readout", (0, 0.5, 0)),
        ("readout drawn as 1/sqrt(n)", "gpt", sgd, "readout", (0, 0.5, 0)),
        ("rate of one hidden layer constant", "mlp", mup, f"hidden.{last}", (0, 0, 1)),
        ("rate of one hidden layer constant", "gpt", mup, f"blocks.{last}.down", (0, 0, 1)),
        ("rate of the input constant", "cnn", sgd, "first", (0, 0, -1)),
        ("attention 1/sqrt(d)", "gpt", mup, f"blocks.{last}.attention", (0.5, 0, 0)),
        ("tied readout without its multiplier", "gpt", tied, "readout", (1, 0, 0)),
        ("rate of the embedding 1/n", "gpt", mup, "tokens", (0, 0, -1)),
        ("one hidden layer drawn as 1/n", "cnn", mup, "hidden.0", (0, -0.5, 0)),
        ("rate of the readout 1/n too small", "mlp", ntk, "readout", (0, 0, -1)),
        ("rate of the readout constant", "cnn", mup, "readout", (0, 0, 1)),
        ("value projection drawn of order one", "gpt", standard, "blocks.0.value", (0, 0.5, 0)),
    ]
    return [_case(*error, seed) for error in errors]


def _unseen(depth: int, activation: Activation, seed: int) -> list[Case]:
    """Kinds of errors on which nothing was calibrated."""
    mup = Setting("mup", "adam", 0.003, attention=-1.0, depth=depth, activation=activation)
    sgd = Setting("mup", "sgd", 0.05, attention=-1.0, depth=depth, activation=activation)
    mean, ntk = (Setting(name, "sgd", 0.05, depth=depth, activation=activation) for name in ("mean_field", "ntk"))
    standard = Setting("standard", "adam", 0.003, depth=depth, activation=activation)
    errors = [
        ("rate of a bias grows", "mlp", mup, "hidden.1.bias", (0, 0, 1)),
        ("rate of a query grows", "gpt", sgd, "blocks.0.query", (0, 0, 1)),
        ("attention without a scale", "gpt", standard, "blocks.1.attention", (0.5, 0, 0)),
        ("readout divided by sqrt(n) only", "cnn", mean, "readout", (0.5, 0, 0)),
        ("rate of a hidden layer 1/n", "cnn", ntk, "hidden.1", (0, 0, -1)),
        ("rate of a hidden layer 1/sqrt(n)", "gpt", mup, "blocks.0.up", (0, 0, 0.5)),
        ("positions drawn as 1/sqrt(n)", "gpt", mup, "places", (0, -0.5, 0)),
        ("multiplier of a hidden layer forgotten", "mlp", ntk, "hidden.1", (0.5, 0, 0)),
    ]
    return [_case(*error, seed) for error in errors]


CALIBRATION = [
    *_schemes({"mlp": 2, "cnn": 2, "gpt": 1}, functional.relu, 0),
    *_known(0, 1),
    *_planted(2, functional.relu, 0),
]
DEVELOPMENT = [
    *_schemes({"mlp": 4, "cnn": 1, "gpt": 2}, torch.tanh, 11),
    *_known(11, 2),
    *_planted(3, functional.gelu, 11),
]
HELD_OUT = [
    *_schemes({"mlp": 3, "cnn": 3, "gpt": 3}, functional.silu, 23),
    *_known(23, 3),
    *_planted(4, torch.tanh, 23),
    *_unseen(2, functional.elu, 23),
]
SUITES = {"calibration": CALIBRATION, "development": DEVELOPMENT, "held-out": HELD_OUT}
"""Thresholds were set on the first; the second was looked at once, and one measure changed after it; nothing was
changed after the third."""
