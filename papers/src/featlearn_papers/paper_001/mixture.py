"""Two-layer ReLU networks that tell a mixture of Gaussians apart: how the kernel of each output grows to each target.

The experiment behind Shan & Bordelon 2021b, Fig. 7A-B, App. E.5.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Setup:
    """As many samples of each class, centers on the unit sphere, one-hot targets, loss P^-1 sum_mu sum_c (f - y)^2."""

    inputs: int = 1000
    width: int = 2000
    samples: int = 500
    classes: int = 10
    variance: float = 0.01
    spread: Literal["total", "coordinate"] = "total"
    """what `variance` is: E|noise|^2, or the variance of each coordinate"""
    lr: float = 0.2
    steps: int = 150
    stride: int = 5
    """steps between measurements"""

    @property
    def per_class(self) -> int:
        """n = P / C."""
        return self.samples // self.classes


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """y_d^T K y_d / n of both parts of the kernel at the moments (T,), and what the theory makes of the outputs.

    `readout` (T, C) is that of K_V, the same for all outputs, for each target d; `hidden` (T, C, C) that of K_W^cc,
    rows outputs c; `theory/readout` and `theory/hidden` are their growth by the corrected rates. `flips` (T,) is the
    share of gates that have flipped, `sign` (T, C) the sum over samples of y_c f_c, over n.
    """
    generator = context.generator()
    data = fl.data.gaussian_mixture(
        setup.samples, setup.inputs, setup.classes, variance=setup.variance, spread=setup.spread, generator=generator
    )
    model = MLP(
        setup.inputs, setup.classes, width=setup.width, hidden_layers=1, weight_variance=1.0, generator=generator
    ).to(context.device)
    given: Any = (data.x, data.one_hot(), data.centers)
    x, y, centers = (each.float().to(context.device) for each in given)
    optimizer, session = torch.optim.SGD(model.parameters(), lr=setup.lr), fl.Session(model, x)
    first = gates(model, x)
    rows: dict[str, list[Tensor]] = {}
    class_outputs = []
    for step in range(setup.steps + 1):
        f = model(x)
        loss = (f - y).square().sum(1).mean()
        with torch.no_grad():
            class_outputs.append(model(centers).double())
        if step % setup.stride == 0:
            parts: Any = session.ntk(outputs="each", by="layer")
            reading = projections(parts, y, setup) | {
                "loss": loss.detach(),
                "flips": (gates(model, x) != first).double().mean(),
                "sign": (y * f.detach()).sum(0) / setup.per_class,
            }
            for name, value in reading.items():
                rows.setdefault(name, []).append(value.cpu())
            context.progress(step, setup.steps, loss=float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found: dict[str, Any] = {name: torch.stack(values) for name, values in rows.items()}
    steps = torch.arange(0, setup.steps + 1, setup.stride)
    return {"steps": steps, **found, **predicted(setup, torch.stack(class_outputs).cpu(), steps)}


def gates(model: MLP, x: Tensor) -> Tensor:
    """(P, M): which hidden units are on."""
    on: Tensor = model.hidden[0](x) > 0
    return on


def projections(parts: dict[str, Tensor], y: Tensor, setup: Setup) -> dict[str, Tensor]:
    """y_d^T K^cc y_d / n of the readout's part, for one output, and of the hidden part, for all."""
    along = {name: torch.einsum("md,cmn,nd->cd", y, kernel, y) / setup.per_class for name, kernel in parts.items()}
    return {"readout": along["readout"][0], "hidden": along["hidden.0"]}


def predicted(setup: Setup, class_outputs: Tensor, steps: Tensor) -> dict[str, Tensor]:
    """Growth by the rates of `fl.theory.relu` along measured outputs at the centers (steps, C, C), step by step."""
    kind: Any = "total" if setup.spread == "total" else "per-coordinate"
    size, overlap = fl.theory.relu.mixture_geometry(setup.variance, setup.inputs, variance_is=kind)
    given: dict[str, Any] = {
        "samples_per_class": setup.per_class,
        "overlap": overlap,
        "rate": fl.dynamics.rate(setup.lr, "mean", setup.samples),
        "square_norm": size,
    }
    found = {}
    for name, rates in (
        ("hidden", fl.theory.relu.mixture_rates(class_outputs, **given)),
        ("readout", fl.theory.relu.mixture_readout_rates(class_outputs, **given)),
    ):
        # what step t adds is there at t + 1
        grown = torch.cat([torch.zeros_like(rates[:1]), rates.cumsum(0)[:-1]])
        found[f"theory/{name}"] = grown[steps] / setup.per_class
    return found


def _experiment(id: str, spread: Literal["total", "coordinate"], seeds: int) -> Experiment[Setup]:
    return Experiment(
        id=id,
        sizes={
            Scale.SMOKE: Size(
                setup=Setup(inputs=200, width=400, samples=60, classes=6, spread=spread, lr=0.3, steps=60, stride=6),
                seeds=1,
                seconds=1,
                mebibytes=50,
            ),
            Scale.LAPTOP: Size(setup=Setup(spread=spread), seeds=seeds, seconds=20, mebibytes=300),
            Scale.PAPER: Size(setup=Setup(spread=spread, stride=1), seeds=5, seconds=60, mebibytes=300),
        },
        measure=measure,
    )


MIXTURE = _experiment("001/mixture", "total", 5)
NOISY_MIXTURE = _experiment("001/noisy-mixture", "coordinate", 3)
"""sigma^2 taken as the variance of each coordinate: noise longer than the centers"""
