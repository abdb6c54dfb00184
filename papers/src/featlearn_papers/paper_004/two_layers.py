"""Two-layer ReLU networks of one width, trained side by side on the same batches.

The runs behind Xu & Ziyin 2024, Fig. 4 and 5: one product of matrices for all scalings of a width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import MLP
from featlearn.steer.output_scale import ScaledOutput
from featlearn.theory.phases import Exponents
from featlearn_papers.frame.context import Context

CHUNK = 1000
"""images in one forward pass that measures"""
Data = tuple[Tensor, Tensor]
"""inputs (P, D) and labels (P,)"""


class TwoLayerNetworks:
    """N networks f = scale u relu(W x), each with rates of its own; cross-entropy, gradients written out."""

    def __init__(self, networks: Sequence[tuple[ScaledOutput, list[dict[str, Any]]]], device: str = "cpu") -> None:
        """From what `fl.steer.parametrize` gives for `MLP`s of one hidden layer, without a start to subtract."""
        groups = [groups for _, groups in networks]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=groups[0][0]["params"][0].dtype).view(-1, 1, 1).to(device)

        self.first = torch.stack([each[0]["params"][0].detach() for each in groups]).to(device)
        """(N, width, D)"""
        self.readout = torch.stack([each[1]["params"][0].detach() for each in groups]).to(device)
        """(N, C, width)"""
        self.scale = column([model.factor for model, _ in networks])
        self.rate_w, self.rate_u = (column([each[layer]["lr"] for each in groups]) for layer in (0, 1))
        self.start = self.first.clone(), self.readout.clone()

    def hidden(self, x: Tensor) -> Tensor:
        """(N, P, width)"""
        return torch.bmm(x.expand(len(self.first), -1, -1), self.first.transpose(1, 2)).relu_()

    def outputs(self, x: Tensor) -> Tensor:
        """(N, P, C)"""
        return self.scale * torch.bmm(self.hidden(x), self.readout.transpose(1, 2))

    def step(self, x: Tensor, targets: Tensor) -> None:
        """Descent on the mean cross-entropy of inputs and one-hot targets (P, C)."""
        hidden = self.hidden(x)
        f = self.scale * torch.bmm(hidden, self.readout.transpose(1, 2))
        residual = (f.softmax(2) - targets) * (self.scale / len(x))
        back = torch.bmm(self.rate_w * residual, self.readout).mul_(hidden > 0)
        self.readout.baddbmm_((self.rate_u * residual).transpose(1, 2), hidden, alpha=-1)
        self.first.baddbmm_(back.transpose(1, 2), x.expand(len(back), -1, -1), alpha=-1)

    def accuracy(self, x: Tensor, labels: Tensor) -> Tensor:
        """(N,): share of the samples whose largest output is that of their class."""
        parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
        right = torch.stack([(self.outputs(part).argmax(2) == each).sum(1) for part, each in parts])
        return right.sum(0).double() / len(x)

    def distance(self) -> Tensor:
        """(N, 3): |theta - theta(0)| / |theta(0)| of first layer, readout, and both together."""
        moved, start = (
            torch.stack([weight.flatten(1).norm(dim=1) for weight in weights], 1)
            for weights in ((self.first - self.start[0], self.readout - self.start[1]), self.start)
        )
        both = [torch.cat([each, each.norm(dim=1, keepdim=True)], 1) for each in (moved, start)]
        return both[0] / both[1]

    def train(
        self, data: Data, test: Data, context: Context, *, batch: int, epochs: int, every: int
    ) -> dict[str, Tensor]:
        """Best training and test accuracy (N,) of every `every`-th epoch, initial deviation of the output, distance."""
        (x, labels), targets = data, nn.functional.one_hot(data[1], self.readout.shape[1]).to(data[0])
        output = torch.stack([each.std() for each in self.outputs(x[:CHUNK])])
        best = torch.zeros(2, len(self.first), dtype=torch.float64, device=x.device)
        generator = context.generator(2)
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(len(x), generator=generator).to(x.device).split(batch):
                self.step(x[rows], targets[rows])
            if epoch % every == 0:
                best = torch.maximum(best, torch.stack([self.accuracy(x, labels), self.accuracy(*test)]))
                context.progress(epoch, epochs, width=self.first.shape[1], train=float(best[0].max()))
        found = {"train": best[0], "test": best[1], "output": output, "distance": self.distance()}
        return {name: values.cpu() for name, values in found.items()}


def drawn(
    inputs: int, width: int, schemes: Sequence[str | Exponents], lr: float, context: Context, **options: Any
) -> TwoLayerNetworks:
    """One network for each scheme, from the same draws; options are those of `fl.steer.parametrize`."""
    networks = [
        fl.steer.parametrize(
            MLP(inputs, 10, width=width, hidden_layers=1), scheme, lr, generator=context.generator(1), **options
        )
        for scheme in schemes
    ]
    return TwoLayerNetworks(networks, context.device)


def loaded(data: str, split: str, samples: int, pooling: int, context: Context) -> Data:
    """Images as vectors, normalized, averaged over squares of `pooling` pixels, and labels."""
    found = context.dataset(data, split=split, samples=samples, generator=context.generator(), normalization="channel")
    images = nn.functional.avg_pool2d(found.x, pooling).flatten(1)
    return images.to(context.device), found.labels.to(context.device)
