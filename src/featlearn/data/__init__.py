"""Data sets: digits, MNIST, CIFAR-10, and synthetic tasks with known solutions."""

from featlearn.data.alignment_reversing import alignment_reversing
from featlearn.data.chain_monomial import ChainMonomial, chain_monomial
from featlearn.data.cifar import cifar10
from featlearn.data.digits import digits
from featlearn.data.gaussian_mixture import gaussian_mixture
from featlearn.data.labeled import Labeled
from featlearn.data.line import line
from featlearn.data.linear_teacher import LinearTeacher, linear_teacher
from featlearn.data.mnist import mnist
from featlearn.data.power_law_gaussian import GaussianInputs, power_law_gaussian, power_law_spectrum
from featlearn.data.quadratic_form import QuadraticForm, quadratic_form
from featlearn.data.random_labels import random_labels
from featlearn.data.regression_task import Regression
from featlearn.data.selection import ImageOptions
from featlearn.data.standardization import standardize
from featlearn.data.two_gaussians import two_gaussians

__all__ = [
    "ChainMonomial",
    "GaussianInputs",
    "ImageOptions",
    "Labeled",
    "LinearTeacher",
    "QuadraticForm",
    "Regression",
    "alignment_reversing",
    "chain_monomial",
    "cifar10",
    "digits",
    "gaussian_mixture",
    "line",
    "linear_teacher",
    "mnist",
    "power_law_gaussian",
    "power_law_spectrum",
    "quadratic_form",
    "random_labels",
    "standardize",
    "two_gaussians",
]
