"""The last values of key scalars of a run."""

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
    """Return label -> last value; nan if there is none."""
    return {label: float(run.scalar(name)[1][-1]) if name in run.names else math.nan for label, name in NUMBERS.items()}


def loss_label(run: "Run") -> str:
    """Return the label of the run's loss on the probe, or of the training loss if the probe has none."""
    convention = run.config.get("loss_convention")
    known_kinds = {"cross-entropy": [ENTROPY], "bce": [BINARY]}.get(str(convention), [])
    kinds = known_kinds if isinstance(convention, str) else [BINARY, ENTROPY]
    labels = [f"probe {kind}" for kind in (*kinds, SQUARED)]
    return next((label for label in labels if NUMBERS[label] in run.names), "training loss")
