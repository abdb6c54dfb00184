"""Which training samples made an output, and how far to trust that: `fl.attribute`."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featlearn import losses
from featlearn.attribution.kernel_path import KernelPath
from featlearn.attribution.model_path import model_path
from featlearn.attribution.objective import target_rows
from featlearn.attribution.recorded import RecordedPath, recorded_path
from featlearn.attribution.trust import forecast_reliability
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.correlation import correlation
from featlearn.linalg.estimate import Estimate
from featlearn.monitoring.probe_data import tensors_digest
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, Readout, tensors_in
from featlearn.record import Run, open_run
from featlearn.signatures import name_keywords

Measure = Literal["margin", "loss"] | int
Pair = tuple[Inputs, Tensor]
PER_SAMPLE = 4
"""Replays for each training sample."""
FEWEST, MOST = 400, 4000
CHECKED = 100
"""Replays with which the scores are compared."""
RIDGE = 0.3
LARGEST_WORK = 5e11
"""Multiply-adds of the replays with kernels between all outputs; above, all outputs share one kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """Effects of training samples on test outputs. Made by `fl.attribute`."""

    scores: Tensor
    """Effect of training sample i on test point q (Q, P); positive where the sample helps."""
    reliability: Estimate
    """Forecast of the linear datamodeling score (LDS) of `scores`, for half of the training samples dropped: their rank
    correlation with networks that are retrained on random halves, averaged over test points."""
    agreement: float
    """Rank correlation of the sums of scores with replays on random halves along all kernels of the run: the LDS, if
    these replays were exact."""
    held_out_margins: Tensor
    """Margin of each training sample (P,), averaged over replays without it."""
    kernel: str
    """Kernels of the replays: `"first"`, `"last"` or `"path"`."""

    def label_errors(self) -> Tensor:
        """Return the indices of all training samples, those whose targets fit the other samples least first."""
        return self.held_out_margins.argsort()

    def top(self, index: int, count: int = 5) -> tuple[Tensor, Tensor]:
        """Return the indices of the samples that help a test point most, and of those that harm it most."""
        order = self.scores[index].argsort(descending=True)
        return order[:count], order.flip(0)[:count]

    def __str__(self) -> str:
        tests, samples = self.scores.shape
        value, error = float(self.reliability.value), float(self.reliability.stderr)
        words = (
            "Trust rankings"
            if value - error > 0.6
            else "Trust large effects only"
            if value > 0.4
            else "Do not trust it"
        )
        kernels = {"path": "the kernels along the run", "first": "the first kernel", "last": "the last kernel"}
        return (
            f"Effects of {samples} training samples on {tests} test points, by {kernels[self.kernel]}.\n"
            f"{words}. Forecast correlation with retraining on half of the samples: {value:.2f} (± {error:.2f})."
        )


@name_keywords()
def attribute(
    source: nn.Module | Run | str | os.PathLike[str],
    train: Pair | None = None,
    test: Pair | Inputs | None = None,
    *,
    loss: losses.Loss | None = None,
    measure: Measure = "margin",
    kernel: Literal["last", "first", "path"] | None = None,
    model: nn.Module | None = None,
    readout: Readout | None = None,
) -> Attribution:
    """Score how much each training sample helped each test output, and forecast how far to trust the scores.

    >>> attribution = fl.attribute(watch.run)  # recorded with fl.watch(..., replay=(x_train, y_train))
    >>> print(attribution)
    >>> attribution.scores  # (Q, P)
    >>> attribution.label_errors()[:20]

    Training is replayed along kernels on random halves of the samples, and a linear model of these replays gives the
    scores: the mean effect of adding a sample to a half that lacks it. Networks that learn features change their
    kernel, so the path of a run's kernels is better than one kernel. `.reliability` says how much.

    Args:
        source: Trained network, a run, or the path of a run. A run recorded with `replay=` needs nothing else.
        train: Training samples (x, y); by default those of the run.
        test: Test points (x, y), or x alone; by default those of the run. Without y, the margin is that of the
            predicted class.
        loss: Training loss by name; by default that of the run.
        measure: `"margin"`, the output of the right class less the log-sum-exp of the others; `"loss"`, where a sample
            helps if it lowers the loss; or the index of an output.
        kernel: `"path"` (the default for a run with `replay=`), `"last"` or `"first"`.
        model: The trained network, for a run that was opened from disk and has no recorded kernels.
        readout: Map from the model's output to (P,) or (P, C), as for `fl.ntk`.

    Returns:
        An `Attribution` with `.scores`, `.reliability` and `.label_errors()`.
    """
    recorded: RecordedPath | None = None
    if isinstance(source, str | os.PathLike):
        source = open_run(source)
    if isinstance(source, Run) and source.arrays.get("replay"):
        recorded = recorded_path(source)
        _refuse_other_loss(recorded, loss)
        name = _checked(kernel or "path")
        path = recorded.path if name == "path" else recorded.path.constant({"first": 0, "last": -1}[name])
        _refuse_other_samples(recorded, train, "train")
        x2, y2 = _test_pair(test)
        _refuse_other_samples(recorded, None if test is None else (x2, None), "test")
        f2 = recorded.test_outputs
        rows = recorded.test_targets if y2 is None else target_rows(recorded.loss, f2, y2, "test")
    else:
        network, name = _network(source, model, kernel)
        if train is None or test is None or loss is None:
            missing = "train" if train is None else "test" if test is None else "loss"
            if isinstance(source, Run):
                raise InputValueError(_without_replay(source, "train=(x, y), test=(x, y) and loss="))
            raise InputValueError(
                f"{missing}= is missing, expected train=(x, y), test=(x, y) and loss= for a network without a recorded "
                "run; fl.watch(..., replay=(x, y)) records one"
            )
        x2, y2 = _test_pair(test)
        if not isinstance(train, tuple | list) or len(train) != 2 or not isinstance(train[1], Tensor):
            raise InputTypeError(f"train is {type(train).__name__}, expected a pair (x, y) of samples and targets")
        path, f2 = model_path(network, train[0], train[1], x2, loss=loss, readout=readout)
        known = losses.name(loss)
        assert known is not None
        rows = None if y2 is None else target_rows(known, f2, y2, "test")
    return _attribution(path, f2, rows, _checked_measure(measure, f2.shape[1], rows), name, recorded)


def _attribution(
    path: KernelPath,
    f2: Tensor,
    rows: Tensor | None,
    measure: Measure,
    kernel: str,
    recorded: RecordedPath | None,
) -> Attribution:
    samples, objective = path.samples, path.objective
    generator = torch.Generator().manual_seed(0)
    pairs = min(max(PER_SAMPLE * samples, FEWEST), MOST) // 2
    half = torch.randint(2, (samples, pairs), generator=generator).float()
    half[0, half.sum(0) == 0] = 1.0  # no replay without samples
    checks = torch.stack([torch.randperm(samples, generator=generator) < samples // 2 for _ in range(CHECKED)], 1)
    weights = torch.cat([half, 1 - half], 1)
    affordable = path if path.work(weights.shape[1]) <= LARGEST_WORK else path.shared()
    (f,) = affordable.replay(weights).values()
    predicted = f2.argmax(1, keepdim=True) == torch.arange(f2.shape[1]) if f2.shape[1] > 1 else f2 > 0
    targets = (predicted.to(f2) if rows is None else rows)[:, :, None]

    def measured(f: Tensor) -> Tensor:
        if measure == "margin":
            return objective.margins(f[samples:], targets)
        return -objective.values(f[samples:], targets) if measure == "loss" else f[samples:, int(measure)]

    values = measured(f)
    difference = (values[:, :pairs] - values[:, pairs:]).double()
    signs = 2 * half.double() - 1
    system = signs @ signs.mT
    system.diagonal().add_(RIDGE * samples)
    scores = torch.linalg.solve(system, signs @ difference.mT).mT
    complete = path if recorded is None else recorded.path
    (exact,) = complete.replay(checks.float()).values()
    agreement = float(rank_correlation(scores @ checks.double(), measured(exact).double()).nanmean())
    absent = 1 - weights
    margins = objective.margins(f[:samples], path.targets[:, :, None])
    return Attribution(
        scores=scores.float(),
        reliability=forecast_reliability(agreement, None if recorded is None else recorded.facts),
        agreement=agreement,
        held_out_margins=(margins * absent).sum(1) / absent.sum(1).clamp(min=1),
        kernel=kernel,
    )


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's correlation of each row (n,)."""
    ranks = [values.argsort(1).argsort(1).double() for values in (first, second)]
    return correlation(ranks[0], ranks[1], "pearson", (-1,))


def _checked(kernel: Any) -> str:
    if kernel not in ("path", "last", "first"):
        raise InputValueError(f"kernel={kernel!r}, expected 'path', 'last' or 'first'")
    return str(kernel)


def _checked_measure(measure: Any, outputs: int, rows: Tensor | None) -> Measure:
    """Return the measure; refuse unknown ones, and those that need targets that are not there."""
    if isinstance(measure, int) and not isinstance(measure, bool):
        if not 0 <= measure < outputs:
            raise InputValueError(f"measure={measure}, expected an output from 0 to {outputs - 1}")
        return measure
    if measure not in ("margin", "loss"):
        raise InputValueError(f"measure={measure!r}, expected 'margin', 'loss', or the index of an output")
    if measure == "loss" and rows is None:
        raise InputValueError("measure='loss' without targets of the test points, expected test=(x, y)")
    return "margin" if measure == "margin" else "loss"


def _test_pair(test: Any) -> tuple[Any, Tensor | None]:
    if isinstance(test, tuple | list) and len(test) == 2 and (test[1] is None or isinstance(test[1], Tensor)):
        return test[0], test[1]
    return test, None


def _network(source: Any, model: nn.Module | None, kernel: Any) -> tuple[nn.Module, str]:
    """Return the network to measure, and which kernel it has."""
    name = _checked(kernel or "last")
    if isinstance(source, nn.Module):
        if name != "last":
            raise InputValueError(f"kernel={name!r} of a network, expected 'last'; pass a run for its {name} kernel")
        return source, name
    if not isinstance(source, Run):
        raise InputTypeError(f"source is {type(source).__name__}, expected an nn.Module, a Run, or the path of a run")
    watched = source.network
    network = model if model is not None or watched is None else watched.model
    if name == "path" or network is None:
        raise InputValueError(_without_replay(source, "model=, train=(x, y), test=(x, y) and loss="))
    if name == "first":
        if watched is None or not watched.initial:
            raise InputValueError(f"the run {source.name!r} has no first weights, expected kernel='last'")
        return network_at(network, watched.initial), name
    return network, name


def _without_replay(run: Run, instead: str) -> str:
    return (
        f"the run {run.name!r} was recorded without replay=; record it with fl.watch(..., optimizer=optimizer, "
        "loss=..., replay=(x_train, y_train)). To use the last kernel of the trained network instead, pass "
        f"{instead}"
    )


def _refuse_other_loss(recorded: RecordedPath, loss: losses.Loss | None) -> None:
    if loss is not None and losses.name(loss) != recorded.loss:
        raise InputValueError(f"loss={loss!r}, expected that of the run, {recorded.loss!r}; leave loss= out")


def _refuse_other_samples(recorded: RecordedPath, pair: Any, name: str) -> None:
    """Refuse samples whose kernels the run does not have."""
    if pair is None:
        return
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputTypeError(f"{name} is {type(pair).__name__}, expected a pair (x, y) of samples and targets")
    entry = recorded.run.config["replay"]
    if tensors_digest(tensors_in(pair[0])) != entry.get(f"{name}_inputs"):
        raise InputValueError(
            f"{name}= has other inputs than the run recorded, expected those of fl.watch(..., "
            f"{'replay' if name == 'train' else 'test'}=...); leave {name}= out, or pass the trained network as source"
        )
    if name == "train" and pair[1] is not None:
        path = recorded.path
        rows = target_rows(recorded.loss, path.outputs[0, : path.samples], pair[1], "train")
        if not torch.equal(rows, path.targets):
            raise InputValueError(
                "train= has other targets than the run recorded, expected the same; fl.replay(run).with_targets(y) "
                "says what others would do"
            )
