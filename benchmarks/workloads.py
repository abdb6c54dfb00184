"""The networks and inputs on which tangent kernels are timed, the same for every library.

Sizes are those of the published comparison; `small` ones have a few samples and check equality alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(outputs: int) -> nn.Sequential:
    """784-500-500-outputs, ReLU, no bias."""
    return nn.Sequential(
        nn.Linear(784, 500, bias=False),
        nn.ReLU(),
        nn.Linear(500, 500, bias=False),
        nn.ReLU(),
        nn.Linear(500, outputs, bias=False),
    )


def tiny_mlp() -> nn.Sequential:
    """9-8-8-2, ReLU: nearly all of a call is overhead."""
    return nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def cnn() -> nn.Sequential:
    """Two valid 7x7 convolutions to 33 channels, ReLU, global average, ten outputs."""
    return nn.Sequential(
        nn.Conv2d(3, 33, 7),
        nn.ReLU(),
        nn.Conv2d(33, 33, 7),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(33, 10),
    )


class Residual(nn.Module):
    """Pre-activation block of two 3x3 convolutions; a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        same = channels_in == channels and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        self.before, self.between = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        active = self.before(x)
        branch = self.second(self.between(self.first(active)))
        return branch + self.shortcut(x if isinstance(self.shortcut, nn.Identity) else active)


def residual_network(widths: list[tuple[int, int, int]], stem: int, outputs: int) -> nn.Sequential:
    """A stem, residual blocks (channels, stride, how many), global average, a linear layer; no BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, 1, 1, bias=False)]
    channels_in = stem
    for channels, stride, count in widths:
        for i in range(count):
            layers.append(Residual(channels_in, channels, stride if i == 0 else 1))
            channels_in = channels
    layers += [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, outputs)]
    return nn.Sequential(*layers)


def wide_resnet(outputs: int = 1) -> nn.Sequential:
    """WideResNet-16-2 without BatchNorm."""
    return residual_network([(32, 1, 2), (64, 2, 2), (128, 2, 2)], 16, outputs)


def resnet18(outputs: int) -> nn.Sequential:
    """ResNet-18 of CIFAR size without BatchNorm, 11 million parameters."""
    return residual_network([(64, 1, 2), (128, 2, 2), (256, 2, 2), (512, 2, 2)], 64, outputs)


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.into(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = split[0] @ split[1].transpose(-1, -2) / (width // self.heads) ** 0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ split[2]
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Places(nn.Module):
    """Adds a learned vector for every position."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class GPT(nn.Module):
    """A small transformer; its output is the logit of symbol 0 at the last position, one scalar per sequence."""

    def __init__(self, blocks: int = 3, width: int = 128, heads: int = 4, tokens: int = 64, symbols: int = 65) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.places = Places(tokens, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(self.symbol(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])[:, :1]


class LanguageModel(GPT):
    """A transformer of GPT-2's shape; its output is the mean log-probability of the tokens that follow."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(self.symbol(ids))
        for block in self.blocks:
            x = block(x)
        likely = self.head(self.norm(x))[:, :-1].log_softmax(-1)
        return likely.gather(2, ids[:, 1:, None]).mean(1)


class VisionTransformer(nn.Module):
    """ViT-B/16: patches, a class token, twelve blocks of width 768."""

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        blocks: int = 12,
        heads: int = 12,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = Places((size // patch) ** 2 + 1, width)
        layers = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        ]
        self.blocks, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.places(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TenLogits(GPT):
    """The logits of ten symbols at the last position."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(self.symbol(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])[:, :10]


class GraphNetwork(nn.Module):
    """Three rounds of messages along 200 fixed edges between 50 nodes of width 64; the mean over nodes is read out.

    `gather` and `scatter_add` index each sample's entries; `index_select` and `index_add` index nodes.
    """

    def __init__(self, by_entries: bool = False, width: int = 64) -> None:
        super().__init__()
        self.by_entries = by_entries
        self.messages = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.updates = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("edges", torch.randint(50, (2, 200), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        sources, targets = self.edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = torch.relu(message(x))
            if self.by_entries:
                shape = (len(x), -1, x.shape[-1])
                along = sent.gather(1, sources[None, :, None].expand(shape))
                received = torch.zeros_like(x).scatter_add(1, targets[None, :, None].expand(shape), along)
            else:
                received = torch.zeros_like(x).index_add(1, targets, sent.index_select(1, sources))
            x = torch.relu(update(x) + received)
        return self.head(x.mean(1))


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the second axis of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7 convolution, a layer norm, two linear layers, and a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(functional.gelu(self.up(h))).permute(0, 3, 1, 2)


def convnext(widths: tuple[int, ...] = (96, 192, 384, 768), depths: tuple[int, ...] = (3, 3, 9, 3)) -> nn.Sequential:
    """ConvNeXt-tiny with one output."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if i:
            layers += [ChannelNorm(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1)
    )


@dataclass(frozen=True)
class Workload:
    """A network, its inputs and which kernel of it is asked for."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    samples: int
    outputs: int
    mode: str
    """`traced` (mean over outputs), `each` or `full`."""
    symbols: int = 0
    """Inputs are integers below this; 0 for Gaussian numbers."""
    cuda: int = 0
    """Samples on a GPU, 0 where it is not run there."""

    def network(self, dtype: torch.dtype) -> nn.Module:
        """The network, the same at every call."""
        torch.manual_seed(0)
        return self.build().to(dtype).eval()

    def probe(self, samples: int, dtype: torch.dtype) -> Tensor:
        """Its inputs, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        if self.symbols:
            return torch.randint(self.symbols, (samples, *self.inputs), generator=generator)
        return torch.randn(samples, *self.inputs, generator=generator, dtype=torch.float64).to(dtype)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W2-1000", lambda: mlp(1), (784,), 1000, 1, "traced"),
        Workload("W2-2000", lambda: mlp(1), (784,), 2000, 1, "traced", cuda=2000),
        Workload("W2-10000", lambda: mlp(1), (784,), 0, 1, "traced", cuda=10_000),
        Workload("W1-traced", lambda: mlp(10), (784,), 1000, 10, "traced", cuda=1000),
        Workload("W1-each", lambda: mlp(10), (784,), 1000, 10, "each"),
        Workload("W1-full", lambda: mlp(10), (784,), 1000, 10, "full"),
        Workload("W3", cnn, (3, 32, 32), 300, 10, "traced", cuda=1000),
        Workload("W4", wide_resnet, (3, 32, 32), 100, 1, "traced", cuda=1000),
        Workload("W5", GPT, (64,), 64, 1, "traced", symbols=65, cuda=64),
        Workload("GPT-2 small", lambda: LanguageModel(6, 192, 6, 64, 256), (64,), 16, 1, "traced", symbols=256),
        Workload("GPT-2 small, ten", lambda: TenLogits(6, 192, 6, 64, 256), (64,), 16, 10, "traced", symbols=256),
        Workload("ViT-tiny, ten", lambda: VisionTransformer(32, 4, 192, 6, 6, 10), (3, 32, 32), 64, 10, "traced"),
        Workload("GNN, index_add", GraphNetwork, (50, 64), 256, 1, "traced"),
        Workload("GNN, scatter_add", lambda: GraphNetwork(by_entries=True), (50, 64), 256, 1, "traced"),
        Workload("CNN, 40 samples", cnn, (3, 32, 32), 40, 10, "traced"),
        Workload("tiny MLP", tiny_mlp, (9,), 30, 2, "traced"),
        Workload("R18-one", lambda: resnet18(1), (3, 32, 32), 0, 1, "traced", cuda=1000),
        Workload("R18-ten", lambda: resnet18(10), (3, 32, 32), 0, 10, "traced", cuda=200),
    )
}
