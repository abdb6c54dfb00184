"""Optimal feature evolution (OFE): a kernel moves to lower the loss after the next step.

See Shan & Bordelon 2021a, Sec. 4; 2021b, Sec. 4.1.

Not a theory of networks but of what features should do: the simplest model in which a kernel aligns with its task, and
the meaning of the feature rate gamma that `fl.metrics.feature_rate` reads off a network. With df/dt = -rate K (f - y)
and loss |f - y|^2:

- `solve`: the exact solution, one output or several, any start, singular kernels; `integrate`: the same, numerically;
- `final_kernel`, `final_alignment`, `final_loss`, `late_amplification`: where it ends;
- `spike`, `top_overlap`, `threshold`, `rate_for_overlap`: the task in the spectrum of the final kernel;
  `bulk_threshold`, `bulk_spike`: the same for large random kernels;
- `step`, `ode_rate`: the papers' discrete steps, in each of their conventions;
- `power_law_loss`, `power_law_exponents`; `scalar`, `isotropic_half_time`: what becomes a formula;
- `diagonal_approximation`: what the papers give in place of the exact solution.

    predicted = ofe.solve(K0, y, gamma=0.5, times=torch.linspace(0, 100, 200), rate=rate)
    predicted.loss, predicted.alignment, predicted.kernel(50.0)
    predicted.overlay({"loss": (steps, losses), "ntk/alignment": (steps, alignments)})
"""

from featlearn.theory.ofe.approximation import DiagonalApproximation, diagonal_approximation
from featlearn.theory.ofe.discrete import Convention, DiscreteStep, ode_rate, step
from featlearn.theory.ofe.integration import IntegratedPath, integrate
from featlearn.theory.ofe.limits import final_alignment, final_kernel, final_loss, late_amplification
from featlearn.theory.ofe.logistic import Scalar, isotropic_half_time, scalar
from featlearn.theory.ofe.power_law import PowerLawExponents, power_law_exponents, power_law_loss
from featlearn.theory.ofe.run_path import from_run
from featlearn.theory.ofe.solution import Solution, solve
from featlearn.theory.ofe.spikes import (
    BulkSpike,
    Spike,
    bulk_spike,
    bulk_threshold,
    rate_for_overlap,
    spike,
    threshold,
    top_overlap,
)

__all__ = [
    "BulkSpike",
    "Convention",
    "DiagonalApproximation",
    "DiscreteStep",
    "IntegratedPath",
    "PowerLawExponents",
    "Scalar",
    "Solution",
    "Spike",
    "bulk_spike",
    "bulk_threshold",
    "diagonal_approximation",
    "final_alignment",
    "final_kernel",
    "final_loss",
    "from_run",
    "integrate",
    "isotropic_half_time",
    "late_amplification",
    "ode_rate",
    "power_law_exponents",
    "power_law_loss",
    "rate_for_overlap",
    "scalar",
    "solve",
    "spike",
    "step",
    "threshold",
    "top_overlap",
]
