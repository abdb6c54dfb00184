"""Perceptrons, convolutional networks and small language models in each parametrization, written out by hand.

Every weight has a multiplier, a standard deviation and a learning rate, each a power of width / BASE; `planted` adds
to these powers for single layers. Nothing here comes from `featlearn`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BASE = 64
SEVEN = 7
"""inputs of the perceptron"""
TOKENS = 24
Powers = tuple[float, float, float]
"""of multiplier, standard deviation and rate"""

# (multiplier, standard deviation, rate) for input, hidden, output weights, and the rate of vectors
SCHEMES: dict[tuple[str, str], tuple[Powers, Powers, Powers, float]] = {
    ("standard", "sgd"): ((0, 0, 0), (0, -0.5, 0), (0, -0.5, 0), 0),
    ("ntk", "sgd"): ((0, 0, 0), (-0.5, 0, 0), (-0.5, 0, 0), 0),
    ("mean_field", "sgd"): ((0, 0, 1), (-0.5, 0, 1), (-1, 0, 1), 1),
    ("mup", "sgd"): ((0, 0, 1), (0, -0.5, 0), (0, -1, -1), 1),
    ("standard", "adam"): ((0, 0, 0), (0, -0.5, 0), (0, -0.5, 0), 0),
    ("ntk", "adam"): ((0, 0, 0), (-0.5, 0, 0), (-0.5, 0, 0), 0),
    ("mean_field", "adam"): ((0, 0, 0), (-0.5, 0, 0), (-1, 0, 0), 0),
    ("mup", "adam"): ((0, 0, 0), (0, -0.5, -1), (0, -1, -1), 0),
    # Yang & Hu 2021: one rate for all; Yang et al. 2022, Table 8: a readout of order one behind a multiplier
    ("mup one rate", "sgd"): ((0.5, -0.5, 0), (0, -0.5, 0), (-0.5, -0.5, 0), 1),
    ("mup multiplier", "adam"): ((0, 0, 0), (0, -0.5, -1), (-1, 0, 0), 0),
}


@dataclass(frozen=True)
class Setting:
    """How a network is parametrized."""

    scheme: str
    update: str
    lr: float = 0.05
    planted: Mapping[str, Powers] = field(default_factory=dict)
    zero_readout: bool = False
    attention: float = -0.5
    """power of the size of a head"""
    tied: bool = False
    head: int | None = None
    """size of a head, where the number of heads grows instead"""
    activation: Callable[[Tensor], Tensor] = functional.relu
    depth: int = 2
    bias: bool = True

    def powers(self, kind: str, name: str) -> Powers:
        """Of a weight."""
        row = SCHEMES[self.scheme, self.update][("input", "hidden", "output").index(kind)]
        extra = self.planted.get(name, (0.0, 0.0, 0.0))
        return (row[0] + extra[0], row[1] + extra[1], row[2] + extra[2])


class Map(nn.Module):
    """A linear map, dense or a convolution, times a multiplier."""

    def __init__(self, kind: str, name: str, shape: tuple[int, ...], width: int, setting: Setting) -> None:
        super().__init__()
        ratio = width / BASE
        multiplier, deviation, rate = setting.powers(kind, name)
        fan_in = math.prod(shape[1:])
        at_base = fan_in if kind == "input" else fan_in * BASE / width
        gain = 2**0.5 if kind == "hidden" and setting.activation is functional.relu else 1.0
        zero = setting.zero_readout and kind == "output"
        self.weight = nn.Parameter(torch.randn(shape) * (0.0 if zero else gain * at_base**-0.5 * ratio**deviation))
        self.multiplier = ratio**multiplier
        self.rate = setting.lr * ratio**rate
        more = setting.planted.get(f"{name}.bias", (0.0, 0.0, 0.0))[2]
        self.vector_rate = setting.lr * ratio ** (SCHEMES[setting.scheme, setting.update][3] + more)
        own = setting.bias and kind != "output"
        self.bias = nn.Parameter(torch.zeros(shape[0])) if own else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 2:
            return functional.conv2d(self.multiplier * x, self.weight, self.bias, padding=1)
        return functional.linear(self.multiplier * x, self.weight, self.bias)


class Perceptron(nn.Module):
    def __init__(self, width: int, setting: Setting, outputs: int = 3) -> None:
        super().__init__()
        self.activation = setting.activation
        self.first = Map("input", "first", (width, SEVEN), width, setting)
        self.hidden = nn.ModuleList(
            Map("hidden", f"hidden.{i}", (width, width), width, setting) for i in range(setting.depth)
        )
        self.readout = Map("output", "readout", (outputs, width), width, setting)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        for layer in self.hidden:
            x = self.activation(layer(x))
        return self.readout(x)


class Convolutional(nn.Module):
    def __init__(self, width: int, setting: Setting) -> None:
        super().__init__()
        self.activation = setting.activation
        self.first = Map("input", "first", (width, 2, 3, 3), width, setting)
        self.hidden = nn.ModuleList(
            Map("hidden", f"hidden.{i}", (width, width, 3, 3), width, setting) for i in range(setting.depth)
        )
        self.readout = Map("output", "readout", (4, width), width, setting)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        for layer in self.hidden:
            x = self.activation(layer(x))
        return self.readout(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, name: str, width: int, setting: Setting) -> None:
        super().__init__()

        def hidden(part: str, outputs: int, inputs: int) -> Map:
            return Map("hidden", f"{name}.{part}", (outputs, inputs), width, setting)

        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (hidden(part, width, width) for part in ("query", "key", "value"))
        self.mix = hidden("mix", width, width)
        self.up, self.down = hidden("up", 2 * width, width), hidden("down", width, 2 * width)
        self.heads = 2 if setting.head is None else width // setting.head
        size = width // self.heads
        power = setting.attention + setting.planted.get(f"{name}.attention", (0.0,))[0]
        self.scale = (BASE / 2) ** (-0.5 - power) * size**power

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        split = [one(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True, scale=self.scale)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int, name: str, setting: Setting) -> None:
        super().__init__()
        ratio = width / BASE
        self.multiplier, deviation, rate = setting.powers("input", name)
        self.multiplier = ratio**self.multiplier
        self.weight = nn.Parameter(0.5 * ratio**deviation * torch.randn(rows, width))
        self.rate = setting.lr * ratio**rate

    def forward(self, tokens: Tensor) -> Tensor:
        return self.multiplier * functional.embedding(tokens, self.weight)


class Language(nn.Module):
    """A decoder: embeddings, blocks with attention, a readout that may be tied."""

    def __init__(self, width: int, setting: Setting) -> None:
        super().__init__()
        self.tokens = Embedding(TOKENS, width, "tokens", setting)
        self.places = Embedding(64, width, "places", setting)
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", width, setting) for i in range(setting.depth))
        self.norm = nn.LayerNorm(width)
        self.readout = Map("output", "readout", (TOKENS, width), width, setting)
        if setting.tied:
            self.readout.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


NETWORKS: dict[str, Callable[[int, Setting], nn.Module]] = {
    "mlp": Perceptron,
    "cnn": Convolutional,
    "gpt": Language,
}


def groups(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    """One group for each parameter, with its rate; a tied one has that of the embedding."""
    rates: dict[nn.Parameter, float] = {}
    width = next(iter(model.parameters())).shape[0 if not isinstance(model, Language) else 1]
    norms = setting.lr * (width / BASE) ** SCHEMES[setting.scheme, setting.update][3]
    for module in model.modules():
        own = getattr(module, "rate", norms), getattr(module, "vector_rate", norms)
        for name, parameter in module.named_parameters(recurse=False):
            rates.setdefault(parameter, own[0] if name == "weight" else own[1])
    return [{"params": [parameter], "lr": rate} for parameter, rate in rates.items()]


def made(kind: str, setting: Setting, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer."""
    model = NETWORKS[kind](width, setting)
    optimizer = torch.optim.SGD if setting.update == "sgd" else torch.optim.Adam
    return model, optimizer(groups(model, setting))


def batch(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "mlp":
        x = torch.randn(24, SEVEN, generator=generator)
        return x, torch.sin(2 * x[:, :3]) + x[:, 3:6] * x[:, :3]
    if kind == "cnn":
        x = torch.randn(12, 2, 6, 6, generator=generator)
        return x, (x.amax((2, 3)) > 2.2).long() @ torch.tensor([1, 2])
    steps = torch.randint(1, 5, (8, 1), generator=generator)
    start = torch.randint(TOKENS, (8, 1), generator=generator)
    tokens = (start + steps * torch.arange(13)) % TOKENS
    return tokens[:, :-1], tokens[:, 1:]
