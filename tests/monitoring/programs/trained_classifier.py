"""Trains a small perceptron with default arguments of the watch, in as many threads as torch takes."""

import sys
from pathlib import Path

import torch
from torch import nn

import featlearn as fl


def main(out: Path, steps: int, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    x, y = torch.randn(640, 64), torch.randint(10, (640,))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fl.watch(model, (x[:64], y[:64]), out=out, test=(x[512:576], y[512:576]), optimizer=optimizer) as watch:
        for step in range(steps):
            rows = slice(32 * step % 512, 32 * step % 512 + 32)
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
