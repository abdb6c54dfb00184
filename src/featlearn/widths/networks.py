"""Make the user's network and optimizer at a size, with changes to learning rates or weights."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from featlearn.errors import FeatlearnError, InputTypeError, UnsupportedModelError

MakeModel = Callable[[int], Any]
MakeOptimizer = Callable[[Any], Optimizer]
DEFAULT_RATE = 0.01


def create(make: MakeModel, optimizer: MakeOptimizer | None, size: int, seed: int) -> tuple[nn.Module, Optimizer]:
    """Create the network of a size and a seed, and its optimizer."""
    number = 7919 * seed + size
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)
    model, groups = make(size), None
    if isinstance(model, tuple | list) and len(model) == 2:
        model, groups = model
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"make_model({size}) gives {type(model).__name__}, expected a torch.nn.Module, or a pair of one and its "
            "parameter groups or optimizer"
        )
    if isinstance(groups, Optimizer):
        result = groups
    elif optimizer is None or isinstance(optimizer, type):
        parameters = [p for p in model.parameters() if p.requires_grad] if groups is None else groups
        result = SGD(parameters, lr=DEFAULT_RATE) if optimizer is None else optimizer(parameters)
    else:
        result = optimizer(model if groups is None else groups)
    if not isinstance(result, Optimizer):
        raise InputTypeError(f"optimizer gives {type(result).__name__}, expected a torch.optim.Optimizer")
    return model, result


def apply_patch(patch: str, model: nn.Module, optimizer: Optimizer, along: str, size: int) -> None:
    """Run the text of a patch: an entry of the parameter groups, or statements."""
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, along: size}
    for line in patch.splitlines():
        if not line.startswith("{"):
            exec(line, names)
            continue
        for group in list(optimizer.param_groups):
            entry = eval(line, {**names, "lr": group["lr"]})
            chosen = {id(p) for p in entry["params"]}
            entry["params"] = [p for p in group["params"] if id(p) in chosen]
            kept = [p for p in group["params"] if id(p) not in chosen]
            if entry["params"]:
                rest = {key: value for key, value in group.items() if key not in ("params", "lr", "param_names")}
                group["params"] = kept
                group.pop("param_names", None)
                optimizer.add_param_group({**rest, **entry})
                if not kept:
                    optimizer.param_groups.remove(group)


@contextmanager
def explain_errors(size: int, along: str) -> Iterator[None]:
    """Add the size to errors of the user's network."""
    try:
        yield
    except (FeatlearnError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"the network of {along} {size} failed: {type(error).__name__}: {error}") from error


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply all learning rates."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
