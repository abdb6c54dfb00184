"""Data to measure on: real sets read from their files, and synthetic tasks."""

from featlearn.data.alignment_reversing import alignment_reversing
from featlearn.data.chain_monomial import ChainMonomial, chain_monomial
from featlearn.data.digits import digits
from featlearn.data.labelled import Labelled
from featlearn.data.power_law_gaussian import GaussianInputs, power_law_gaussian, power_law_spectrum
from featlearn.data.regression import Regression

__all__ = [
    "ChainMonomial",
    "GaussianInputs",
    "Labelled",
    "Regression",
    "alignment_reversing",
    "chain_monomial",
    "digits",
    "power_law_gaussian",
    "power_law_spectrum",
]
