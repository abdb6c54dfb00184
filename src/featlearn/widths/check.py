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
from featlearn.widths.deviations import Runs, Weight, attention_of, layers_of, phase_of, problems_of, weights_of
from featlearn.widths.fits import power
from featlearn.widths.passes import call_model
from featlearn.widths.scaling import WidthCheck
from featlearn.widths.schemes import MATRICES, Update, nearest
from featlearn.widths.size_runs import WidthSizes, trained_sizes

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
    """Train a network at several widths for a few steps, and say how it scales with the width.

        def make_model(width):
            return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

        print(fl.width_check(make_model, (x, y), optimizer=lambda model: torch.optim.Adam(model.parameters(), 1e-3)))

    Per layer it fits, as powers of the width with standard errors: the size of activations and of their change, the
    spectral norms of weights and updates, and the motion of kernels. From how large a weight is at the start (gain)
    and how far its first update moves what it gives (rate) follow which parametrization the network has (Yang & Hu
    2021; Yang et al. 2022), in which phase it is at infinite width, and which layer is off, by which power. Where the
    multipliers of a scheme stand does not matter. A readout that starts at zero, tied embeddings and attention divided
    by the size of a head are known cases.

    The verdict rests on the weights at the start and the first update that a parameter gets, so it does not depend on
    the learning rate being a good one; changes over all `steps` are reported beside it.

    Args:
        make_model: `make_model(width)` gives a module; or a pair of a module and parameter groups, as
            `fl.steer.parametrize` does, or of a module and its optimizer.
        data: `(x, y)`, one batch, on which all steps are made. `x` is whatever the model takes: a tensor, a tuple or a
            mapping.
        widths: at least two, better four, each twice the last.
        optimizer: `optimizer(model)` gives its optimizer; it is called with the groups where there are some. A class
            of optimizers, `torch.optim.Adam`, is called with the parameters. By default SGD with a rate of 0.01.
        steps: of training at each width.
        seeds: networks at each width; `torch`, `random` and `numpy` are seeded before each.
        loss: Training loss: a name of `fl.losses`, a module, or a function of (outputs, y). By default `"mse"` for
            targets that are floating-point numbers and `"cross-entropy"` for classes.
        progress: called with the number of networks that are done, and of all.

    The random numbers of the caller go on as before.
    """
    x, y, chosen = _checked(make_model, data, widths, steps, seeds, loss)
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        update = _update_kind(make_model, optimizer, x, y, chosen, widths[0])
        runs: list[list[WidthSizes]] = []
        for width in widths:
            runs.append([])
            for seed in range(seeds):
                model, made = _made(make_model, optimizer, width, seed)
                with _explained(width):
                    proportional = update == "proportional"
                    runs[-1].append(trained_sizes(model, made, x, y, chosen, steps, proportional=proportional))
                if progress is not None:
                    progress(len(runs[:-1]) * seeds + seed + 1, len(widths) * seeds)
    return judged(runs, tuple(widths), steps, update)


def judged(runs: Runs, widths: tuple[int, ...], steps: int, update: Update) -> WidthCheck:
    """The verdict on networks that were measured."""
    weights = weights_of(runs, widths, update)
    matrices = [one.powers for one in weights.values() if one.powers.kind in MATRICES]
    if not matrices:
        raise InputValueError(
            f"no weight grows from width {widths[0]} to {widths[-1]}, expected make_model(width) to use its argument"
        )
    match = nearest(matrices, update)
    attention = attention_of(runs, widths)
    problems = problems_of(weights, match, attention, update)
    sizes = {
        key: torch.tensor([[run.network[key] for run in some] for some in runs])
        for key in ("output", "output_change", "kernel_motion")
    }
    known = 2 * match.deviating <= len(matrices)
    return WidthCheck(
        scheme=match.scheme.name if known else "other",
        nearest=match.scheme.name,
        phase=phase_of(weights, update, known),
        layers=layers_of(runs, widths, weights, match),
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
    """Known cases, and what could not be told."""
    last, notes = runs[-1][0], []
    zero = [name for name, found in last.parameters.items() if found["weight"] == 0 and len(last.shapes[name]) > 1]
    if zero:
        notes.append(f"{', '.join(zero)} starts at zero: its scale at the start has no power, which is no error")
    tied = [name for name in weights if name in last.tied]
    if tied:
        notes.append(f"{', '.join(tied)} are one tensor: its scale and its rate serve both uses")
    heads = [place for place, powers in attention.items() if float(powers["scale"]) < -0.75 * float(powers["head"])]
    if heads and scheme != "mup":
        notes.append(f"attention is divided by the size of a head, as in muP, in {', '.join(heads)}")
    own = [name for name in weights if not last.parameters[name].get("regular", 1.0)]
    if own:
        notes.append(
            f"updates of {', '.join(own)} follow neither the gradient nor its signs: their rates are measured, and are "
            "compared with those of Adam, which your optimizer need not share"
        )
    still = [name for name in last.owners if name not in weights]
    if still:
        notes.append(f"{', '.join(still)} had no gradient but rounding in the first steps and is not judged")
    lost = [
        str(width)
        for width, some in zip(widths, runs, strict=True)
        if not all(numpy.isfinite(run.network["output_change"]) for run in some)
    ]
    if lost:
        notes.append(f"training diverged at width {', '.join(lost)}: changes there are left out")
    noisy = [
        name
        for name, one in weights.items()
        if one.powers.kind in MATRICES and max(one.powers.rate_error, one.powers.gain_error) > 1 / 6
    ]
    if noisy:
        notes.append(f"powers of {', '.join(noisy)} are uncertain by more than 1/2: take more seeds or widths")
    return notes


def _checked(
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
    whole = [isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths]
    if len(whole) < 2 or not all(whole) or sorted(set(widths)) != list(widths):
        raise InputValueError(f"widths={widths!r}, expected at least two whole numbers that increase, (64, 128, 256)")
    for name, value in (("steps", steps), ("seeds", seeds)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputValueError(f"{name}={value!r}, expected a whole number >= 1")
    if loss is None:
        loss = "mse" if y.is_floating_point() else "cross-entropy"
    if losses.form(loss) == "cross-entropy" and y.is_floating_point():
        losses.check_targets("cross-entropy", y, y)
    return x, y, losses.function(loss)


def _made(make_model: MakeModel, optimizer: MakeOptimizer | None, width: int, seed: int) -> tuple[nn.Module, Optimizer]:
    """The network of a width and a seed, and its optimizer."""
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
        made = groups
    elif optimizer is None or isinstance(optimizer, type):
        trained = [p for p in model.parameters() if p.requires_grad] if groups is None else groups
        made = SGD(trained, lr=DEFAULT_RATE) if optimizer is None else optimizer(trained)
    else:
        made = optimizer(model if groups is None else groups)
    if not isinstance(made, Optimizer):
        raise InputTypeError(f"optimizer gives {type(made).__name__}, expected a torch.optim.Optimizer")
    return model, made


def _update_kind(
    make_model: MakeModel, optimizer: MakeOptimizer | None, x: Inputs, y: Tensor, loss: losses.LossFunction, width: int
) -> Update:
    """Whether the first update grows with the loss, seen by one step with the loss and one with eight times it."""
    moved = []
    for factor in (1.0, 8.0):
        model, made = _made(make_model, optimizer, width, 0)
        before = [p.detach().clone() for p in model.parameters()]
        with _explained(width):
            made.zero_grad()
            value = loss(call_model(model, x), y)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise InputValueError("the loss gives no differentiable number, expected a tensor of one number")
            (factor * value).backward()
            made.step()
        moved.append(sum(float((p.detach() - old).norm()) for p, old in zip(model.parameters(), before, strict=True)))
    if not moved[0]:
        raise InputValueError(
            "one step of the optimizer changes no parameter, expected one that trains; give it a rate"
        )
    return "proportional" if moved[1] > 8**0.5 * moved[0] else "normalized"


@contextmanager
def _explained(width: int) -> Iterator[None]:
    """Errors of the user's network say at which width they came."""
    try:
        yield
    except (FeatlearnError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"the network of width {width} failed: {type(error).__name__}: {error}") from error
