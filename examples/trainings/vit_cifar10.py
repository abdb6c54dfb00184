"""A vision transformer of 10.7 million parameters on CIFAR-10, by AdamW.

    python examples/trainings/vit_cifar10.py

Six blocks of width 384 on patches of 4 x 4 pixels. About 5 minutes on an H200 with other work; the trained weights
are left beside the run, for lora_svhn.py. Needs the files of CIFAR-10 in FEATLEARN_DATA.
"""

import torch
from classification import DEVICE, Training, arguments, images, told, train
from torch import Tensor, nn

PATCH = 4


class Block(nn.Module):
    """Attention and a two-layer network, each added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.expansion, self.contraction = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """(P, T, width) to the same."""
        n = self.before(h)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + self.output(attended)
        after: Tensor = h + self.contraction(nn.functional.gelu(self.expansion(self.between(h))))
        return after


class ViT(nn.Module):
    """Patches, learned places, blocks, the mean over patches, a linear readout."""

    def __init__(self, size: int = 32, classes: int = 10, width: int = 384, heads: int = 6, blocks: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((size // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(P, 3, size, size) to (P, classes)."""
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.readout(self.norm(self.blocks(h)).mean(1))
        return logits


def small(smoke: bool) -> ViT:
    """The network of this training."""
    return ViT(size=8, width=16, heads=2, blocks=2) if smoke else ViT()


def main() -> None:
    """Train and tell."""
    parser = arguments(__doc__, "vit-cifar10")
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = images("cifar10", 50_000, 10_000, given.smoke)
    model = small(given.smoke).to(DEVICE)
    training = Training(epochs=1, batch=32, lr=1e-3) if given.smoke else Training(given.epochs, batch=256, lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), training.lr, weight_decay=0.05)
    run = train(model, data, optimizer, training, given.out, {"seed": given.seed})
    torch.save(model.state_dict(), given.out.parent / f"{given.out.name}.pt")
    told(run)


if __name__ == "__main__":
    main()
