"""The user's task: a function that returns network, data, and loss."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn import losses
from featlearn.cli.answer import UsageError
from featlearn.cli.recorded_runs import advice
from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training_task import TrainingTask
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, did_you_mean
from featlearn.losses import LossFunction, LossName
from featlearn.network.inputs import batch_size

ENTRIES = ("model", "data", "loss", "test", "optimizer")
BUILT_IN = ("model", "width", "hidden_layers", "data", "data_root", "samples", "test", "whiten", "loss")
"""TrainingSettings of the built-in networks, data and losses."""


def user_task(place: str, settings: TrainingSettings) -> TrainingTask:
    """Call `module:function` or `path.py:function`, and check what it returns."""
    options = [name for name in BUILT_IN if getattr(settings, name) != getattr(TrainingSettings(), name)]
    if options:
        raise UsageError(
            f"--{options[0].replace('_', '-')} is passed with {place}, expected only one of them: "
            "the function returns network, data, and loss"
        )
    return checked_task(load_function(place)(), place)


def load_function(place: str) -> Callable[[], Any]:
    """Load the function at `module:function` or `path.py:function`."""
    source, colon, name = place.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise UsageError(
            f"{place!r} is passed, expected module:function, path.py:function, or a recorded run{advice(place)}"
        )
    module = _from_file(Path(source)) if source.endswith(".py") else _from_path(source)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(f"{source} has no function {name!r}{did_you_mean(name, functions)}")
    return function  # type: ignore[no-any-return]


def _from_path(name: str) -> Any:
    """Import a module as `python -m` does, with the working directory on the path."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    """Import a file as `python path.py` does, with its folder on the path."""
    name = f"_user_task_{path.stem}"  # avoids conflicts with modules such as torch
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FeatlearnError(f"{path} does not exist, expected a file with your function")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # needed by pickle and dataclasses
    spec.loader.exec_module(module)
    return module


def checked_task(returned: Any, place: str) -> TrainingTask:
    """Check (model, (x, y), loss), or a mapping with model, data, loss and optionally test, optimizer."""
    if isinstance(returned, Mapping):
        unknown = [key for key in returned if key not in ENTRIES]
        missing = [key for key in ENTRIES[:3] if key not in returned]
        if unknown or missing:
            wrong = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}{did_you_mean(str(unknown[0]), ENTRIES)}"
            raise InputValueError(f"{place} returns a mapping with {wrong}, expected {', '.join(ENTRIES)}")
        entries = dict(returned)
    elif isinstance(returned, tuple | list) and len(returned) == 3:
        entries = dict(zip(ENTRIES, returned, strict=False))
    else:
        raise InputTypeError(
            f"{place} returns {type(returned).__name__}, expected (model, (x, y), loss) or a mapping with "
            f"{', '.join(ENTRIES)}"
        )
    if not isinstance(entries["model"], nn.Module):
        raise InputTypeError(f"the model of {place} is {type(entries['model']).__name__}, expected a torch.nn.Module")
    x, y = _pair(entries["data"], "data", place)
    loss, loss_name = _loss(entries["loss"], place)
    test = None if entries.get("test") is None else _pair(entries["test"], "test", place)
    optimizer = entries.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputTypeError(
            f"the optimizer of {place} is {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    return TrainingTask(
        model=entries["model"], x=x, y=y, loss=loss, loss_name=loss_name, test=test, optimizer=optimizer
    )


def _pair(pair: Any, name: str, place: str) -> tuple[Any, Tensor]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Tensor):
        raise InputTypeError(
            f"the {name} of {place} is {type(pair).__name__}, expected a pair (x, y): inputs and a tensor of targets"
        )
    x, y = pair
    samples = batch_size(x, f"the x of {name}")
    if y.dim() == 0 or len(y) != samples:
        raise InputValueError(f"{name} of {place} has {samples} inputs and targets of shape {tuple(y.shape)}")
    return x, y


def _loss(loss: Any, place: str) -> tuple[LossFunction, LossName | None]:
    """Return the function, and its name for `fl.watch`."""
    try:
        function, name = losses.function(loss), losses.name(loss)
    except FeatlearnError as error:
        raise type(error)(f"the loss of {place}: {error}") from error
    return (function if name else partial(_one_number, function, place)), name


def _one_number(loss: LossFunction, place: str, output: Any, y: Tensor) -> Tensor:
    """Return the value of a user's loss, checked to be a differentiable number."""
    value = loss(output, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputTypeError(f"the loss of {place} gives {got}, expected a tensor with a single number; take the mean")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise InputValueError(
            f"the loss of {place} has no gradient, expected a gradient with respect to the output; do not use "
            "detach(), item(), or numpy"
        )
    return value
