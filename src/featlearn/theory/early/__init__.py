"""What drives the centered neural feature correlation in the first moments of training.

See Beaglehole et al. 2024, Sec. 3.1, 4, App. D, E.

A layer h = W x of a network f is trained by gradient flow. Its change Wb = W - W0 starts as t Wdot, so the centered NFM
Wb^T Wb and the centered AGOP Wb^T K Wb start as t^2 times

    X^T L calK L X      and      X^T L calK^2 L X,

with X (n, d) the inputs of the layer, L = diag(dL/df) and calK (n, n) the pre-activation tangent kernel (PTK)
J J^T, J (n, k) the rows df/dh, **without 1/n**. Their correlation (Eq. 6) is where the C-NFC starts:

- `derivative_correlation`, `derivative_matrices`, `loss_derivative`: Prop. 3 and Eq. 6, for any network and loss;
- `mean_and_covariance_terms`: Eq. 7, what of it comes from the mean of the PTK over networks and what from its spread;
- `quadratic_means`: corrected Prop. 8, for f = a^T (W x)^2;
- `data_matrices`, `quadratic_moments`, `sampled_quadratic_moments`, `free_probability`: corrected App. E, the limit of
  large width and dimension;
- `exact_word_traces`, `exact_trace`: the same at every finite size, without freeness;
- `expected_ptk`, `drawn_ptk`: App. D, the PTK of the first layer for one and two hidden layers;
- `annealed_corruption`: what is left of the correlation when the PTK covariance gets random eigenvectors (Sec. 2.2).

    y = x[:, 0] * x[:, 1]
    early.derivative_correlation(x, y, early.drawn_ptk(x, 64, "relu", 2, (1 / d, 1 / 64, 1 / 64)))      # one network
    early.derivative_correlation(x, y, early.expected_ptk(x, 64, "relu", 2, (1 / d, 1 / 64, 1 / 64)))   # first order
    early.free_probability(*early.data_matrices(x, y), early.quadratic_moments(64, d, 4)).correlation
"""

from featlearn.theory.early.corruption import annealed_corruption
from featlearn.theory.early.decomposition import Decomposition, MeanAndCovarianceTerms, mean_and_covariance_terms
from featlearn.theory.early.derivative import (
    DerivativeMatrices,
    derivative_correlation,
    derivative_matrices,
    loss_derivative,
)
from featlearn.theory.early.expected_ptk import drawn_ptk, expected_ptk
from featlearn.theory.early.free_probability import free_probability
from featlearn.theory.early.moments import quadratic_moments, sampled_quadratic_moments
from featlearn.theory.early.network_path import from_network
from featlearn.theory.early.quadratic import QuadraticMeans, data_matrices, quadratic_means
from featlearn.theory.early.words import WordTraces, exact_trace, exact_word_traces

__all__ = [
    "Decomposition",
    "DerivativeMatrices",
    "MeanAndCovarianceTerms",
    "QuadraticMeans",
    "WordTraces",
    "annealed_corruption",
    "data_matrices",
    "derivative_correlation",
    "derivative_matrices",
    "drawn_ptk",
    "exact_trace",
    "exact_word_traces",
    "expected_ptk",
    "free_probability",
    "from_network",
    "loss_derivative",
    "mean_and_covariance_terms",
    "quadratic_means",
    "quadratic_moments",
    "sampled_quadratic_moments",
]
