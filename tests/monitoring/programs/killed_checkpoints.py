"""Measures checkpoints of a perceptron, and kills itself when a certain step is loaded, or at the end."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import featlearn as fl
from featlearn.monitoring.recording import Recording

FOLDER, OUT, STOP = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load(model: nn.Module, path: Path) -> None:
    if path.name == f"step{STOP}.pt":
        die()
    model.load_state_dict(torch.load(path, weights_only=True))


def data(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(samples) % 3


if STOP == "end":
    Recording.end = die  # type: ignore[method-assign]
network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()
fl.watch_checkpoints(network, FOLDER, probe=data(9, 1), test=data(7, 2), out=OUT, load=load)
