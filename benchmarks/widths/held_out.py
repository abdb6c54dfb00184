"""Sixty held-out cases for `fl.scale_check`: thirty clean networks and thirty planted errors, by hand.

    python -m benchmarks.widths.held_out [--only TEXT]

A line per case: the scheme and phase by construction, those that were said, the planted error, the problems that were
named, and seconds. Status 1 if fewer than 57 schemes and phases are right, a planted error is not located to its
parameter, sign and power, or more than one clean network has a problem.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional

import featlearn as fl
from benchmarks.widths import held_out_networks as networks
from featlearn.widths import WidthCheck

BASE = 16
SMALL = (16, 32, 64, 128)
LARGE = (32, 64, 128, 256)
HIDDEN = ["one.weight", "two.weight", "*.q.weight", "*.k.weight", "*.v.weight", "*.o.weight", "*.up.weight"]
HIDDEN += [
    "*.down.weight",
    "*.gate.weight",
    "first.weight",
    "second.weight",
    "skip.weight",
    "block.*weight",
    "cell.weight*",
]
HIDDEN += ["up", "down", "experts.*.weight", "middle.weight"]
INPUT = ["enter.weight", "tokens.weight", "places", "stem.weight", "patch.weight", "down.weight", "token"]
OUTPUT = ["exit.weight", "head.weight", "router.weight", "up.weight"]
VECTOR_LIKE = ["*norm*"]

# powers of standard deviation and rate at a parameter, beyond the network's own draw of 1 / sqrt(fan_in)
SCHEMES: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("standard", "sgd"): {},
    ("standard", "adam"): {},
    ("mup", "sgd"): {"input": (0, 1), "vector": (0, 1), "output": (-0.5, -1)},
    ("mup", "adam"): {"hidden": (0, -1), "output": (-0.5, -1)},
    ("mup", "muon"): {"output": (-0.5, -1)},
    ("standard", "muon"): {},
}


def kind_of(name: str, parameter: torch.Tensor) -> str:
    """Kind of a parameter, by its name."""
    if name in ("exit.bias", "head.bias", "up.bias"):
        return "finite"
    if parameter.dim() < 2 or any(fnmatch(name, pattern) for pattern in VECTOR_LIKE):
        return "vector"
    for kind, patterns in (("hidden", HIDDEN), ("output", OUTPUT), ("input", INPUT)):
        if any(fnmatch(name, pattern) for pattern in patterns):
            return kind
    raise ValueError(name)


@dataclass(frozen=True)
class Case:
    """A network, and what the check should say of it."""

    name: str
    make: Callable[[int], Any]
    data: str
    scheme: str
    phase: str
    parameter: str | None = None
    """of the planted error"""
    power: float = 0.0
    sizes: tuple[int, ...] = SMALL
    along: str = "width"
    loss: Any = "mse"


CASES: list[Case] = []
ENTROPY = functional.cross_entropy


def add(
    name: str,
    network: Callable[[int], nn.Module],
    data: str,
    scheme: str,
    optimizer: str,
    phase: str,
    *,
    lr: float | None = None,
    shift: float = 0.0,
    std: dict[str, float] | None = None,
    rates: dict[str, float] | None = None,
    parameter: str | None = None,
    power: float = 0.0,
    sizes: tuple[int, ...] = SMALL,
    scale: str = "spectral",
    bare: bool = False,
) -> None:
    """Add a case: a network in a scheme, with errors in standard deviations or rates of single parameters."""
    kind = optimizer if optimizer in ("sgd", "muon") else "adam"
    table = {} if bare else SCHEMES[scheme, kind]

    def make(n: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, ratio, groups = network(n), n / sizes[0], []
        rate = lr if lr is not None else 0.05 if kind == "sgd" else 0.002
        for key, p in model.named_parameters():
            deviation, speed = table.get("vector" if bare else kind_of(key, p), (0.0, 0.0))
            p.data.mul_(ratio ** (deviation + (std or {}).get(key, 0.0)))
            group = {"params": [p], "lr": rate * ratio ** (speed + shift + (rates or {}).get(key, 0.0))}
            if kind == "muon" and kind_of(key, p) == "hidden" and p.dim() == 2:
                group |= {"scale": scale, "lr": 5 * group["lr"]}
            groups.append(group)
        classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": networks.Muon}
        return model, classes[optimizer](groups)

    loss = ENTROPY if data.endswith(("classes", "next")) else "mse"
    CASES.append(Case(name, make, data, scheme, phase, parameter, power, sizes, "width", loss))


gpt, gated = networks.GPT, lambda n, **more: networks.GPT(n, gated=True, qk_norm=True, **more)
UNSTABLE, KERNEL, LEARNING, CONTROLLED = "unstable", "kernel", "learning", "controlled divergence"

# thirty clean networks
add("bare ntk", lambda n: networks.Bare(n, "ntk"), "vectors three", "ntk", "sgd", KERNEL, bare=True, sizes=LARGE)
add(
    "bare mean field",
    lambda n: networks.Bare(n, "mean_field"),
    "vectors three",
    "mean_field",
    "sgd",
    LEARNING,
    shift=1,
    bare=True,
    sizes=LARGE,
)
add(
    "bare ntk, adam", lambda n: networks.Bare(n, "ntk", torch.relu), "vectors three", "ntk", "adam", UNSTABLE, bare=True
)
add("bare ntk, classes", lambda n: networks.Bare(n, "ntk"), "vectors classes", "ntk", "sgd", KERNEL, bare=True)
add(
    "committee by sqrt",
    lambda n: networks.Committee(n, False),
    "vectors one",
    "ntk",
    "sgd",
    KERNEL,
    bare=True,
    sizes=LARGE,
)
add(
    "committee, mean",
    lambda n: networks.Committee(n, True),
    "vectors one",
    "mean_field",
    "sgd",
    LEARNING,
    shift=1,
    bare=True,
    sizes=LARGE,
)
add("deep linear", networks.DeepLinear, "vectors two", "standard", "sgd", UNSTABLE, bare=True)
add("deep linear, rate 1/n", networks.DeepLinear, "vectors two", "standard", "sgd", KERNEL, shift=-1, bare=True)
add("perceptron", networks.Perceptron, "vectors three", "standard", "sgd", UNSTABLE, sizes=LARGE)
add(
    "perceptron n^-1/2, mse", networks.Perceptron, "vectors three", "standard", "sgd", UNSTABLE, shift=-0.5, sizes=LARGE
)
add("perceptron n^-1/2, classes", networks.Perceptron, "vectors classes", "standard", "sgd", CONTROLLED, shift=-0.5)
add("perceptron n^-1/4, classes", networks.Perceptron, "vectors classes", "standard", "sgd", UNSTABLE, shift=-0.25)
add("perceptron 1/n, adam, classes", networks.Perceptron, "vectors classes", "standard", "adam", CONTROLLED, shift=-1)
add("perceptron mup", networks.Perceptron, "vectors three", "mup", "sgd", LEARNING)
add("perceptron mup, adamw", networks.Perceptron, "vectors classes", "mup", "adamw", LEARNING)
add("gpt", gpt, "tokens next", "standard", "adamw", UNSTABLE)
add("gpt mup", lambda n: gpt(n, power=-1.0), "tokens next", "mup", "adam", LEARNING)
add("gpt gated, qk-norm", gated, "tokens next", "standard", "adam", UNSTABLE)
add("gpt gated, qk-norm, mup", lambda n: gated(n, power=-1.0), "tokens next", "mup", "adamw", LEARNING)
add("gpt muon", gpt, "tokens next", "standard", "muon", CONTROLLED)
add("gpt muon, unit RMS", gpt, "tokens next", "standard", "muon", UNSTABLE, scale="unit RMS")
add("gpt gated muon, mup", lambda n: gated(n, power=-1.0), "tokens next", "mup", "muon", LEARNING)
add("resnet", networks.ResNet, "images classes", "standard", "sgd", UNSTABLE)
add("resnet groups, mup", lambda n: networks.ResNet(n, False), "images classes", "mup", "sgd", LEARNING)
add("vit", networks.ViT, "images classes", "standard", "adamw", UNSTABLE)
add("lstm", networks.Recurrent, "tokens classes", "standard", "adam", UNSTABLE)
add("lstm mup", lambda n: networks.Recurrent(n, 1), "tokens classes", "mup", "sgd", LEARNING)
add("mixture", networks.Mixture, "vectors three", "standard", "adam", UNSTABLE)
add("routed, mup", networks.Routed, "vectors classes", "mup", "adam", LEARNING)
add("autoencoder", networks.Autoencoder, "images same", "standard", "sgd", UNSTABLE)


def plant(
    name: str, network: Any, data: str, scheme: str, optimizer: str, phase: str, where: str, **error: Any
) -> None:
    """Add a case with an error in the standard deviation or in the rate of one parameter."""
    std, rate = error.pop("std", 0.0), error.pop("rate", 0.0)
    errors = {"std": {where: std}, "rates": {where: rate}}
    add(name, network, data, scheme, optimizer, phase, parameter=where, power=std or rate, **errors, **error)


# thirty planted errors
plant(
    "bare ntk, B", lambda n: networks.Bare(n, "ntk"), "vectors three", "ntk", "sgd", UNSTABLE, "B", std=0.5, bare=True
)
plant(
    "bare ntk, rate of C",
    lambda n: networks.Bare(n, "ntk"),
    "vectors three",
    "ntk",
    "sgd",
    KERNEL,
    "C",
    rate=-1,
    bare=True,
)
plant(
    "bare ntk, rate of V",
    lambda n: networks.Bare(n, "ntk"),
    "vectors classes",
    "ntk",
    "sgd",
    KERNEL,
    "V",
    rate=-1,
    bare=True,
)
plant(
    "bare mean field, A",
    lambda n: networks.Bare(n, "mean_field"),
    "vectors three",
    "mean_field",
    "sgd",
    LEARNING,
    "A",
    std=-0.5,
    shift=1,
    bare=True,
)
plant(
    "bare mean field, rate of B",
    lambda n: networks.Bare(n, "mean_field"),
    "vectors three",
    "mean_field",
    "sgd",
    LEARNING,
    "B",
    rate=-1,
    shift=1,
    bare=True,
)
plant(
    "committee, rate of W",
    lambda n: networks.Committee(n, True),
    "vectors one",
    "mean_field",
    "sgd",
    UNSTABLE,
    "W",
    rate=1,
    shift=1,
    bare=True,
)
plant(
    "deep linear, second",
    networks.DeepLinear,
    "vectors two",
    "standard",
    "sgd",
    UNSTABLE,
    "weights.1",
    std=0.5,
    bare=True,
)
plant("perceptron, two", networks.Perceptron, "vectors three", "standard", "sgd", UNSTABLE, "two.weight", std=0.5)
plant(
    "perceptron n^-1/2, rate of one",
    networks.Perceptron,
    "vectors classes",
    "standard",
    "sgd",
    UNSTABLE,
    "one.weight",
    rate=1,
    shift=-0.5,
)
plant("perceptron mup, readout", networks.Perceptron, "vectors three", "mup", "adam", UNSTABLE, "exit.weight", std=0.5)
plant(
    "perceptron mup, readout, classes",
    networks.Perceptron,
    "vectors classes",
    "mup",
    "adam",
    CONTROLLED,
    "exit.weight",
    std=0.5,
)
plant(
    "perceptron mup, rate of one", networks.Perceptron, "vectors three", "mup", "adamw", UNSTABLE, "one.weight", rate=1
)
plant(
    "perceptron mup, rate of a bias", networks.Perceptron, "vectors three", "mup", "adam", LEARNING, "two.bias", rate=1
)
plant(
    "gpt, value projection", gpt, "tokens next", "standard", "adamw", UNSTABLE, "blocks.0.attention.v.weight", std=0.5
)
plant(
    "gpt, output projection", gpt, "tokens next", "standard", "adam", UNSTABLE, "blocks.1.attention.o.weight", std=-0.5
)
plant(
    "gpt mup, rate of down",
    lambda n: gpt(n, power=-1.0),
    "tokens next",
    "mup",
    "adam",
    UNSTABLE,
    "blocks.1.mlp.down.weight",
    rate=1,
)
plant(
    "gpt mup, rate of up slow",
    lambda n: gpt(n, power=-1.0),
    "tokens next",
    "mup",
    "adamw",
    LEARNING,
    "blocks.0.mlp.up.weight",
    rate=-1,
)
plant(
    "gpt mup, embedding", lambda n: gpt(n, power=-1.0), "tokens next", "mup", "adam", LEARNING, "tokens.weight", rate=-1
)
plant("gpt mup, places", lambda n: gpt(n, power=-1.0), "tokens next", "mup", "adam", LEARNING, "places", std=-0.5)
plant("gated, gate", gated, "tokens next", "standard", "adam", UNSTABLE, "blocks.0.mlp.gate.weight", std=0.5)
plant(
    "gated mup, query",
    lambda n: gated(n, power=-1.0),
    "tokens next",
    "mup",
    "adam",
    UNSTABLE,
    "blocks.1.attention.q.weight",
    rate=0.5,
)
plant("gpt muon, rate of one", gpt, "tokens next", "standard", "muon", UNSTABLE, "blocks.0.attention.k.weight", rate=1)
plant(
    "gpt muon mup, head", lambda n: gpt(n, power=-1.0), "tokens next", "mup", "muon", CONTROLLED, "head.weight", rate=1
)
plant("resnet, second", networks.ResNet, "images classes", "standard", "sgd", UNSTABLE, "second.weight", std=0.5)
plant(
    "resnet mup, stem",
    lambda n: networks.ResNet(n, False),
    "images classes",
    "mup",
    "sgd",
    LEARNING,
    "stem.weight",
    rate=-1,
)
plant(
    "vit, second linear", networks.ViT, "images classes", "standard", "adamw", UNSTABLE, "block.linear2.weight", std=0.5
)
plant(
    "vit mup, in_proj",
    networks.ViT,
    "images classes",
    "standard",
    "adam",
    UNSTABLE,
    "block.self_attn.in_proj_weight",
    rate=-1,
)
plant(
    "lstm, recurrent weight",
    lambda n: networks.Recurrent(n, 1),
    "tokens classes",
    "standard",
    "adam",
    UNSTABLE,
    "cell.weight_hh_l0",
    std=0.5,
)
plant("mixture mup, experts", networks.Mixture, "vectors three", "mup", "adam", UNSTABLE, "down", rate=1)
plant("autoencoder, middle", networks.Autoencoder, "images same", "standard", "sgd", UNSTABLE, "middle.weight", std=0.5)


def checked(case: Case, seeds: int = 3) -> WidthCheck:
    """What the check says of a case."""
    data = networks.batch(case.data)
    return fl.scale_check(case.make, data, sizes=case.sizes, along=case.along, loss=case.loss, seeds=seeds)


def located(case: Case, check: WidthCheck) -> bool:
    """Whether the planted parameter alone is named, with its power; no parameter where no error was planted."""
    if case.parameter is None:
        return not check.problems
    return bool(check.problems) and all(
        problem.parameter == case.parameter and abs(float(problem.power) - case.power) < 0.2
        for problem in check.problems
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    schemes = alarms = places = 0
    seconds: list[float] = []
    for case in cases:
        begun = time.process_time()
        check = checked(case, options.seeds)
        seconds.append(time.process_time() - begun)
        right, place = (check.scheme, str(check.phase)) == (case.scheme, case.phase), located(case, check)
        schemes += right
        alarms += case.parameter is None and not place
        places += case.parameter is not None and place
        problems = "; ".join(f"{p.parameter} {p.quantity} {float(p.power):+.2f} {p.tried}" for p in check.problems)
        aim = f" [{case.parameter} {case.power:+g}]" if case.parameter else ""
        print(
            f"{'ok  ' if right and place else 'MISS'} {case.name + aim:66} {check.scheme:11}{check.phase!s:22}"
            f"{'' if right else f'({case.scheme} {case.phase}) '}{problems or '-'}  ({seconds[-1]:.0f} s)",
            flush=True,
        )
    planted = sum(case.parameter is not None for case in cases)
    print(
        f"scheme and phase: {schemes} of {len(cases)}; located: {places} of {planted}; false alarms: {alarms} of "
        f"{len(cases) - planted}; {sum(seconds) / len(seconds):.0f} s of one core a case, at most {max(seconds):.0f}"
    )
    return 0 if schemes >= 0.95 * len(cases) and places == planted and alarms <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
