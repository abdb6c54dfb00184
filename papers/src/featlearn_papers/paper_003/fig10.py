"""Beaglehole et al. 2024, Fig. 10: correlations and losses from several scales, data with the eigenvalues 1/(1+k^2)."""

from featlearn_papers.paper_003.correlation_paths import reproduction

FIG_10 = reproduction("003/fig10", 2, "Gaussian inputs whose covariance has the eigenvalues 1/(1+k^2).")
