"""Did this network learn features, or only fit with the kernel it was born with?

Trains a small network on the handwritten digits and measures its tangent kernel before and after.
A large --output-scale makes training lazy: the loss falls as before, and the kernel stays where it was.
"""

import argparse
import copy
import sys
from collections import OrderedDict

import torch
from torch import Tensor, nn

import featlearn as fl

PROBE = 200
LAZY, RICH = 0.02, 0.1  # conventions: change of the normalised kernel below and above which the verdict is clear


class Scaled(nn.Module):
    """scale * (f - f at the start): zero at first, whatever the scale."""

    def __init__(self, network: nn.Module, scale: float):
        super().__init__()
        self.network = network
        self.start = copy.deepcopy(network).requires_grad_(False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of shape (P, C)."""
        outputs: Tensor = self.scale * (self.network(x) - self.start(x))
        return outputs


def mlp(width: int) -> nn.Module:
    """Two hidden layers on the 64 pixels, one output per class."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(64, width),
            relu1=nn.ReLU(),
            second=nn.Linear(width, width),
            relu2=nn.ReLU(),
            last=nn.Linear(width, 10),
        )
    )


def train(model: nn.Module, x: Tensor, targets: Tensor, steps: int, rate: float) -> None:
    """Mini-batch SGD on the squared error; progress goes to stderr. Training that diverges ends the program."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (64,))
        loss = (model(x[batch]) - targets[batch]).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step & (step - 1) == 0 or step == steps:  # powers of two
            print(f"step={step} loss={loss.item():.4f}", file=sys.stderr)
            if not loss < 10 * targets.square().sum(1).mean():
                sys.exit("training diverged; try a larger --output-scale or a smaller --width")


def accuracy(model: nn.Module, data: fl.data.Labelled) -> float:
    """Share of the samples whose largest output is the label's."""
    with torch.no_grad():
        return float((model(data.x).argmax(1) == data.labels).float().mean())


def loss_of(model: nn.Module, x: Tensor, targets: Tensor) -> float:
    """Squared error of a sample, averaged."""
    with torch.no_grad():
        return float((model(x) - targets).square().sum(1).mean())


def verdict(change: float, before: float, after: float) -> str:
    """One sentence on the change of the normalised kernel, if there was any training to judge."""
    if not after < 0.5 * before:
        return f"undecided: the loss fell only from {before:.3f} to {after:.3f}; train longer (--steps)"
    if change < LAZY:
        return (
            f"lazy: the kernel changed by {change:.3f} (below {LAZY}), the network used the features it was born with"
        )
    if change > RICH:
        return f"rich: the kernel changed by {change:.3f} (above {RICH}), the network learned features"
    return f"mixed: the kernel changed by {change:.3f} (lazy is below {LAZY}, rich above {RICH})"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="units of each hidden layer (default: %(default)s)")
    parser.add_argument("--output-scale", type=float, default=0.3, help="larger is lazier (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and batches (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1 or options.width < 1 or not 0 < options.output_scale < 1e6:
        parser.error("--steps and --width must be at least 1, --output-scale between 0 and a million")
    if abs(options.seed) >= 2**63:
        parser.error("--seed must be less than 2^63")
    return options


def main() -> None:
    """Train, measure, print."""
    options = arguments()
    torch.manual_seed(options.seed)
    data, test = fl.data.digits("train"), fl.data.digits("test")
    targets = data.one_hot(centered=True)
    model = Scaled(mlp(options.width), options.output_scale)
    probe = data.x[:PROBE]
    error = loss_of(model, data.x, targets)
    before = fl.ntk(model, probe, by="layer")
    # outputs move at a speed that does not depend on the scale, up to what a rich network bears
    train(model, data.x, targets, options.steps, rate=min(0.1 / options.output_scale**2, 1.0))
    after = fl.ntk(model, probe, by="layer")

    start, end = (torch.stack([*layers.values()]).sum(0) for layers in (before, after))
    print(f"{'':34}{'before':>9}{'after':>9}")
    aligned = [float(fl.metrics.centered_alignment(kernel, targets[:PROBE])) for kernel in (start, end)]
    print(f"{'kernel-task alignment (0 to 1)':34}{aligned[0]:9.3f}{aligned[1]:9.3f}")
    for name in before:
        shares = [float((k[name] * total).sum() / total.square().sum()) for k, total in ((before, start), (after, end))]
        print(f"{'share of the kernel, ' + name.removeprefix('network.'):34}{shares[0]:9.3f}{shares[1]:9.3f}")
    print(f"{'accuracy on unseen digits':34}{accuracy(model, test):18.3f}")
    change = float(fl.metrics.kernel_distance(start, end, centered=True))  # the constant part hides the rest
    print(f"{'change of the kernel, 1 - cosine':34}{change:18.3f}")
    print(verdict(change, error, loss_of(model, data.x, targets)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
