"""The settings of `featlearn diagnose`."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from featlearn.cli.answer import UsageError

NETWORK = Parameter(group=Group("Network", sort_key=1))
DATA = Parameter(group=Group("Data", sort_key=2))
TRAINING = Parameter(group=Group("Training", sort_key=3))
MEASURING = Parameter(group=Group("Measuring", sort_key=4))

RICH = 0.03
"""Output scale at which a network learns features within the default number of steps."""
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]
# equals featlearn.losses.LossName, whose import would load torch before --help
LossName = Literal["mse", "cross-entropy", "bce", "sum-half", "mean", "mean-half", "mean-over-outputs"]


def option(name: str) -> str:
    """Return the command-line option of a setting, by its first name in --help."""
    return "--depth" if name == "hidden_layers" else f"--{name.replace('_', '-')}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """All settings that a training run depends on."""

    model: Annotated[Literal["mlp", "cnn"], NETWORK] = "mlp"
    """Fully connected or convolutional ReLU network, without biases."""
    width: Annotated[int, NETWORK] = 100
    """Units, or channels, of each hidden layer."""
    hidden_layers: Annotated[int, NETWORK, Parameter(name=("--depth", "--hidden-layers"))] = 2
    """Number of hidden layers."""
    output_scale: Annotated[float | None, NETWORK] = None
    """Multiply (f - initial f) by this factor: larger is lazier, smaller richer; 0.03, or none for your network."""
    init_scale: Annotated[float, NETWORK] = 1.0
    """Factor of the initial weights: smaller is richer."""

    data: Annotated[str, DATA] = "digits"
    """digits, mnist, cifar10 (cifar10:1,2 for two batches), or FILE.npz with x, y and optionally x_test, y_test."""
    data_root: Annotated[Path | None, DATA] = None
    """Folder of the data files; by default FEATLEARN_DATA."""
    samples: Annotated[int, DATA] = 200
    """Number of training samples."""
    test: Annotated[int, DATA] = 100
    """Number of test samples."""
    whiten: Annotated[bool, DATA] = False
    """Whiten inputs, so that all directions have the same variance."""

    loss: Annotated[LossName, TRAINING] = "mse"
    """Loss, averaged over samples; see fl.losses."""
    optimizer: Annotated[Optimizer, TRAINING] = "sgd"
    """Optimizer; momentum is SGD with momentum 0.9."""
    lr: Annotated[float | None, TRAINING, Parameter(name=("--lr", "--learning-rate"))] = None
    """Learning rate; by default a safe rate from the initial kernel."""
    steps: Annotated[int, TRAINING] = 3000
    """Number of steps."""
    batch: Annotated[int | None, TRAINING, Parameter(name=("--batch", "--batch-size"))] = None
    """Samples per step, drawn at random; by default all samples."""
    seed: Annotated[int, TRAINING] = 0
    """Seed of weights and batches; samples do not depend on it."""
    device: Annotated[str, TRAINING] = "auto"
    """cpu, cuda, cuda:1 ...; auto uses a GPU if available."""

    probe: Annotated[int, MEASURING] = 256
    """Largest number of training samples on which kernels are measured."""
    budget: Annotated[float, MEASURING] = 1.0
    """Measuring time as a fraction of training time (the first 20 seconds are free)."""

    def __post_init__(self) -> None:
        least = {"width": 1, "hidden_layers": 1, "samples": 2, "test": 0, "steps": 1, "probe": 2, "seed": 0}
        wrong = [
            f"{option(n)} {getattr(self, n)}, expected at least {k}" for n, k in least.items() if getattr(self, n) < k
        ]
        for name in ("output_scale", "init_scale", "lr", "batch", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                wrong.append(f"{option(name)} {value}, expected a number > 0")
        if self.budget > 1:
            wrong.append(f"--budget {self.budget}, expected a fraction between 0 and 1")
        if wrong:
            raise UsageError("; ".join(wrong))

    def resolved(self, *, user_network: bool) -> "TrainingSettings":
        """Return settings with the default output scale; None means unscaled for a user's network."""
        return replace(self, output_scale=RICH) if self.output_scale is None and not user_network else self

    @property
    def entry(self) -> dict[str, Any]:
        """Entry of run.json, without the seed, so that runs to be averaged share it."""
        entry = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        return {key: value for key, value in entry.items() if key != "seed"}

    @property
    def digest(self) -> str:
        """Six characters that identify all settings except seed, data folder, and device."""
        entry = {key: value for key, value in self.entry.items() if key not in ("data_root", "device")}
        return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:6]
