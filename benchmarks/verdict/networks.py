"""The networks that are trained: perceptrons in three parametrizations, convolutions, attention, factored models."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


class Square(nn.Module):
    """h^2"""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class ScaledLinear(nn.Module):
    """A linear layer whose weights start at N(0, 1) and are multiplied where they are used."""

    def __init__(self, inputs: int, outputs: int, multiplier: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.multiplier * x, self.weight, self.bias)


def scaled_mlp(
    sizes: Sequence[int], output: float, activation: Activation = nn.ReLU, gain: float = 1.0, bias: bool = True
) -> nn.Sequential:
    """Hidden layers times gain / sqrt(fan-in), the readout times output: 1 / sqrt(N) for NTK, 1 / N for mean field."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes[:-1]):
        layers += [ScaledLinear(n, m, gain / math.sqrt(n), bias), activation()]
    return nn.Sequential(*layers, ScaledLinear(sizes[-2], sizes[-1], output, bias=False))


def mlp(
    sizes: Sequence[int],
    activation: Activation = nn.ReLU,
    *,
    norm: Callable[[int], nn.Module] | None = None,
    dropout: float = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """A perceptron as torch initializes it."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(n, m, bias), *([norm(m)] if norm else []), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1], bias))


def cnn(
    channels: tuple[int, int],
    outputs: int,
    *,
    activation: Activation = nn.ReLU,
    size: int = 3,
    pool: int = 2,
    norm: Callable[[int], nn.Module] | None = None,
) -> nn.Sequential:
    """Two convolutions on images of 8 x 8, the second of stride 2, an average over patches, a readout."""
    first, second = channels
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, first, size, padding=size // 2),
        *([norm(first)] if norm else []),
        activation(),
        nn.Conv2d(first, second, 3, 2, 1),
        *([norm(second)] if norm else []),
        activation(),
        nn.AdaptiveAvgPool2d(pool),
        nn.Flatten(),
        nn.Linear(pool**2 * second, outputs),
    )


class Block(nn.Module):
    """Attention of several heads and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Rows of an image of 8 x 8 as tokens; their mean is read."""

    def __init__(self, outputs: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(8, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unflatten(1, (8, 8))) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class DiagonalLinear(nn.Module):
    """f = sum_j (u_j^depth - v_j^depth) x_j, all weights equal at first (Woodworth et al. 2020): f starts at zero."""

    def __init__(self, inputs: int, start: float, depth: int = 2) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.full((inputs,), start)) for _ in range(2))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.u**self.depth - self.v**self.depth))[:, None]


class Difference(nn.Module):
    """Two copies of a network, one minus the other over sqrt(2): the same kernel, and an output that starts at zero."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.plus, self.minus = network, copy.deepcopy(network)

    def forward(self, x: Tensor) -> Tensor:
        return (self.plus(x) - self.minus(x)) / math.sqrt(2)


class Multiplied(nn.Module):
    """A network times a number, nothing subtracted."""

    def __init__(self, network: nn.Module, factor: float) -> None:
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.network(x)


def frozen(model: nn.Sequential, trained: int = 1) -> nn.Sequential:
    """All but the last modules frozen."""
    for module in list(model)[:-trained]:
        module.requires_grad_(False)
    return model


def zero_readout(model: nn.Sequential) -> nn.Sequential:
    """The last layer set to zero, so that the output starts at zero."""
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    return model


def small(model: nn.Module, factor: float) -> nn.Module:
    """All parameters, biases too, multiplied."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model
