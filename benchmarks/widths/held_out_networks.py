"""Networks of the held-out suite, written out by hand. Nothing here comes from `featlearn`."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 20


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer with entries of standard deviation 1 / sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Bare(nn.Module):
    """Theory code: all parameters in one module; factors on parameters, before and behind products."""

    def __init__(self, n: int, scheme: str, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(n, 6))
        self.B = nn.Parameter(torch.randn(n, n))
        self.C = nn.Parameter(torch.randn(n, n))
        self.V = nn.Parameter(torch.randn(3, n))
        self.activation, self.n, self.scheme = activation, n, scheme

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(x @ self.A.T / 6**0.5)
        h = self.activation(torch.einsum("ij,bj->bi", self.B / self.n**0.5, h))
        h = self.activation((h / self.n**0.5) @ self.C.T)
        return h @ self.V.T / (self.n if self.scheme == "mean_field" else self.n**0.5)


class Committee(nn.Module):
    """Two layers, the readout a product and a mean."""

    def __init__(self, n: int, mean: bool) -> None:
        super().__init__()
        self.W, self.a, self.mean = nn.Parameter(torch.randn(n, 6)), nn.Parameter(torch.randn(n)), mean

    def forward(self, x: Tensor) -> Tensor:
        h = self.a * torch.relu(x @ self.W.T / 6**0.5)
        return h.mean(-1, keepdim=True) if self.mean else h.sum(-1, keepdim=True) / h.shape[-1] ** 0.5


class DeepLinear(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        sizes = [6, n, n, n, 2]
        self.weights = nn.ParameterList(torch.randn(i, o) / i**0.5 for i, o in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Perceptron(nn.Module):
    def __init__(self, n: int, outputs: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.enter, self.one, self.two = linear(6, n, bias), linear(n, n, bias), linear(n, n, bias)
        self.exit = linear(n, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.enter, self.one, self.two):
            x = functional.silu(layer(x))
        return self.exit(x)


class RMSNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, n: int, power: float, qk_norm: bool, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(n, n) for _ in range(4))
        self.heads, self.power = heads, power
        self.norm = RMSNorm(n // heads) if qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        d = q.shape[-1]
        scores = q @ k.transpose(-1, -2) * (8**-0.5 * (d / 8) ** self.power)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return self.o((scores.masked_fill(mask, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(n, 2 * n), linear(n, 2 * n), linear(2 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class PlainMLP(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.up, self.down = linear(n, 2 * n, True), linear(2 * n, n, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class GPTBlock(nn.Module):
    def __init__(self, n: int, power: float, qk_norm: bool, gated: bool) -> None:
        super().__init__()
        norm = RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(n), norm(n)
        self.attention, self.mlp = Attention(n, power, qk_norm), GatedMLP(n) if gated else PlainMLP(n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        n: int,
        *,
        power: float = -0.5,
        qk_norm: bool = False,
        gated: bool = False,
        tied: bool = False,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, n), nn.Parameter(0.3 * torch.randn(10, n))
        self.blocks = nn.ModuleList(GPTBlock(n, power, qk_norm, gated) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(n), linear(n, TOKENS)
        self.multiplier = multiplier
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return (self.multiplier * self.head(self.norm(x))).transpose(1, 2)


class ResNet(nn.Module):
    def __init__(self, n: int, batch_norm: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else (lambda channels: nn.GroupNorm(4, channels))
        self.stem = self.conv(3, n)
        self.first, self.second, self.skip = self.conv(n, n), self.conv(n, 2 * n), self.conv(n, 2 * n, 1)
        self.norm1, self.norm2, self.norm3 = norm(n), norm(2 * n), norm(n)
        self.head = linear(2 * n, 4)

    @staticmethod
    def conv(inputs: int, outputs: int, size: int = 3) -> nn.Conv2d:
        layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
        nn.init.normal_(layer.weight, std=(inputs * size**2) ** -0.5)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm3(self.stem(x)))
        y = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(y)) + self.skip(x))
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, n, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, n)), nn.Parameter(torch.randn(1, 5, n))
        self.block = nn.TransformerEncoderLayer(n, 2, 2 * n, 0.0, "gelu", batch_first=True, norm_first=True)
        for weight in (self.block.self_attn.in_proj_weight, self.block.self_attn.out_proj.weight):
            nn.init.normal_(weight, std=n**-0.5)
        self.norm, self.head = nn.LayerNorm(n), linear(n, 4, True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.block(x))[:, 0])


class Recurrent(nn.Module):
    def __init__(self, n: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(TOKENS, n), nn.LSTM(n, n, layers, batch_first=True)
        self.head = linear(n, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.tokens(tokens))[0][:, -1])


class Mixture(nn.Module):
    """A softmax over four experts, all of which run."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.enter, self.router, self.exit = linear(6, n), linear(n, 4), linear(n, 3)
        self.up = nn.Parameter(torch.randn(4, n, n) / n**0.5)
        self.down = nn.Parameter(torch.randn(4, n, n) / n**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        each = torch.einsum("ebf,efg->ebg", torch.relu(torch.einsum("bf,efg->ebg", h, self.up)), self.down)
        return self.exit(h + torch.einsum("be,ebf->bf", self.router(h).softmax(-1), each))


class Routed(nn.Module):
    """One expert per sample."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.enter, self.router, self.exit = linear(6, n), linear(n, 2), linear(n, 3)
        self.experts = nn.ModuleList(nn.Sequential(linear(n, n), nn.GELU(), linear(n, n)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        chances = self.router(h).softmax(-1)
        best, where = chances.max(-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (where == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, best[rows, None] * expert(h[rows]))
        return self.exit(h + out)


class Autoencoder(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, n, 2, stride=2), nn.Conv2d(n, n, 1)
        self.up = nn.ConvTranspose2d(n, 3, 2, stride=2)
        for layer, fan_in in ((self.down, 12), (self.middle, n), (self.up, n)):
            nn.init.normal_(layer.weight, std=fan_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.middle(torch.relu(self.down(x))))).flatten(1)


class ResidualTower(nn.Module):
    """Blocks whose number grows; branches carry (depth / 2) ** -power."""

    def __init__(self, depth: int, power: float) -> None:
        super().__init__()
        self.enter, self.exit, self.norm = linear(6, 16), linear(16, 3), nn.LayerNorm(16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "up": linear(16, 24, True), "down": linear(24, 16, True)})
            for _ in range(depth)
        )
        self.factor = (depth / 2) ** -power

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + self.factor * block["down"](functional.gelu(block["up"](block["norm"](x))))
        return self.exit(self.norm(x))


class Adapted(nn.Module):
    """Frozen layers with adapters behind (rank / 2) ** -power."""

    def __init__(self, rank: int, power: float) -> None:
        super().__init__()
        self.bases = nn.ModuleList([linear(6, 24), linear(24, 24), linear(24, 3)]).requires_grad_(False)
        self.a = nn.ModuleList(linear(base.in_features, rank) for base in self.bases)
        self.b = nn.ModuleList(linear(rank, base.out_features) for base in self.bases)
        for layer in self.b:
            nn.init.zeros_(layer.weight)
        self.factor = (rank / 2) ** -power

    def forward(self, x: Tensor) -> Tensor:
        for number, base in enumerate(self.bases):
            x = base(x) + self.factor * self.b[number](self.a[number](x))
            x = torch.tanh(x) if number < 2 else x
        return x


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of groups with a scale, Adam's first steps for the rest."""

    def __init__(self, groups: list) -> None:
        super().__init__(groups, {"lr": 0.01, "scale": None})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["scale"] is None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                    corrected = mean / (1 - 0.9 ** state["step"])
                    p.sub_(group["lr"] * corrected / ((square / (1 - 0.95 ** state["step"])).sqrt() + 1e-12))
                    continue
                g = p.grad.flatten(1)
                x = g / (g.norm() + 1e-12)
                for _ in range(5):
                    product = x @ x.T
                    x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
                rows, columns = g.shape
                scale = {
                    "spectral": (rows / columns) ** 0.5,
                    "unit RMS": max(rows, columns) ** 0.5,
                    "0.2 RMS": 0.2 * max(rows, columns) ** 0.5,
                }
                p.sub_(group["lr"] * scale[group["scale"]] * x.reshape(p.shape))


def batch(kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets by kind: vectors or images with numbers or classes, tokens with next tokens or classes."""
    generator = torch.Generator().manual_seed(math.prod(map(ord, kind)) % 1000)
    data, _, target = kind.partition(" ")
    if data == "vectors":
        x = torch.randn(20, 6, generator=generator)
        targets = {"three": x[:, :3] * x[:, 3:], "two": x[:, :2] * x[:, 2:4], "one": x[:, :1] * x[:, 1:2]}
        return x, x[:, :3].argmax(1) if target == "classes" else targets[target]
    if data == "images":
        x = torch.randn(10, 3, 8, 8, generator=generator)
        return x, x.flatten(1) if target == "same" else x[:, 0].mean((1, 2)).argsort() % 4
    start = torch.randint(TOKENS, (10, 1), generator=generator)
    tokens = (start + torch.randint(1, 4, (10, 1), generator=generator) * torch.arange(9)) % TOKENS
    return tokens[:, :-1], tokens[:, 1:] if target == "next" else tokens[:, 0] % 4
