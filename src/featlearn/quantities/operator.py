"""The tangent kernel as an operator: products, traces, norms and eigenvalues of a matrix that is never formed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel, Settings
from featlearn.distributed.agreement import SAME_DATA, same_arguments, same_tensors, smallest_budget
from featlearn.distributed.group import Expectation
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import InputTypeError, InputValueError
from featlearn.gradients.directions import Directions
from featlearn.kernel.jacobian_products import jvp_method
from featlearn.kernel.step_rates import step_rates
from featlearn.kernel.stream import SampleStream
from featlearn.kernel.sweep import Sweeps
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.krylov import EigenPairs, top_eigenpairs
from featlearn.linalg.nystrom import RandomProducts, norm, sketched_norm, survey_columns
from featlearn.linalg.sampling import averaged
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import Inputs
from featlearn.network.isolation import random_state_kept
from featlearn.planning.memory import byte_budget
from featlearn.planning.plan import Rate
from featlearn.quantities.columns import KernelColumns, squared_gradients
from featlearn.shapes import checked_finite
from featlearn.signatures import name_keywords

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Kernels of up to this many rows are formed to be measured: cheaper than an estimate.
SMALL = 2048
SAME_DRAW = "seed the generators of all ranks alike"
# With more outputs than this the columns of a sample take longer than products with random vectors.
MANY = 32


class NTKOperator:
    """The full tangent kernel K_{mu c, nu c'} of P samples and C outputs, acting on vectors (P, C); never formed.

    A product is a backward pass J^T v over all samples and then J u, by forward mode or double backward, whichever the
    network allows; each is tried against the other on a few samples first. Equal to `fl.ntk(outputs="full")`. Memory
    grows with the number of samples until a pass is full, as `memory` bounds it, and then no more, vectors aside. The
    operator is of the network as it stands when a method is called, and leaves it as it was.

    `op @ v` takes (P, C), (P * C,), and blocks (P, C, m) or (P * C, m), which share their forward passes; the entries
    of a flat vector are ordered as those of (P, C) are.

    Args:
        model, optimizer: As for `fl.ntk`.
        data: a batch as for `fl.ntk`, or a `DataLoader`, which is read anew for every product and never held. Of
            (inputs, targets) the inputs are taken. A loader that shuffles, or gives other samples at every sweep, is
            refused.
        **settings: As for `fl.ntk`. With a `group` every rank makes the same calls with the same data, runs its share
            of every chunk of samples, and gets the whole result.
    """

    @name_keywords()
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        optimizer: Optimizer | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._prepare(AuditedModel(model, **settings), data, optimizer)

    @classmethod
    def of(cls, audited: AuditedModel, data: Any, optimizer: Optimizer | None) -> "NTKOperator":
        """Return the operator of an audited model, which keeps the audit."""
        operator = cls.__new__(cls)
        operator._prepare(audited, data, optimizer)
        return operator

    def _prepare(self, audited: AuditedModel, data: Any, optimizer: Optimizer | None) -> None:
        model, request = audited.model, audited.request
        self._optimizer = optimizer
        self.ranks = request.group
        """Ranks that divide the samples."""
        with self.ranks.together() as block:
            devices = {p.device for p in unwrapped(model).parameters()}
            device = next(iter(devices)) if len(devices) == 1 else None
            with random_state_kept():  # a loader draws random numbers
                data = audited.paired(data) if isinstance(data, Tensor | tuple | Mapping) else data
                self._stream = SampleStream(data, device, request.dtype)
            block.expect(
                same_arguments(
                    {
                        "the number of samples": self._stream.samples,
                        "parameters": request.parameters,
                        "dtype": request.dtype,
                        "the optimizer": type(optimizer).__name__,
                    }
                ),
                same_tensors("data:", self._stream.fingerprints, SAME_DATA),
            )
            home = device or torch.device("cpu")
            budget = byte_budget(request.memory, home)
        if self.ranks.size > 1:
            budget = smallest_budget(self.ranks, budget, home, measured=request.memory is None)
            audited = AuditedModel(model, replace(request, memory=budget))
        self._audited = audited
        with self.sweeps() as sweeps:
            self.outputs = sweeps.measurement.classes
            """C, the number of outputs."""
            self.dtype, self.device = sweeps.measurement.dtype, sweeps.measurement.device
            with self.ranks.together():
                self._survey(sweeps)
                self._method = jvp_method(sweeps.measurement)

    @property
    def samples(self) -> int:
        """P, the number of samples."""
        return self._stream.samples

    @property
    def shape(self) -> tuple[int, int]:
        """(P C, P C), as of a matrix."""
        return (self.samples * self.outputs,) * 2

    @property
    def targets(self) -> Tensor | None:
        """What a loader gives beside the inputs."""
        return self._stream.targets

    def __repr__(self) -> str:
        size, _ = self.shape
        return f"NTKOperator({size} x {size}: {self.samples} samples, {self.outputs} outputs, {self.dtype})"

    def __matmul__(self, v: Tensor) -> Tensor:
        """K v, of the shape, on the device and at least in the precision of v."""
        rows = self._same_rows(v)
        with self.sweeps() as sweeps:
            product = sweeps.product(rows, self._method)
        return self._like(product, v)

    def quadratic(self, v: Tensor) -> Tensor:
        """v^T K v = |J^T v|^2, exact by one backward pass: a number, or (m,) for a block. float64."""
        rows = self._same_rows(v)
        with self.sweeps() as sweeps:
            step = sweeps.block(len(rows))
            found = torch.cat([sweeps.quadratic(block) for block in rows.split(step)])
        single = v.dim() == 1 or tuple(v.shape) == (self.samples, self.outputs)
        return (found[0] if single else found).to(v.device)

    @name_keywords()
    def trace(self, *, vectors: int | None = None, generator: torch.Generator | None = None) -> Estimate:
        """Trace of the kernel, |J|_F^2: exact (standard error 0) by C backward passes over the samples.

        Args:
            vectors: Number of random output directions to average over, for large C. The standard error falls as
                1 / sqrt(vectors) and is widened by Student's t: two of them held the truth in 92 to 95 of 100 draws
                for 2 to 16 vectors.
            generator: Source of the random directions. They are the same at every call without one.
        """
        with self.ranks.together() as block:
            directions = torch.eye(self.outputs, dtype=torch.float64, device="cpu")
            if vectors is not None:
                if not isinstance(vectors, int) or isinstance(vectors, bool) or vectors < 2:
                    raise InputValueError(f"vectors={vectors!r}, expected a number of random directions >= 2")
                directions = Directions(vectors, generator).signs(self.outputs)
            block.expect(same_tensors("the draw of", {"vectors": directions}, SAME_DRAW))
        with self.sweeps() as sweeps:
            total = squared_gradients(sweeps, directions, "trace").sum(0)
        if vectors is None:
            return Estimate(float(total.sum()), 0.0, 1)
        mean = averaged(total)
        return Estimate(mean.value, mean.stderr, mean.draws, mean.freedom)

    @name_keywords()
    def frobenius(self, *, vectors: int | None = None, generator: torch.Generator | None = None) -> Estimate:
        """|K|_F: exact (standard error 0) where P C is small, else from the columns of a few samples.

        The columns of `vectors` samples, 64 by default (32 where there are several outputs), are computed exactly. A
        third of them make a Nyström approximation, which holds nearly all of the norm, the others say what it lacks.
        Samples with large gradients are seen first and the others drawn by size, so a few samples that hold most of
        the norm do not hide (`featlearn.linalg.nystrom`). The sizes take one backward pass for each output, the columns
        two sweeps over the samples. All samples (`vectors` >= P) give the exact value. With more than 32 outputs, whose
        columns would take too long, products with `vectors` random vectors take the place of columns.

        Two standard errors hold the truth in about 95 of 100 draws: the error is widened by Student's t for its
        degrees of freedom, `.freedom`. Measured it was 92 to 99 of 100, for even sizes of samples, lognormal ones with
        sigma 1.2 and 2, and five outliers 30 times larger, with one output and with three. Where `.freedom` is below 4
        a `featlearn.errors.HeavyTailWarning` says that too few draws carry the error.
        """
        with self.ranks.together() as block:
            count = column_count(vectors, self.samples, self.outputs)
            drawing = source(generator)
            block.expect(same_arguments({"vectors": count}), same_draws(drawing))
        with self.sweeps() as sweeps:
            columns = KernelColumns(sweeps, "full")
            if count == self.samples:
                return Estimate(columns.squared_sum() ** 0.5, 0.0, 1)
            if self.outputs > MANY:
                return sketched_norm(self._random_sketch(sweeps, count, drawing))
            return norm(survey_columns(columns, count, drawing))

    def row_means(self, sweeps: Sweeps) -> Tensor:
        """(P,) K 1 / P for the mean over outputs: J_c (J_c^T 1) / P, a product for every output. float64."""
        total = torch.zeros(self.samples, dtype=torch.float64, device=self.device)
        every = torch.eye(self.outputs, dtype=self.dtype, device=self.device)
        for directions in every.split(sweeps.block(self.outputs)):
            constant = directions[:, None, :].expand(-1, self.samples, -1) / self.samples
            image = sweeps.product(constant, self._method)
            total += (image.double() * directions[:, None, :]).sum((0, 2))
        return total / self.outputs

    @name_keywords()
    def top(
        self, k: int = 1, *, tolerance: float | None = None, generator: torch.Generator | None = None
    ) -> EigenPairs:
        """The k largest eigenvalues: `.values` (k,), `.vectors` (P, C, k), `.residuals` (k,) = |K v - value v|.

        By block Krylov iteration, a few sweeps with blocks of k + 4 vectors. It ends when every residual is below
        `tolerance` times the largest eigenvalue, by default half of the digits of the kernel's precision, or after 24
        sweeps: read the residuals. float64 for sums, on the device of the outputs.
        """
        size, _ = self.shape
        with self.ranks.together() as block:
            if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= size:
                raise InputValueError(f"k={k!r}, expected a number of eigenvalues between 1 and P C = {size}")
            bound = torch.finfo(self.dtype).eps ** 0.5 if tolerance is None else float(tolerance)
            drawing = source(generator)
            block.expect(same_arguments({"k": k, "tolerance": bound}), same_draws(drawing))
        width = min(size, k + 4)
        start = torch.randn(size, width, generator=drawing, dtype=torch.float64, device=drawing.device).to(self.device)
        with self.sweeps() as sweeps:

            def product(v: Tensor) -> Tensor:
                image = sweeps.product(v.T.reshape(-1, self.samples, self.outputs), self._method)
                return image.flatten(1).T.double()

            found = top_eigenpairs(product, start, k, bound, 24 * width)
        return found._replace(vectors=found.vectors.reshape(self.samples, self.outputs, k))

    def to_scipy(self) -> "LinearOperator":
        """A `scipy.sparse.linalg.LinearOperator` on flat vectors, float64: for eigsh, cg, minres and others."""
        from scipy.sparse.linalg import LinearOperator

        def product(v: Any) -> Any:
            return (self @ torch.as_tensor(v, dtype=torch.float64)).numpy()

        return LinearOperator(
            self.shape,
            matvec=lambda v: product(v.reshape(-1)),
            rmatvec=lambda v: product(v.reshape(-1)),
            matmat=product,
            dtype="float64",
        )

    @contextmanager
    def sweeps(self) -> Iterator[Sweeps]:
        """The network isolated and ready; several products can share it."""
        # Before the measurement, which puts .grad aside.
        rates: dict[str, Rate] = {}
        if self._optimizer is not None:
            with self.ranks.together():
                model, request = self._audited.model, self._audited.request
                rates = step_rates(self._optimizer, trainable_parameters(model, request.parameters))
            rates = whole_tensors(rates)
        same = same_tensors("the optimizer's rate of", rates, "load one state into all optimizers")
        first = self._stream.first
        with self._audited.measuring(
            # Products put other tensors in the places of parameters, which torch 2.11 does not undo for shared modules.
            [first],
            common=first,
            by_layer=True,
            expected=[same],
        ) as measurement:
            yield Sweeps(measurement, self._stream, rates, self._audited)

    def _random_sketch(self, sweeps: Sweeps, count: int, drawing: torch.Generator) -> RandomProducts:
        signs = torch.randint(2, (count, *self.shape[:1]), generator=drawing, device=drawing.device)
        omega = (2.0 * signs.double() - 1.0).to(self.device)
        image = sweeps.product(omega.reshape(-1, self.samples, self.outputs), self._method).flatten(1).double()
        projected = omega @ image.T
        return RandomProducts((projected + projected.T) / 2, image @ image.T)

    def _survey(self, sweeps: Sweeps) -> None:
        """Every sample once: outputs are finite, as many everywhere, carry a gradient, and do not hang together."""
        for batch, _ in sweeps.batches(sweeps.chunk(3.0)):
            sweeps.measurement.chunk(batch, 0, batch.samples)
        sweeps.measurement.refuse_no_gradient()

    def _same_rows(self, v: Any) -> Tensor:
        """The vectors that all ranks have given, as (m, P, C)."""
        with self.ranks.together() as block:
            rows = self._rows(v)
            block.expect(same_tensors("the vector", {"v": rows}, "give all ranks what one of them has"))
        return rows

    def _rows(self, v: Any) -> Tensor:
        """A vector or a block as (m, P, C), on the device and in the precision of the kernel."""
        vectors = checked_finite(v, "v").to(self.device, self.dtype)
        pair, size = (self.samples, self.outputs), self.samples * self.outputs
        if tuple(vectors.shape) in (pair, (size,)):
            return vectors.reshape(1, *pair)
        if vectors.shape[:2] == pair and vectors.dim() == 3:
            return vectors.permute(2, 0, 1)
        if vectors.dim() == 2 and len(vectors) == size:
            return vectors.T.reshape(-1, *pair)
        raise InputValueError(
            f"v has shape {tuple(vectors.shape)}, expected (P, C) = {pair}, (P C,) = ({size},), or a block "
            f"(P, C, m) = ({pair[0]}, {pair[1]}, m)"
        )

    def _like(self, rows: Tensor, v: Tensor) -> Tensor:
        if v.dim() == 1 or tuple(v.shape) == (self.samples, self.outputs):
            shaped = rows[0].reshape(v.shape)
        elif v.dim() == 3:
            shaped = rows.permute(1, 2, 0)
        else:
            shaped = rows.flatten(1).T
        kind = torch.promote_types(v.dtype, rows.dtype) if v.is_floating_point() else rows.dtype
        return shaped.to(v.device, kind)


def operator_of(audited: AuditedModel, *, x: Inputs | None = None, optimizer: Optimizer | None = None) -> NTKOperator:
    """Return the tangent kernel as an operator that is never formed: see `fl.NTKOperator`."""
    return NTKOperator.of(audited, audited.inputs(x), optimizer)


def column_count(vectors: Any, samples: int, outputs: int) -> int:
    """How many samples give columns: as many as asked for, or all where the kernel is small."""
    if vectors is None:
        wanted = samples if samples * outputs <= SMALL else 64 if outputs == 1 else 32
    elif isinstance(vectors, int) and not isinstance(vectors, bool) and vectors >= 4:
        wanted = vectors
    else:
        raise InputValueError(f"vectors={vectors!r}, expected a number of samples >= 4, for an error to be seen")
    return min(wanted, samples)


def same_draws(generator: torch.Generator) -> Expectation:
    """The state of a generator, which all ranks draw from."""
    return same_tensors("the state of", {"generator": generator.get_state()}, SAME_DRAW)


def source(generator: torch.Generator | None) -> torch.Generator:
    """The generator that was given; without one, a new one that is the same at every call."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputTypeError(f"generator is {generator!r}, expected a torch.Generator")
    return torch.Generator("cpu").manual_seed(0) if generator is None else generator
