"""The last values of a run under labels that say what they are: one scalar to each label."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn.record import Run

SQUARED, ENTROPY, BINARY = "squared error", "cross-entropy", "binary cross-entropy"
NUMBERS = {
    f"probe {SQUARED}": "probe/loss",
    f"probe {ENTROPY}": "probe/cross_entropy",
    f"probe {BINARY}": "probe/binary_cross_entropy",
    "probe accuracy": "probe/accuracy",
    f"test {SQUARED}": "test/loss",
    f"test {ENTROPY}": "test/cross_entropy",
    f"test {BINARY}": "test/binary_cross_entropy",
    "test accuracy": "test/accuracy",
    "training loss": "loss",
    "linearization gap": "gap/probe",
    "kernel-task alignment, centered": "ntk/centered_alignment",
    "kernel norm": "ntk/norm",
    "kernel moved": "ntk/centered_distance",
    "weights moved": "weights/distance",
}
"""Label -> the scalar whose last value is shown."""


def key_numbers(run: "Run") -> dict[str, float]:
    """Label -> last value; nan if there is none."""
    return {label: float(run.scalar(name)[1][-1]) if name in run.names else math.nan for label, name in NUMBERS.items()}


def trained_on(run: "Run") -> tuple[str, ...]:
    """The losses to compare a run by: what it was trained on, or all that were recorded if it does not say."""
    told = run.config.get("loss_convention")
    if isinstance(told, str):
        return ({ENTROPY: ENTROPY, "bce": BINARY}.get(told, SQUARED),)
    return tuple(kind for kind in (SQUARED, ENTROPY, BINARY) if NUMBERS[f"probe {kind}"] in run.names)


def loss_label(run: "Run") -> str:
    """Label of the loss that the run was trained on: on the probe, or while training if that is all there is."""
    labels = [f"probe {kind}" for kind in (*reversed(trained_on(run)), SQUARED)]
    return next((label for label in labels if NUMBERS[label] in run.names), "training loss")
