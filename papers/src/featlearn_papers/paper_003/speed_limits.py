"""Standard training and speed limited optimization from weights of several scales.

The experiment behind Fig. 4 and 11 of Beaglehole et al. 2024.
"""

from dataclasses import dataclass

import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn.quantities.layer_features import LayerFeatures
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.schedule import growing_steps
from featlearn_papers.paper_003.chain import ChainTask, chain, descend, first_layer, network, squared_error

STANDARD, SLO = 0, 1
METHODS = ("standard", "SLO")
"""axis 1 of all numbers; axis 2 are the scales"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. I, with the readout multiplied by 0.01 (the print divides, and then nothing trains)."""

    samples: int = 256
    unseen: int = 2048
    dimension: int = 32
    degree: int = 5
    width: int = 256
    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    """factors of the first layer, largest first"""
    rates: tuple[float, ...] = (0.03, 0.1, 0.2, 0.4)
    readout: float = 0.01
    fast: float = 500.0
    """speed of the first layer, C0"""
    slow: float = 0.002
    """of the others, C1 and C2"""
    eps: float = 0.1
    steps: int = 600


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Standard training and SLO from the same weights, for each scale; NFM and AGOP at the end."""
    task = chain(context, setup.samples, setup.unseen, setup.dimension, setup.degree)
    paths: list[list[dict[str, list[float]]]] = [[], []]
    ends: list[list[LayerFeatures]] = [[], []]
    for method in (STANDARD, SLO):
        for scale, lr in zip(setup.scales, setup.rates, strict=True):
            model = network(context, task, setup.width, scale, setup.readout)
            path, last = trained(model, task, steered(model, method, lr, setup), setup.steps)
            paths[method].append(path)
            ends[method].append(last)
            done = method * len(setup.scales) + len(paths[method])
            context.progress(done, 2 * len(setup.scales), scale=scale, uc=path["uncentered"][-1])
    names = paths[0][0]
    return {
        "steps": growing_steps(setup.steps, 1.3),
        **{name: [[path[name] for path in row] for row in paths] for name in names},
        "nfm": torch.stack([torch.stack([one.nfm for one in row]) for row in ends]),
        "agop": torch.stack([torch.stack([one.agop for one in row]) for row in ends]),
        "egop": task.egop,
    }


def steered(model: MLP, method: int, lr: float, setup: Setup) -> torch.optim.Optimizer:
    """Gradient descent, or SLO with a fast first layer."""
    if method == STANDARD:
        return torch.optim.SGD(model.parameters(), lr=lr)
    groups = fl.steer.speed_groups(model, {"hidden.0": setup.fast, "*": setup.slow})
    return fl.steer.SLO(groups, lr, eps=setup.eps)


def trained(
    model: MLP, task: ChainTask, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[dict[str, list[float]], LayerFeatures]:
    """What Fig. 4 shows of the first layer, along training; and the layer at the end."""
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    path: dict[str, list[float]] = {}
    seen: list[LayerFeatures] = []
    wanted = set(growing_steps(steps, 1.3))

    def at(step: int) -> None:
        if step not in wanted:
            return
        layer = first_layer(model, task.x, initial)
        seen[:] = [layer]
        with torch.no_grad():
            train, test = (float(squared_error(model, *pair)) for pair in (task[:2], task[2:4]))
        numbers = {
            "uncentered": layer.uncentered,
            "centered": layer.centered,
            "share": layer.centered_share,
            "train": train,
            "test": test,
            "nfm_egop": float(fl.metrics.correlation(layer.nfm, task.egop)),
            "agop_egop": float(fl.metrics.correlation(layer.agop, task.egop)),
        }
        for name, value in numbers.items():
            path.setdefault(name, []).append(value)

    descend(model, task, optimizer, steps, at)
    return path, seen[-1]


SPEED_LIMITS = Experiment(
    id="003/speed-limits",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                samples=64,
                unseen=64,
                dimension=10,
                degree=3,
                width=32,
                scales=(1.0, 0.01),
                rates=(0.03, 0.2),
                steps=120,
            ),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=40, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(), seeds=10, seconds=30, mebibytes=100),
    },
    measure=measure,
)
