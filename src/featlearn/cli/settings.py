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
# as featlearn.losses.LossName, which would load torch before --help
LossName = Literal["mse", "cross-entropy", "bce", "sum-half", "mean", "mean-half", "mean-over-outputs"]


def option(name: str) -> str:
    """The command-line option of a setting, by its first name in --help."""
    return "--depth" if name == "hidden_layers" else f"--{name.replace('_', '-')}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that the outcome of a training run depends on."""

    model: Annotated[Literal["mlp", "cnn"], NETWORK] = "mlp"
    """Fully connected or convolutional, ReLU, without biases."""
    width: Annotated[int, NETWORK] = 100
    """Units, or channels, of each hidden layer."""
    hidden_layers: Annotated[int, NETWORK, Parameter(name=("--depth", "--hidden-layers"))] = 2
    """How many hidden layers."""
    output_scale: Annotated[float | None, NETWORK] = None
    """Train this times (f - f at the start): larger is lazier, smaller richer; 0.03, or your network as it is."""
    init_scale: Annotated[float, NETWORK] = 1.0
    """The first weights are multiplied by it: smaller is richer."""

    data: Annotated[str, DATA] = "digits"
    """digits, mnist, cifar10 (cifar10:1,2 for these batches), or FILE.npz with x, y and perhaps x_test, y_test."""
    data_root: Annotated[Path | None, DATA] = None
    """Folder of the data files; by default what FEATLEARN_DATA says."""
    samples: Annotated[int, DATA] = 200
    """How many samples are trained on."""
    test: Annotated[int, DATA] = 100
    """How many unseen samples are watched."""
    whiten: Annotated[bool, DATA] = False
    """Give all directions of the inputs the same variance."""

    loss: Annotated[LossName, TRAINING] = "mse"
    """Squared error summed over outputs, or cross-entropy; the mean over samples."""
    optimizer: Annotated[Optimizer, TRAINING] = "sgd"
    """What makes the steps; momentum is SGD with momentum 0.9."""
    lr: Annotated[float | None, TRAINING, Parameter(name=("--lr", "--learning-rate"))] = None
    """Learning rate; by default a safe one, from the first kernel."""
    steps: Annotated[int, TRAINING] = 3000
    """How many steps."""
    batch: Annotated[int | None, TRAINING, Parameter(name=("--batch", "--batch-size"))] = None
    """Samples per step, drawn at random; by default all."""
    seed: Annotated[int, TRAINING] = 0
    """Of weights and batches; samples are the same for every seed."""
    device: Annotated[str, TRAINING] = "auto"
    """cpu, cuda, cuda:1 ...; auto takes a GPU where there is one."""

    probe: Annotated[int, MEASURING] = 256
    """Largest number of training samples on which kernels are measured."""
    budget: Annotated[float, MEASURING] = 1.0
    """Measuring may take this share of the training time (20 seconds of it are given in advance)."""

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
            wrong.append(f"--budget {self.budget}, expected a share between 0 and 1")
        if wrong:
            raise UsageError("; ".join(wrong))

    def resolved(self, *, own: bool) -> "Settings":
        """Settings with the default output scale; for a user's own network None stays and means unscaled."""
        return replace(self, output_scale=RICH) if self.output_scale is None and not own else self

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of run.json, without the seed, so that runs to be averaged share it."""
        entry = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        return {key: value for key, value in entry.items() if key != "seed"}

    @property
    def digest(self) -> str:
        """Six characters that identify all settings except seed and machine."""
        entry = {key: value for key, value in self.entry.items() if key not in ("data_root", "device")}
        return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:6]
