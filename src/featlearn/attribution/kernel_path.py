"""Gradient descent along the kernels of a run: the same samples in the same order, with other weights or targets."""

import bisect
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from featlearn.attribution.objective import Objective
from featlearn.linalg.krylov import EigenPairs, top_eigenpairs

LARGEST_STEP, LARGEST_ADAPTIVE_STEP = 1.0, 0.4
"""Largest step along an eigenvector of a kernel, relative to the step to its minimum.

A network with larger steps stays stable because its kernel changes, but descent with recorded kernels does not. Kernels
of adaptive optimizers hold the noise of second moments too.
"""
DENSE = 400
"""Largest number of rows for which all eigenvalues are computed."""
TOP = 24
"""Eigenvalues computed of larger kernels."""
NUMBERS = 2**24
"""Outputs of replays that are held at once."""


@dataclass(frozen=True)
class Momentum:
    """Rule by which an optimizer turns gradients into a step: buffer = decay * buffer + gain * gradient."""

    decay: float = 0.0
    gain: float = 1.0
    nesterov: bool = False
    corrected: bool = False
    """True if the buffer is divided by 1 - decay^t."""

    @property
    def total(self) -> float:
        """Sum of all steps that one gradient makes."""
        return self.gain / (1 - self.decay)


@dataclass(frozen=True, eq=False)
class KernelPath:
    """Kernels, outputs and steps of a run.

    Rows of a kernel are P training and then Q test samples, columns are training samples: (P + Q, P) where all outputs
    share it, or ((P + Q) C, P C) between all outputs.
    """

    steps: list[int]
    """K recorded steps, from 0."""
    kernels: list[Tensor]
    """K kernels, divided by the learning rate."""
    outputs: Tensor
    """(K, P + Q, C) recorded outputs."""
    targets: Tensor
    """(P, C)"""
    order: list[Tensor]
    """Indices of the training samples of each step."""
    rates: Tensor
    """(T,) learning rates."""
    objective: Objective
    momentum: Momentum
    largest_step: float = LARGEST_STEP
    _eigenpairs: dict[int, EigenPairs] = field(default_factory=dict, init=False)

    @property
    def samples(self) -> int:
        """Number of training samples P."""
        return len(self.targets)

    def constant(self, index: int) -> "KernelPath":
        """Return the same run with one of its kernels at all times."""
        return replace(self, kernels=[self.kernels[index]] * len(self.kernels))

    def shared(self) -> "KernelPath":
        """Return the same run with kernels that all outputs share: their mean over outputs."""
        rows, outputs = self.outputs.shape[1:]
        if self.kernels[0].shape[1] == self.samples:
            return self
        blocks = [kernel.reshape(rows, outputs, self.samples, outputs) for kernel in self.kernels]
        return replace(self, kernels=[block.diagonal(dim1=1, dim2=3).mean(-1) for block in blocks])

    def work(self, replays: int) -> float:
        """Return the multiply-adds of so many replays."""
        used = self.samples if self.momentum.decay else sum(map(len, self.order)) / len(self.order)
        outputs = self.outputs.shape[2] * self.samples / self.kernels[0].shape[1]
        return replays * outputs * self.kernels[0].numel() * len(self.order) * used / self.samples

    def replay(
        self,
        weights: Tensor,
        *,
        targets: Tensor | None = None,
        factor: float = 1.0,
        stops: Collection[int] = (),
        last: int | None = None,
    ) -> dict[int, Tensor]:
        """Descend along the kernels, from the first outputs.

        Args:
            weights: Weights of the training samples (P, M), for M replays. A mean over a batch is over these weights.
            targets: Other targets (P, C).
            factor: Multiplies the learning rates.
            stops: Steps whose outputs are returned.
            last: Last step; by default that of the run.

        Returns:
            Step -> outputs (P + Q, C, M), of `stops` and of the last step.
        """
        rows, outputs = self.outputs.shape[1:]
        size = max(1, NUMBERS // (rows * outputs))
        parts = [
            self._replay(part, self.targets if targets is None else targets, factor, stops, last)
            for part in weights.to(self.outputs).split(size, 1)
        ]
        return {step: torch.cat([part[step] for part in parts], 2) for step in parts[0]}

    def _replay(
        self, weights: Tensor, targets: Tensor, factor: float, stops: Collection[int], last: int | None
    ) -> dict[int, Tensor]:
        objective, momentum, replays = self.objective, self.momentum, weights.shape[1]
        f = self.outputs[0][:, :, None].repeat(1, 1, replays)
        buffer = f.new_zeros(self.samples, f.shape[1], replays)
        results = {0: f.clone()} if 0 in stops or last == 0 else {}
        end = len(self.order) if last is None else last
        interval, kernel = -1, self.kernels[0]
        for step in range(end):
            if interval != (now := self._interval(step, factor)):
                interval, kernel = now, self._stable_kernel(now, step, factor)
            batch = self.order[step]
            weight = weights[batch][:, None, :]
            gradient = objective.slopes(f[batch], targets[batch][:, :, None]) * weight
            if objective.averaged:
                gradient /= weight.sum(0).clamp(min=1e-12)
            columns, update = kernel, gradient
            if momentum.decay or 2 * len(batch) > self.samples:
                update = torch.zeros_like(buffer).index_add_(0, batch, gradient)
            else:
                columns = kernel.reshape(len(kernel), self.samples, -1)[:, batch].flatten(1)
            if momentum.decay:
                # torch does not dampen the first gradient
                gain = momentum.gain if step or momentum.corrected else 1.0
                buffer.mul_(momentum.decay).add_(update, alpha=gain)
                update = update + momentum.decay * buffer if momentum.nesterov else buffer
            rate = factor * float(self.rates[step])
            if momentum.corrected:
                rate /= 1 - momentum.decay ** (step + 1)
            f.sub_((columns @ update.reshape(columns.shape[1], -1)).reshape(f.shape), alpha=rate)
            if step + 1 in stops or step + 1 == end:
                results[step + 1] = f.clone()
        return results

    def _interval(self, step: int, factor: float) -> int:
        """Return the interval of recorded steps whose kernel a step has.

        At `factor` times the rate, kernels change that much earlier: they follow the sum of all rates.
        """
        if factor == 1.0:
            return bisect.bisect_right(self.steps, step) - 1
        passed = torch.cat([self.rates.new_zeros(1), self.rates.cumsum(0)])
        times = passed[torch.tensor(self.steps)]
        number = int(torch.searchsorted(times, factor * passed[step], right=True)) - 1
        return min(number, len(self.steps) - 2)

    def _stable_kernel(self, interval: int, step: int, factor: float) -> Tensor:
        """Return the kernel of an interval, with eigenvalues at most those for which each step is stable."""
        begin, end = self.steps[interval : interval + 2]
        kernel = (self.kernels[interval] + self.kernels[interval + 1]) / 2
        at = self.outputs[interval : interval + 2, : self.samples]
        curvature = max(self.objective.curvature(at[0]), self.objective.curvature(at[1]))
        rate = factor * max(float(self.rates[begin:end].max()), float(self.rates[step])) * self.momentum.total
        share = 1 / self.samples if self.objective.averaged else 1.0
        if rate * share * curvature <= 0:
            return kernel
        limit = self.largest_step / (rate * share * curvature)
        if float(kernel[: kernel.shape[1]].norm()) <= limit:  # no eigenvalue is larger than the norm
            return kernel
        values, vectors, _ = self._top(interval)
        vectors, shrinking = vectors[:, values > limit], 1 - limit / values[values > limit]
        return kernel - ((kernel.double() @ vectors) * shrinking @ vectors.mT).to(kernel)

    def _top(self, interval: int) -> EigenPairs:
        """Return the largest eigenvalues of the kernel among training samples in an interval."""
        if interval not in self._eigenpairs:
            first, last = self.kernels[interval : interval + 2]
            square = ((first + last) / 2)[: first.shape[1]].double()
            square = (square + square.mT) / 2
            if len(square) <= DENSE:
                values, vectors = torch.linalg.eigh(square)
                pairs = EigenPairs(values, vectors, torch.zeros_like(values))
            else:
                generator = torch.Generator().manual_seed(0)
                start = torch.randn(len(square), TOP, generator=generator, dtype=torch.float64)
                pairs = top_eigenpairs(lambda v: square @ v, start, TOP, 1e-3, 10 * TOP)
            self._eigenpairs[interval] = pairs
        return self._eigenpairs[interval]
