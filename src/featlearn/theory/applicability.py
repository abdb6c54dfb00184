"""Which theories describe a network: each tried on it, with its error against the network's own training."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.errors import FeatlearnError, InputValueError
from featlearn.losses import Loss, function
from featlearn.theory import deep_linear, early, latent, relu
from featlearn.theory.network_path import NetworkPath, checked_data, lines

FROM_NETWORK: Mapping[str, Callable[..., NetworkPath]] = {
    "deep_linear": deep_linear.from_network,
    "latent": latent.from_network,
    "relu": relu.from_network,
    "early": early.from_network,
}
"""Theory -> its reader of networks."""


@dataclass(frozen=True)
class TheoryMatch:
    """One theory and one network."""

    theory: str
    """Name in `fl.theory`."""
    holds: bool
    """Whether the theory describes the network and all its assumptions hold."""
    error: float
    """Distance of the predicted from the trained outputs at the end of the trial, over how far these moved; or nan."""
    reason: str
    """Why the theory does not hold, or an empty string."""
    path: NetworkPath | None = field(default=None, repr=False)
    """The prediction for the steps of the trial."""

    def __str__(self) -> str:
        """Return whether it holds, its error, and each assumption."""
        if self.path is None:
            return f"{self.theory}: no. {self.reason}"
        verdict = "yes" if self.holds else "no"
        return "\n".join([f"{self.theory}: {verdict}, error {self.error:.2g}", *lines(self.path.assumptions)])


class TheoryMatches(list[TheoryMatch]):
    """All theories tried on a network; printed as a list of them."""

    def __str__(self) -> str:
        """Return each theory with its error and assumptions."""
        return "\n".join(map(str, self))


def which(
    model: nn.Module, x: Tensor, y: Tensor, *, rate: float | None = None, loss: Loss = "sum-half", steps: int = 100
) -> TheoryMatches:
    """List which theories of training hold for a network, within which error, and why the others do not.

    Each theory predicts `steps` steps of full-batch gradient descent; a copy of the network makes them, and the error
    is that of the predicted outputs, relative to how far the outputs moved. The network is left as it is.

    Args:
        model: Network to be described.
        x: Training inputs (P, ...).
        y: Training targets (P,) or (P, C).
        rate: Learning rate; by default a fiftieth of 2 / (largest eigenvalue of the kernel).
        loss: Loss of the training: a squared error of `fl.losses`.
        steps: Number of steps of the trial.

    Returns:
        A list with one entry for each of `deep_linear`, `latent`, `relu` and `early`: `.theory .holds .error .reason
        .path`; printing it shows every assumption with its number.
    """
    from featlearn.network.raw_outputs import raw_outputs

    _, targets = checked_data(x, y)
    if not isinstance(steps, int) or steps < 1:
        raise InputValueError(f"steps={steps!r}, expected an integer >= 1")
    outputs = raw_outputs(model, x, None)
    if outputs.numel() != targets.numel():
        raise InputValueError(
            f"targets have shape {tuple(targets.shape)}, expected {tuple(outputs.shape)}, as the outputs; pass one-hot "
            "targets for classes"
        )
    if rate is None:
        rate = _safe_rate(model, x, targets, loss)
    trained, start = _train(model, x, targets, rate, loss, steps)
    moved = (trained - start).norm()
    matches = TheoryMatches()
    for theory, read in FROM_NETWORK.items():
        try:
            path = read(model, x, y, rate=rate, loss=loss, times=[0.0, float(steps)])
        except FeatlearnError as refusal:
            matches.append(TheoryMatch(theory, False, float("nan"), str(refusal)))
            continue
        error = float((path.outputs[-1].reshape_as(trained) - trained).norm() / moved)
        failed = [each["name"] for each in path.assumptions if not each["holds"]]
        reason = f"not so: {', '.join(failed)}" if failed else ""
        matches.append(TheoryMatch(theory, path.holds, error, reason, path))
    return matches


def _safe_rate(model: nn.Module, x: Tensor, targets: Tensor, loss: Loss) -> float:
    from featlearn.session import Session

    kernel = Session(model, x).ntk(outputs="sum").double()
    outputs = targets.numel() // len(targets)
    return 0.04 / float(torch.linalg.eigvalsh(kernel)[-1]) / descent_rate(1.0, loss, len(targets), outputs)


def _train(model: nn.Module, x: Any, targets: Tensor, rate: float, loss: Loss, steps: int) -> tuple[Tensor, Tensor]:
    """Return outputs (P, C) in double after training a copy in double, and before."""
    copy = deepcopy(model).double()
    for module in copy.modules():
        module.training = False
    value, inputs = function(loss), x.double() if x.is_floating_point() else x
    weights = [weight for weight in copy.parameters() if weight.requires_grad]
    with torch.enable_grad():
        start = copy(inputs).reshape(targets.shape)
        for _ in range(steps):
            gradients = torch.autograd.grad(value(copy(inputs).reshape(targets.shape), targets), weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(gradient, alpha=rate)
        end = copy(inputs).reshape(targets.shape)
    return end.detach(), start.detach()
