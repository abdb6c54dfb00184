"""How often two stated standard errors of a sketched kernel hold the exact entry, and how large the error is.

    python benchmarks/sketch_coverage.py [--draws 200] [--k 256] [--repeats 4 8]

Each line: a network, a precision, P samples; the share of all entries of all draws that lie within two standard errors
(95.4 % where errors are Gaussian), the same on the diagonal, the root mean square of the error as a share of
sqrt(K_ii K_jj / (k repeats)), and the largest |mean over draws - exact| in standard errors of that mean.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import featlearn as fl


class Tied(nn.Module):
    """Two transformer blocks whose embedding is their readout, too; the mean log-probability of the next tokens."""

    def __init__(self, vocabulary: int = 61, width: int = 24, tokens: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.3 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 3, 40, batch_first=True, dropout=0.0) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits = hidden @ self.embedding.weight.T
        return logits[:, :-1].log_softmax(2).gather(2, tokens[:, 1:, None]).mean((1, 2))


class Shared(nn.Module):
    """One layer called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(11, 30), nn.Linear(30, 30), nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        for _ in range(4):
            hidden = self.again(hidden).relu()
        return self.last(hidden)


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 10, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(90, 3),
    )
    mlp = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 3))
    return {
        "MLP, three outputs": (mlp, torch.randn(37, 20)),
        "CNN, three outputs": (cnn, torch.randn(29, 3, 8, 8)),
        "transformer, tied embedding": (Tied(), torch.randint(61, (23, 16))),
        "one layer called four times": (Shared(), torch.randn(31, 11)),
    }


def line(model: nn.Module, x: Tensor, sketch: fl.Sketch, draws: int) -> tuple[float, float, float, float]:
    """Share held, the same on the diagonal, relative error, largest deviation of the mean."""
    exact = fl.ntk(model, x, dtype=torch.float64)
    session, values, held, diagonal = fl.Session(model, x), [], [], []
    for _ in range(draws):
        found = session.ntk(sketch=sketch)
        inside = ((found.value - exact).abs() <= 2 * found.stderr).double()
        held.append(inside.mean())
        diagonal.append(inside.diagonal().mean())
        values.append(found.value.double())
    every, scale = torch.stack(values), exact.diagonal().sqrt()
    relative = ((every - exact) / (scale[:, None] * scale)).square().mean().sqrt() * (sketch.k * sketch.repeats) ** 0.5
    bias = (every.mean(0) - exact).abs() / (every.std(0) / draws**0.5)
    return float(torch.stack(held).mean()), float(torch.stack(diagonal).mean()), float(relative), float(bias.max())


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float, float, float]]:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument("--repeats", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args(arguments)
    print("| network | P | precision | repeats | held | on the diagonal | error | bias |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = []
    for name, (model, x) in networks().items():
        for dtype in (torch.float64, torch.float32):
            for repeats in options.repeats:
                generator = torch.Generator().manual_seed(repeats)
                chosen = x.to(dtype) if x.is_floating_point() else x
                values = line(model.to(dtype), chosen, fl.Sketch(options.k, repeats, generator), options.draws)
                found.append(values)
                precision = str(dtype).removeprefix("torch.")
                print(
                    f"| {name} | {len(x)} | {precision} | {repeats} | {values[0]:.1%} | {values[1]:.1%} | "
                    f"{values[2]:.2f} | {values[3]:.1f} |",
                    flush=True,
                )
    return found


if __name__ == "__main__":
    main()
