"""`fl.scale_check`: how a network scales with its size, and which parameter is off."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import numpy
import torch
from torch import Tensor

from featlearn import losses
from featlearn.errors import InputTypeError, InputValueError, did_you_mean
from featlearn.network.inputs import Inputs, batch_size
from featlearn.network.isolation import random_state_kept
from featlearn.signatures import name_keywords
from featlearn.widths.deviations import Judgment, judge_width
from featlearn.widths.directions import judge_depth, judge_other, judge_rank
from featlearn.widths.fits import power
from featlearn.widths.networks import MakeModel, MakeOptimizer, apply_patch, create, explain_errors
from featlearn.widths.passes import call_model
from featlearn.widths.rows import Runs, fit_attention, fit_uses, merge_repeated
from featlearn.widths.scaling import Problem, WidthCheck
from featlearn.widths.schemes import MATRICES, Update
from featlearn.widths.size_runs import SizeRun, train_and_measure
from featlearn.widths.transfer import sweep_rates, transfer_cost

Along = Literal["width", "depth", "rank", "heads", "experts"]
TRANSFER_STEPS = 40
TRIED_PATCHES = 12
"""Largest number of patches that are tried; equal patches of further parameters are not."""
_LOG = logging.getLogger("featlearn")


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
    """Train a network at several widths for a few steps, and fit how it scales: `scale_check` along the width.

        def make_model(width):
            return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

        print(fl.width_check(make_model, (x, y), optimizer=lambda model: torch.optim.Adam(model.parameters(), 1e-3)))

    Args:
        make_model: Function `make_model(width)`, as `make` of `scale_check`.
        data: Batch `(x, y)` for all steps. `x` is a tensor, a tuple, or a mapping.
        widths: At least two, preferably four widths, each twice the previous.
        optimizer: Function `optimizer(model)` that returns an optimizer.
        steps: Training steps per width.
        seeds: Networks per width.
        loss: Training loss.
        progress: Function called with the number of finished networks and the total.
    """
    return scale_check(
        make_model, data, sizes=widths, optimizer=optimizer, steps=steps, seeds=seeds, loss=loss, progress=progress
    )


@name_keywords()
def scale_check(
    make: MakeModel,
    data: tuple[Inputs, Tensor],
    *,
    sizes: Sequence[int],
    along: Along = "width",
    optimizer: MakeOptimizer | None = None,
    steps: int = 10,
    seeds: int = 3,
    loss: losses.Loss | None = None,
    transfer: bool = False,
    transfer_steps: int = TRANSFER_STEPS,
    progress: Callable[[int, int], None] | None = None,
) -> WidthCheck:
    """Train a network at several sizes for a few steps, fit how it scales, and name the parameters that are off.

        def make(depth):
            return ResidualNetwork(width=64, depth=depth)

        print(fl.scale_check(make, (x, y), sizes=(2, 4, 8, 16), along="depth", optimizer=torch.optim.Adam))

    The rows of the result are uses of parameters: ops that combine data with a parameter. For every use it fits powers
    of the size, with standard errors, of what the op gives, its change by its own update and by those of earlier
    layers, and spectral norms. The initial size of the op's output (gain) and its motion by the first update (rate)
    determine the scheme (Yang & Hu 2021; Yang et al. 2022), the phase at infinite size, and which uses deviate by which
    power. The position of multipliers does not matter. Readouts that start at zero, tied embeddings, and attention
    divided by the head size are handled.

    The verdict uses the initial weights and the first update of each parameter, so it does not depend on a good
    learning rate. Changes over all `steps` are reported in addition.

    Args:
        make: Function `make(size)` that returns a module, a pair of a module and parameter groups, as
            `fl.steer.parametrize`, or a pair of a module and its optimizer.
        data: Batch `(x, y)` for all steps. `x` is a tensor, a tuple, or a mapping.
        sizes: At least two, preferably four sizes, each twice the previous.
        along: What the size is: `"width"`, `"depth"` (number of blocks), `"rank"` (of adapters), `"heads"`, or
            `"experts"`. It chooses the schemes that powers are compared with.
        optimizer: Function `optimizer(model)` that returns an optimizer; it is called with the parameter groups if
            there are any. An optimizer class such as `torch.optim.Adam` is called with the parameters. By default SGD
            with learning rate 0.01.
        steps: Training steps per size.
        seeds: Networks per size; `torch`, `random`, and `numpy` are seeded before each.
        loss: Training loss: a name of `fl.losses`, a module, or a function of (outputs, y). By default `"mse"` for
            floating-point targets and `"cross-entropy"` for classes.
        transfer: Find the best learning rate at each size by short runs, and fit how it drifts. The cost estimate is
            logged first.
        transfer_steps: Training steps of these runs.
        progress: Function called with the number of finished networks and the total.

    Returns:
        Powers by use (`.uses`), `.scheme`, `.phase`, `.problems` with text to paste (`.patch`), and `.transfer`.

    Random states are restored.
    """
    if along not in get_args(Along):
        raise InputValueError(
            f"along={along!r}, expected {', '.join(get_args(Along))}{did_you_mean(along, get_args(Along))}"
        )
    x, y, loss = _checked_arguments(make, data, sizes, along, steps, seeds, loss)
    if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer is None or callable(optimizer)):
        raise InputTypeError(
            f"optimizer is {type(optimizer).__name__}, expected a function of the model that returns an optimizer, "
            "since each size has a network of its own: lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    function = losses.function(loss)
    with random_state_kept(), torch.inference_mode(False), torch.enable_grad():
        update, bounded = _update_kind(make, optimizer, x, y, function, sizes[0], along)

        def measure(counts: Sequence[int], count: int, steps: int, patch: str = "") -> Runs:
            runs: list[list[SizeRun]] = []
            for size in counts:
                runs.append([])
                for seed in range(count):
                    model, model_optimizer = create(make, optimizer, size, seed)
                    with explain_errors(size, along):
                        if patch:
                            apply_patch(patch, model, model_optimizer, along, size)
                        proportional = update == "proportional"
                        run = train_and_measure(
                            model, model_optimizer, x, y, function, steps, proportional=proportional
                        )
                    runs[-1].append(run)
                    if progress is not None and not patch:
                        progress(len(runs[:-1]) * count + seed + 1, len(counts) * count)
            return merge_repeated(runs)

        runs = measure(sizes, seeds, steps)
        judge = partial(_judge, update=update, bounded=bounded, along=along)
        judgment = judge(runs, sizes)
        problems = _tried(
            judgment.problems, lambda patch: judge(measure((sizes[0], sizes[-1]), 1, 3, patch), (sizes[0], sizes[-1]))
        )
        rates = None
        if transfer:
            counts = [sum(p.numel() for p in create(make, optimizer, size, 0)[0].parameters()) for size in sizes]
            cost = transfer_cost(sizes, seeds, transfer_steps, counts, batch_size(x))
            _LOG.info("learning rates at %d sizes: %s", len(sizes), cost)
            rates = sweep_rates(
                make,
                optimizer,
                x,
                y,
                function,
                sizes,
                seeds=seeds,
                steps=transfer_steps,
                along=along,
                cost=cost,
                progress=lambda: None,
            )
    network = {
        key: torch.tensor([[run.network[key] for run in seed_runs] for seed_runs in runs])
        for key in ("output", "output_change", "kernel_motion")
    }
    return WidthCheck(
        scheme=judgment.scheme,
        scheme_words=judgment.words,
        nearest=judgment.nearest,
        phase=judgment.phase,
        uses=judgment.uses,
        attention=fit_attention(runs, sizes),
        network={key: power(values, sizes) for key, values in network.items()},
        network_sizes=network,
        problems=problems,
        notes=tuple(_notes(runs, sizes, judgment, along)),
        sizes=tuple(sizes),
        seeds=seeds,
        steps=steps,
        update=update,
        along=along,
        transfer=rates,
    )


def _judge(runs: Runs, sizes: Sequence[int], *, update: Update, bounded: bool, along: Along) -> Judgment:
    uses = fit_uses(runs, sizes, update)
    if along == "depth":
        if not any("*" in name for name in uses):
            raise InputValueError(
                f"no repeated module is added from depth {sizes[0]} to {sizes[-1]}, expected make(depth) to add blocks "
                "to an nn.Sequential or nn.ModuleList; for networks that grow in width pass along='width'"
            )
        return judge_depth(uses, update, sizes)
    if along == "rank":
        return judge_rank(uses, update, sizes)
    if not any(use.kind in MATRICES for use in uses.values()) or along == "experts":
        if along == "width":
            raise InputValueError(
                f"no weight grows from width {sizes[0]} to {sizes[-1]}, expected make_model(width) to use its argument"
            )
        return judge_other(uses, fit_attention(runs, sizes), update, sizes, along)
    return judge_width(uses, fit_attention(runs, sizes), update, sizes, bounded, along)


def _tried(problems: Sequence[Problem], check: Callable[[str], Judgment]) -> tuple[Problem, ...]:
    """Run the patch of each problem, and say whether it removes the problem."""
    tried = []
    for number, problem in enumerate(problems):
        if not problem.patch or problem.patch.startswith("#") or number >= TRIED_PATCHES:
            tried.append(problem)
            continue
        rest = check(problem.patch).problems
        same = [p for p in rest if (p.parameter, p.quantity) == (problem.parameter, problem.quantity)]
        tried.append(replace(problem, tried=not same))
    return tuple(tried)


def _notes(runs: Runs, sizes: Sequence[int], judgment: Judgment, along: Along) -> list[str]:
    """Return notes on special cases and limitations."""
    last, notes, uses = runs[-1][0], [], judgment.uses
    zero = [name for name, use in uses.items() if use.kind in MATRICES and not float(use.sizes["weight"].max())]
    if zero:
        notes.append(f"{', '.join(zero)} starts at zero: its scale at the start has no power, which is no error")
    tied = [name for name, use in uses.items() if use.tied]
    if tied:
        notes.append(f"{', '.join(tied)} are one tensor: its scale and its rate serve both uses")
    heads = [
        m for m, powers in fit_attention(runs, sizes).items() if float(powers["scale"]) < -0.75 * float(powers["head"])
    ]
    if heads and judgment.nearest != "mup" and along != "depth":
        notes.append(f"attention is divided by the size of a head, as in muP, in {', '.join(heads)}")
    rules: dict[str, list[str]] = {}
    for name, use in uses.items():
        if use.update_rule not in ("gradient", "signs") and use.kind != "vector":
            rules.setdefault(use.update_rule, []).append(name)
    for rule, names in rules.items():
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if rule == "other":
            notes.append(
                f"updates of {listed} follow neither the gradient nor its signs: their spectral norms are judged"
            )
        else:
            notes.append(f"updates of {listed} are orthogonalized ({rule}): their spectral norms are judged")
    judged = {use.parameter for use in uses.values() if torch.isfinite(use.sizes["rate"]).any()}
    unjudged = [use.parameter for use in uses.values() if use.parameter not in judged]
    without_gradient = [*dict.fromkeys([*unjudged, *last.unused])]
    if without_gradient:
        notes.append(f"{', '.join(without_gradient)} had no gradient but rounding in the first steps and is not judged")
    diverged = [
        str(size)
        for size, seed_runs in zip(sizes, runs, strict=True)
        if not all(numpy.isfinite(run.network["output_change"]) for run in seed_runs)
    ]
    if diverged:
        notes.append(f"training diverged at {along} {', '.join(diverged)}: changes there are left out")
    noisy = [
        name
        for name, use in uses.items()
        if use.kind in MATRICES and max(float(use.exponents[key].stderr) for key in ("rate", "gain")) > 1 / 6
    ]
    if noisy:
        notes.append(f"powers of {', '.join(noisy)} are uncertain by more than 1/2: take more seeds or sizes")
    return notes


def _checked_arguments(
    make: Any, data: Any, sizes: Any, along: str, steps: Any, seeds: Any, loss: Any
) -> tuple[Inputs, Tensor, losses.Loss]:
    if isinstance(make, torch.nn.Module) or not callable(make):
        raise InputTypeError(
            f"make_model is {type(make).__name__}, expected a function of the {along} that returns a new module"
        )
    if not isinstance(data, tuple | list) or len(data) != 2 or not isinstance(data[1], Tensor):
        raise InputTypeError(f"data is {type(data).__name__}, expected a pair (x, y): inputs and a tensor of targets")
    x, y = data
    samples = batch_size(x)
    if y.dim() == 0 or len(y) != samples:
        raise InputValueError(f"data has {samples} inputs and targets of shape {tuple(y.shape)}")
    valid = [isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes]
    if len(valid) < 2 or not all(valid) or sorted(set(sizes)) != list(sizes):
        raise InputValueError(f"sizes={sizes!r}, expected at least two whole numbers that increase, (64, 128, 256)")
    for name, value in (("steps", steps), ("seeds", seeds)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputValueError(f"{name}={value!r}, expected a whole number >= 1")
    if loss is None:
        loss = "mse" if y.is_floating_point() else "cross-entropy"
    if losses.form(loss) == "cross-entropy" and y.is_floating_point():
        losses.check_targets("cross-entropy", y, y)
    return x, y, loss


def _update_kind(
    make: MakeModel,
    optimizer: MakeOptimizer | None,
    x: Inputs,
    y: Tensor,
    loss: losses.LossFunction,
    size: int,
    along: str,
) -> tuple[Update, bool]:
    """Return whether the first update grows with the loss, and whether the loss has bounded gradients.

    The first by a step with the loss and a step with 8 times the loss, the second by outputs of two sizes.
    """
    distances = []
    for factor in (1.0, 8.0):
        model, model_optimizer = create(make, optimizer, size, 0)
        before = [p.detach().clone() for p in model.parameters()]
        with explain_errors(size, along):
            model_optimizer.zero_grad()
            output = call_model(model, x)
            value = loss(output, y)
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
    slopes = []
    for scale in (10.0, 1000.0):
        outputs = (scale * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))).to(output)
        (slope,) = torch.autograd.grad(loss(outputs.requires_grad_(True), y), outputs)
        slopes.append(float(slope.norm()))
    return "proportional" if distances[1] > 8**0.5 * distances[0] else "normalized", slopes[1] < 3 * slopes[0]
