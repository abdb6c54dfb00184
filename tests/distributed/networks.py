"""Small networks in double, the same on every rank."""

import torch
from torch import Tensor, nn


def perceptron(outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


def convolution() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 3)
    ).double()


class Attention(nn.Module):
    """Tokens, a tied table, a position table, attention and a fallback for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.places = nn.Parameter(torch.randn(4, 6) / 3)
        self.layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.scale(self.layer(self.table(tokens) + self.places))
        return (hidden @ self.table.weight.T)[:, -1, :3]


def attention() -> nn.Module:
    torch.manual_seed(5)
    return Attention().double()


class Heads(nn.Module):
    """A weight whose entries a product takes in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.last = nn.Parameter(torch.randn(4, 64, 16) / 8), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.einsum("ptd,hde->pthe", x, self.heads).tanh().mean((1, 2)))


def heads() -> nn.Module:
    torch.manual_seed(7)
    return Heads().double()


class Branches(nn.Module):
    """Samples with a positive first entry use one layer, the others another one: decided sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [(self.first if float(row[0].detach()) > 0 else self.second)(row) for row in x]
        return self.last(torch.stack(rows).tanh())


def branches() -> nn.Module:
    torch.manual_seed(6)
    return Branches().double()


def inputs(samples: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)


def tokens(samples: int) -> Tensor:
    return torch.randint(11, (samples, 4), generator=torch.Generator().manual_seed(1))


CASES = {
    "perceptron": (perceptron, lambda n: inputs(n, 5)),
    "convolution": (convolution, lambda n: inputs(n, 2, 6, 6)),
    "attention": (attention, tokens),
    "branches": (branches, lambda n: inputs(n, 5)),
}
