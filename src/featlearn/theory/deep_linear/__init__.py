"""Linear networks: how small weights align, which modes they learn when, and the kernels they end with.

See Atanasov et al. 2022; Shan & Bordelon 2021a, 2021b.

`weight_layers` L counts weight matrices (Atanasov et al. 2022); X is (P, D), one row per sample; s beta is the teacher,
|beta| = 1; c is the strength of what is learned. Formulas in single strengths (`strength`, `two_layer`, ...) have the
time of Atanasov et al. 2022: loss 1/(2P) sum (f - y)^2, rate 1, X^T X / P a projector. Functions of X and y use
df/dt = -rate K (f - y) and take a `rate`.

- `solve`, `silent_alignment`, `flow`: whole runs, to plot over measured ones (`.overlay(...)`): balanced networks of
  any depth on whitened inputs; two layers from their own small weights; any weights and data, by integration;
- `strength`, `remaining`, `time_to`, `half_time`, `half_time_scaling`, `early_strength`: one mode, any depth;
- `mode_times`, `separation`: many modes, and whether all align before any is learned;
- `two_layer`, `early_path`, `initial_statistics`, `early_kernel`, `two_layer_kernel`: two layers, phase I and both;
- `unwhitened_system`, `unwhitened_variables`, `unwhitened_path`, `unwhitened_spike`: phase I on other inputs;
- `balanced_ntk`, `final_ntk`, `final_nngp`, `balanced_subkernels`, `feature_rate`, `max_alignment`,
  `whitened_max_alignment`: the kernels at the end;
- `subkernels`, `subkernel_terms`: kernels of any linear network from its weights;
- `two_layer_final_kernel`, `initial_kernel_scale`: Shan & Bordelon 2021a, Eq. 12 to 14;
- `conserved_matrices`, `refined_balance`, `width_corrections`, `exact_balance`, `wide_difference`: balancing;
- `minimum_norm`, `spiked_interpolator`, `rkhs_norm`: the function that is learned (Atanasov et al. 2022, App. G).

    half_time(1.0, 0.1**3, 3)                                   # three layers, weights of size 0.1
    silent_alignment(X, y, W0, a0, times=times, rate=1 / len(X)).overlay(measured)
    max_alignment(X, y, weight_layers=2)                        # the dashed line
"""

from featlearn.theory.deep_linear.conserved_balance import (
    RefinedBalance,
    conserved_matrices,
    exact_balance,
    refined_balance,
    wide_difference,
    width_corrections,
)
from featlearn.theory.deep_linear.early_kernel import early_kernel, two_layer_kernel
from featlearn.theory.deep_linear.final_kernels import (
    balanced_ntk,
    balanced_subkernels,
    feature_rate,
    final_nngp,
    final_ntk,
)
from featlearn.theory.deep_linear.gradient_flow import flow
from featlearn.theory.deep_linear.max_alignment import max_alignment, whitened_max_alignment
from featlearn.theory.deep_linear.minimum_norm import minimum_norm, rkhs_norm, spiked_interpolator
from featlearn.theory.deep_linear.modes import Separation, mode_times, separation
from featlearn.theory.deep_linear.network_path import from_network
from featlearn.theory.deep_linear.path import LinearPath
from featlearn.theory.deep_linear.solve import silent_alignment, solve
from featlearn.theory.deep_linear.strength import (
    early_strength,
    half_time,
    half_time_scaling,
    remaining,
    strength,
    time_to,
)
from featlearn.theory.deep_linear.subkernels import LayerTerm, subkernel_terms, subkernels
from featlearn.theory.deep_linear.two_layer import (
    InitialStatistics,
    TwoLayer,
    early_path,
    initial_statistics,
    two_layer,
)
from featlearn.theory.deep_linear.two_layer_final import (
    TwoLayerFinalKernel,
    initial_kernel_scale,
    two_layer_final_kernel,
)
from featlearn.theory.deep_linear.unwhitened import (
    UnwhitenedSystem,
    unwhitened_path,
    unwhitened_spike,
    unwhitened_system,
    unwhitened_variables,
)

__all__ = [
    "InitialStatistics",
    "LayerTerm",
    "LinearPath",
    "RefinedBalance",
    "Separation",
    "TwoLayer",
    "TwoLayerFinalKernel",
    "UnwhitenedSystem",
    "balanced_ntk",
    "balanced_subkernels",
    "conserved_matrices",
    "early_kernel",
    "early_path",
    "early_strength",
    "exact_balance",
    "feature_rate",
    "final_nngp",
    "final_ntk",
    "flow",
    "from_network",
    "half_time",
    "half_time_scaling",
    "initial_kernel_scale",
    "initial_statistics",
    "max_alignment",
    "minimum_norm",
    "mode_times",
    "refined_balance",
    "remaining",
    "rkhs_norm",
    "separation",
    "silent_alignment",
    "solve",
    "spiked_interpolator",
    "strength",
    "subkernel_terms",
    "subkernels",
    "time_to",
    "two_layer",
    "two_layer_final_kernel",
    "two_layer_kernel",
    "unwhitened_path",
    "unwhitened_spike",
    "unwhitened_system",
    "unwhitened_variables",
    "whitened_max_alignment",
    "wide_difference",
    "width_corrections",
]
