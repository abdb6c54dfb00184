"""Beaglehole et al. 2024, Fig. 9: correlations and losses from several scales, data with the eigenvalues 1/(1+k)."""

from featlearn_papers.paper_003.correlation_paths import reproduction

FIG_9 = reproduction("003/fig9", 1, "Gaussian inputs whose covariance has the eigenvalues 1/(1+k).")
