"""`fl.width_check`: how a network scales with its width, and which layer is off."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from featlearn import losses
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, UnsupportedModelError
from featlearn.network.inputs import Inputs, batch_size
from featlearn.network.isolation import random_state_kept
from featlearn.signatures import name_keywords
from featlearn.widths.deviations import Runs, Weight, find_problems, fit_attention, fit_layers, fit_weights, infer_phase
from featlearn.widths.fits import power
from featlearn.widths.passes import call_model
from featlearn.widths.scaling import WidthCheck
from featlearn.widths.schemes import MATRICES, Update, nearest
from featlearn.widths.size_runs import WidthSizes, train_and_measure

MakeModel = Callable[[int], Any]
MakeOptimizer = Callable[[Any], Optimizer]
DEFAULT_RATE = 0.01


@name_keywords()
def width_check(
    make_model: MakeModel,
    data: tuple[Inputs, Tensor],
    *,
    widths: Sequence[int] = (64, 128, 256, 512),
    optimizer: MakeOptimizer | None = None,
    steps: int = 10,
    seeds: int = 3,
    loss: losses.Loss | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WidthCheck:
    """Train a network at several widths for a few steps, and fit how it scales with the width.

        def make_model(width):
            return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

        print(fl.width_check(make_model, (x, y), optimizer=lambda model: torch.optim.Adam(model.parameters(), 1e-3)))

    For every layer, it fits powers of the width, with standard errors, of activations and their change, spectral norms
    of weights and updates, and kernel changes. The initial size of a layer's output (gain) and its motion by the first
    update (rate) determine the parametrization (Yang & Hu 2021; Yang et al. 2022), the phase at infinite width, and
    which layers deviate by which power. The position of multipliers does not matter. Readouts that start at zero, tied
    embeddings, and attention divided by the head size are handled.

    The verdict uses the initial weights and the first update of each parameter, so it does not depend on a good
    learning rate. Changes over all `steps` are reported in addition.

    Args:
        make_model: Function `make_model(width)` that returns a module, a pair of a module and parameter groups, as
            `fl.steer.parametrize`, or a pair of a module and its optimizer.
        data: Batch `(x, y)` for all steps. `x` is a tensor, a tuple, or a mapping.
        widths: At least two, preferably four widths, each twice the previous.
        optimizer: Function `optimizer(model)` that returns an optimizer; it is called with the parameter groups if
            there are any. An optimizer class such as `torch.optim.Adam` is called with the parameters. By default SGD
            with learning rate 0.01.
        steps: Training steps per width.
        seeds: Networks per width; `torch`, `random`, and `numpy` are seeded before each.
        loss: Training loss: a name of `fl.losses`, a module, or a function of (outputs, y). By default `"mse"` for
            floating-point targets and `"cross-entropy"` for classes.
        progress: Function called with the number of finished networks and the total.

    Random states are restored.
    """
    x, y, loss_function = _check_arguments(make_model, data, widths, steps, seeds, loss)
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        update = _update_kind(make_model, optimizer, x, y, loss_function, widths[0])
        runs: list[list[WidthSizes]] = []
        for width in widths:
            runs.append([])
            for seed in range(seeds):
                model, model_optimizer = _create(make_model, optimizer, width, seed)
                with _explain_errors(width):
                    proportional = update == "proportional"
                    runs[-1].append(
                        train_and_measure(model, model_optimizer, x, y, loss_function, steps, proportional=proportional)
                    )
                if progress is not None:
                    progress(len(runs[:-1]) * seeds + seed + 1, len(widths) * seeds)
    return judge(runs, tuple(widths), steps, update)


def judge(runs: Runs, widths: tuple[int, ...], steps: int, update: Update) -> WidthCheck:
    """Return the verdict on measured networks."""
    weights = fit_weights(runs, widths, update)
    matrices = [weight.powers for weight in weights.values() if weight.powers.kind in MATRICES]
    if not matrices:
        raise InputValueError(
            f"no weight grows from width {widths[0]} to {widths[-1]}, expected make_model(width) to use its argument"
        )
    match = nearest(matrices, update)
    attention = fit_attention(runs, widths)
    problems = find_problems(weights, match, attention, update)
    sizes = {
        key: torch.tensor([[run.network[key] for run in seed_runs] for seed_runs in runs])
        for key in ("output", "output_change", "kernel_motion")
    }
    is_known = 2 * match.deviating <= len(matrices)
    return WidthCheck(
        scheme=match.scheme.name if is_known else "other",
        nearest=match.scheme.name,
        phase=infer_phase(weights, update, is_known),
        layers=fit_layers(runs, widths, weights, match),
        attention=attention,
        network={key: power(values, widths) for key, values in sizes.items()},
        sizes=sizes,
        problems=tuple(problems),
        notes=tuple(_notes(runs, widths, weights, attention, match.scheme.name)),
        widths=widths,
        seeds=len(runs[0]),
        steps=steps,
        update=update,
    )


def _notes(
    runs: Runs, widths: Sequence[int], weights: Mapping[str, Weight], attention: Mapping[str, Any], scheme: str
) -> list[str]:
    """Return notes on special cases and limitations."""
    last, notes = runs[-1][0], []
    zero = [name for name, entry in last.parameters.items() if entry["weight"] == 0 and len(last.shapes[name]) > 1]
    if zero:
        notes.append(f"{', '.join(zero)} starts at zero: its scale at the start has no power, which is no error")
    tied = [name for name in weights if name in last.tied]
    if tied:
        notes.append(f"{', '.join(tied)} are one tensor: its scale and its rate serve both uses")
    heads = [module for module, powers in attention.items() if float(powers["scale"]) < -0.75 * float(powers["head"])]
    if heads and scheme != "mup":
        notes.append(f"attention is divided by the size of a head, as in muP, in {', '.join(heads)}")
    irregular = [name for name in weights if not last.parameters[name].get("regular", 1.0)]
    if irregular:
        notes.append(
            f"updates of {', '.join(irregular)} follow neither the gradient nor its signs: their rates are measured, "
            "and are compared with those of Adam, which your optimizer need not share"
        )
    without_gradient = [name for name in last.owners if name not in weights]
    if without_gradient:
        notes.append(f"{', '.join(without_gradient)} had no gradient but rounding in the first steps and is not judged")
    diverged_widths = [
        str(width)
        for width, seed_runs in zip(widths, runs, strict=True)
        if not all(numpy.isfinite(run.network["output_change"]) for run in seed_runs)
    ]
    if diverged_widths:
        notes.append(f"training diverged at width {', '.join(diverged_widths)}: changes there are left out")
    noisy = [
        name
        for name, weight in weights.items()
        if weight.powers.kind in MATRICES and max(weight.powers.rate_error, weight.powers.gain_error) > 1 / 6
    ]
    if noisy:
        notes.append(f"powers of {', '.join(noisy)} are uncertain by more than 1/2: take more seeds or widths")
    return notes


def _check_arguments(
    make_model: Any, data: Any, widths: Any, steps: Any, seeds: Any, loss: Any
) -> tuple[Inputs, Tensor, losses.LossFunction]:
    if not callable(make_model):
        raise InputTypeError(f"make_model is {type(make_model).__name__}, expected a function of the width")
    if not isinstance(data, tuple | list) or len(data) != 2 or not isinstance(data[1], Tensor):
        raise InputTypeError(f"data is {type(data).__name__}, expected a pair (x, y): inputs and a tensor of targets")
    x, y = data
    samples = batch_size(x)
    if y.dim() == 0 or len(y) != samples:
        raise InputValueError(f"data has {samples} inputs and targets of shape {tuple(y.shape)}")
    valid = [isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths]
    if len(valid) < 2 or not all(valid) or sorted(set(widths)) != list(widths):
        raise InputValueError(f"widths={widths!r}, expected at least two whole numbers that increase, (64, 128, 256)")
    for name, value in (("steps", steps), ("seeds", seeds)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputValueError(f"{name}={value!r}, expected a whole number >= 1")
    if loss is None:
        loss = "mse" if y.is_floating_point() else "cross-entropy"
    if losses.form(loss) == "cross-entropy" and y.is_floating_point():
        losses.check_targets("cross-entropy", y, y)
    return x, y, losses.function(loss)


def _create(
    make_model: MakeModel, optimizer: MakeOptimizer | None, width: int, seed: int
) -> tuple[nn.Module, Optimizer]:
    """Create the network of a width and a seed, and its optimizer."""
    number = 7919 * seed + width
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)
    model, groups = make_model(width), None
    if isinstance(model, tuple | list) and len(model) == 2:
        model, groups = model
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"make_model({width}) gives {type(model).__name__}, expected a torch.nn.Module, or a pair of one and its "
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


def _update_kind(
    make_model: MakeModel, optimizer: MakeOptimizer | None, x: Inputs, y: Tensor, loss: losses.LossFunction, width: int
) -> Update:
    """Return whether the first update grows with the loss, by a step with the loss and a step with 8 times the loss."""
    distances = []
    for factor in (1.0, 8.0):
        model, model_optimizer = _create(make_model, optimizer, width, 0)
        before = [p.detach().clone() for p in model.parameters()]
        with _explain_errors(width):
            model_optimizer.zero_grad()
            value = loss(call_model(model, x), y)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise InputValueError("the loss gives no differentiable number, expected a tensor of one number")
            (factor * value).backward()
            model_optimizer.step()
        distances.append(
            sum(float((p.detach() - old).norm()) for p, old in zip(model.parameters(), before, strict=True))
        )
    if not distances[0]:
        raise InputValueError(
            "one step of the optimizer changes no parameter, expected one that trains; give it a rate"
        )
    return "proportional" if distances[1] > 8**0.5 * distances[0] else "normalized"


@contextmanager
def _explain_errors(width: int) -> Iterator[None]:
    """Add the width to errors of the user's network."""
    try:
        yield
    except (FeatlearnError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"the network of width {width} failed: {type(error).__name__}: {error}") from error
