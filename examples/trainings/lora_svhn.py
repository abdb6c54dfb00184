"""The vision transformer of vit_cifar10.py learns house numbers by low-rank updates of its frozen weights (LoRA).

    python examples/trainings/lora_svhn.py --weights runs/vit-cifar10.pt

Rank 8 on queries, keys, values and outputs of the attention (Hu et al. 2021) and a new readout; 20,000 digits of
SVHN. About 1 minute on an H200 with other work; needs the files of SVHN in FEATLEARN_DATA.
"""

from pathlib import Path

import torch
from classification import DEVICE, Training, arguments, images, told, train
from torch import Tensor, nn
from vit_cifar10 import small

ADAPTED = ("query", "key", "value", "output")


class LowRank(nn.Module):
    """A frozen linear layer and a product of two narrow ones that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor) -> Tensor:
        """The layer with its update; scale 2, as alpha = 16 gives at rank 8."""
        updated: Tensor = self.layer(h) + 2 * self.up(self.down(h))
        return updated


def main() -> None:
    """Train and tell."""
    parser = arguments(__doc__, "lora-svhn")
    parser.add_argument("--weights", type=Path, required=True, help="what vit_cifar10.py saved")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=15)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = images("svhn", 20_000, 5000, given.smoke)
    model = small(given.smoke)
    model.load_state_dict(torch.load(given.weights, map_location="cpu", weights_only=True))
    model.requires_grad_(False)
    model.readout = nn.Linear(model.readout.in_features, 10)
    for block in model.blocks:
        for name in ADAPTED:
            setattr(block, name, LowRank(getattr(block, name), given.rank))
    model.to(DEVICE)
    training = Training(epochs=1, batch=32, lr=1e-3) if given.smoke else Training(given.epochs, batch=256, lr=2e-3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    print(
        f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained"
    )
    optimizer = torch.optim.AdamW(trained, training.lr, weight_decay=0.0)
    told(train(model, data, optimizer, training, given.out, {"rank": given.rank, "seed": given.seed}, flip=False))


if __name__ == "__main__":
    main()
