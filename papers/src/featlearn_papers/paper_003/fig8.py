"""Beaglehole et al. 2024, Fig. 8: correlations and losses from several scales, data with the eigenvalues 1."""

from featlearn_papers.paper_003.correlation_paths import reproduction

FIG_8 = reproduction("003/fig8", 0, "Gaussian inputs whose covariance has the eigenvalues 1.")
