"""A path for a trained network of which no run is known: descent with its kernel, to the loss of the network."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from featlearn import losses
from featlearn.attribution.kernel_path import KernelPath, Momentum
from featlearn.attribution.objective import objective_of, target_rows
from featlearn.errors import InputValueError, NotFiniteError
from featlearn.network.inputs import Inputs, Readout
from featlearn.session import Session

STEPS = [0, 1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90, 135, 200, 300]
DECAY = 0.9
STEP = 0.4
"""Step along the largest eigenvector, relative to the step to its minimum."""


def model_path(
    model: nn.Module, x: Inputs, y: Tensor, x2: Inputs, *, loss: losses.Loss, readout: Readout | None = None
) -> tuple[KernelPath, Tensor]:
    """Return the path of descent from zero outputs with the kernel of a network, and its outputs on x2 (Q, C).

    It ends where the training loss is that of the network, or after 300 steps.
    """
    session = Session(model, x, readout=readout)
    kernel = torch.cat([session.ntk(), session.ntk(x, x=x2)]).float().cpu()
    f, f2 = (_outputs(session, inputs) for inputs in (x, x2))
    name = losses.name(loss)
    if name is None:
        raise InputValueError(f"the loss has no name, expected one of {', '.join(map(repr, losses.NAMES))}")
    objective, targets = objective_of(name, f.shape[1]), target_rows(name, f, y, "train")
    start = torch.zeros(len(kernel), f.shape[1])
    largest = float(torch.linalg.eigvalsh(kernel[: len(f)].double())[-1])
    if not 0 < largest < torch.inf:
        raise NotFiniteError(f"the largest eigenvalue of the kernel is {largest}, expected a number > 0")
    share = 1 / len(f) if objective.averaged else 1.0
    momentum = Momentum(DECAY)
    rate = STEP / (largest * share * objective.curvature(start[: len(f)]) * momentum.total)
    path = KernelPath(
        steps=STEPS,
        kernels=[kernel] * len(STEPS),
        outputs=start.expand(len(STEPS), -1, -1),
        targets=targets,
        order=[torch.arange(len(f))] * STEPS[-1],
        rates=torch.full((STEPS[-1],), rate, dtype=torch.float64),
        objective=objective,
        momentum=momentum,
    )
    wanted = float(objective.values(f[:, :, None], targets[:, :, None]).mean())
    reached = path.replay(torch.ones(len(f), 1), stops=STEPS)
    values = [float(objective.values(reached[s][: len(f)], targets[:, :, None]).mean()) for s in STEPS]
    count = next((number for number, value in enumerate(values) if value <= wanted and number), len(STEPS) - 1) + 1
    cut = STEPS[:count]
    return (
        replace(
            path,
            steps=cut,
            kernels=path.kernels[:count],
            outputs=path.outputs[:count],
            order=path.order[: cut[-1]],
            rates=path.rates[: cut[-1]],
        ),
        f2,
    )


def _outputs(session: Session, x: Inputs) -> Tensor:
    with session.measuring([x]) as measurement:
        return measurement.outputs(measurement.batches[0]).detach().float().cpu()
