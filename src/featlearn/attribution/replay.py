"""What a run would have been with other samples, targets, steps or rates: `fl.replay`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.attribution.objective import target_rows
from featlearn.attribution.recorded import RecordedPath, recorded_path
from featlearn.attribution.trust import TRUSTED, forecast_change_error
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run
from featlearn.signatures import name_keywords, raise_from_call


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Predicted outputs of a run that was not made. Made by the methods of `Replay`."""

    question: str
    """What differs from the run."""
    outputs: Tensor
    """Predicted outputs on the test points at the end (Q, C)."""
    change: Tensor
    """Predicted outputs less those of the run (Q, C)."""
    relative_error: Estimate
    """Forecast of the error of `change`, relative to `change`; 1 means no better than assuming that nothing changes."""

    @property
    def error(self) -> Estimate:
        """Forecast of the root-mean-square error of `outputs`."""
        size = float(self.change.square().mean().sqrt())
        ratio = self.relative_error
        return Estimate(float(ratio.value) * size, float(ratio.stderr) * size, ratio.samples)

    @property
    def trusted(self) -> bool:
        """Whether the error is forecast to be at most 40% of the change."""
        return float(self.relative_error) <= TRUSTED

    def __str__(self) -> str:
        size = float(self.change.square().mean().sqrt())
        verdict = "Trust its direction and size" if self.trusted else "Do not trust this: retrain"
        return (
            f"{self.question}: outputs change by {size:.3g} (root mean square over test points).\n"
            f"{verdict}. Forecast error of the outputs {float(self.error):.2g} (± {float(self.error.stderr):.1g}), "
            f"{float(self.relative_error):.0%} of the change."
        )


class Replay:
    """A run that can be repeated along its recorded kernels in a fraction of a second. Made by `fl.replay`.

    >>> replay = fl.replay(watch.run)
    >>> answer = replay.without([3, 17, 40])
    >>> print(answer)
    >>> answer.outputs  # (Q, C) on the test points

    Each answer is the outputs of the run, plus the difference of two replays: the changed one and that of the run
    itself. The kernels are those of the run. How another run would have changed them is not known, so each answer has a
    forecast of its error.
    """

    def __init__(self, recorded: RecordedPath) -> None:
        self._recorded = recorded

    @property
    def outputs(self) -> Tensor:
        """Outputs of the run on the test points at the end (Q, C)."""
        return self._recorded.test_outputs

    @property
    def self_error(self) -> float:
        """Error of the replay of the run itself on the test points, relative to the change of their outputs."""
        return self._recorded.facts.self_error

    def __repr__(self) -> str:
        path = self._recorded.path
        return (
            f"Replay({path.samples} training samples, {len(path.order)} steps, {len(path.steps)} kernels, "
            f"own error {self.self_error:.0%})"
        )

    @raise_from_call
    def without(self, indices: Any) -> Answer:
        """Leave training samples out of every batch; the loss is averaged over those that are left.

        Args:
            indices: Indices of the samples.
        """
        samples = self._recorded.path.samples
        dropped = _indices(indices, samples)
        if len(dropped) == samples:
            raise InputValueError(f"all {samples} training samples are left out, expected at least one that stays")
        weights = torch.ones(samples, 1)
        weights[dropped] = 0.0
        return self._answer(f"Without {len(dropped)} of {samples} samples", weights=weights)

    @raise_from_call
    def with_targets(self, y: Tensor) -> Answer:
        """Replace the training targets.

        Args:
            y: Targets of all P training samples, in the form of those of the run.
        """
        path, loss = self._recorded.path, self._recorded.loss
        if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != path.samples:
            got = f"of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise InputValueError(f"y is {got}, expected targets of all {path.samples} training samples")
        rows = target_rows(loss, path.outputs[0, : path.samples], y, "y")
        changed = int((rows != path.targets).any(1).sum())
        return self._answer(f"With other targets of {changed} of {path.samples} samples", targets=rows)

    @raise_from_call
    def stopped_at(self, step: int) -> Answer:
        """Stop training after `step` steps."""
        total = len(self._recorded.path.order)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= total:
            raise InputValueError(f"step={step!r}, expected a whole number from 0 to {total}")
        return self._answer(f"Stopped at step {step} of {total}", last=step)

    @raise_from_call
    def at_rate(self, factor: float) -> Answer:
        """Multiply all learning rates by `factor`."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise InputValueError(f"factor={factor!r}, expected a number > 0")
        return self._answer(f"At {factor:g} times the rate", factor=float(factor))

    def _answer(
        self,
        question: str,
        *,
        weights: Tensor | None = None,
        targets: Tensor | None = None,
        factor: float = 1.0,
        last: int | None = None,
    ) -> Answer:
        recorded, path = self._recorded, self._recorded.path
        samples = path.samples
        weights = torch.ones(samples, 1) if weights is None else weights
        (result,) = path.replay(weights, targets=targets, factor=factor, last=last).values()
        step = len(path.order) if last is None else last
        outputs = result[samples:, :, 0] + self._correction(step)
        change = outputs - recorded.test_outputs
        kind = "rate" if factor != 1.0 else "stop" if last is not None else "samples"
        return Answer(
            question=question,
            outputs=outputs,
            change=change,
            relative_error=forecast_change_error(kind, recorded.facts),
        )

    def _correction(self, step: int) -> Tensor:
        """Return the outputs of the run less those of its replay at a step, interpolated between recorded steps."""
        recorded, path = self._recorded, self._recorded.path
        later = next(number for number, recorded_step in enumerate(path.steps) if recorded_step >= step)
        errors = [
            path.outputs[n, path.samples :] - recorded.base[path.steps[n]][path.samples :] for n in range(later + 1)
        ]
        if path.steps[later] == step:
            return errors[later]
        begin, end = path.steps[later - 1], path.steps[later]
        share = (step - begin) / (end - begin)
        return errors[later - 1] * (1 - share) + errors[later] * share


@name_keywords()
def replay(run: Run) -> Replay:
    """Prepare to answer what a run would have been with other samples, targets, steps or rates.

    >>> with fl.watch(model, probe, out="runs/a", optimizer=optimizer, loss="mse", replay=(x, y)) as watch:
    ...     for indices in batches:
    ...         ...
    ...         watch.step(loss=loss, samples=indices)
    >>> print(fl.replay(watch.run).without([3, 17, 40]))

    The run is repeated by descent along the kernels that it recorded, in the recorded order of samples, with its rates
    and its momentum. The changed run is not trained: an answer takes a fraction of a second, and states its error.

    Args:
        run: Run recorded with `replay=(x, y)`.

    Returns:
        A `Replay` with `.without(indices)`, `.with_targets(y)`, `.stopped_at(step)` and `.at_rate(factor)`.
    """
    return Replay(recorded_path(run))


def _indices(indices: Any, samples: int) -> Sequence[int]:
    """Return distinct indices of training samples."""
    try:
        values = torch.as_tensor(indices).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(f"indices is {type(indices).__name__}, expected indices of training samples") from error
    if values.dim() > 1 or values.is_floating_point() or values.dtype == torch.bool:
        kind = str(values.dtype).removeprefix("torch.")
        raise InputTypeError(f"indices is {kind} of shape {tuple(values.shape)}, expected whole numbers (n,)")
    values = values.reshape(-1).unique()
    if not len(values) or int(values.min()) < 0 or int(values.max()) >= samples:
        raise InputValueError(f"indices={indices!r}, expected at least one, each from 0 to {samples - 1}")
    return [int(value) for value in values]
