"""Data to measure on: real sets read from their files, and synthetic tasks."""

from featlearn.data.alignment_reversing import alignment_reversing
from featlearn.data.celeba import celeba
from featlearn.data.chain_monomial import ChainMonomial, chain_monomial
from featlearn.data.cifar import cifar10, cifar100
from featlearn.data.digits import digits
from featlearn.data.gaussian_mixture import gaussian_mixture
from featlearn.data.gtsrb import gtsrb
from featlearn.data.labelled import Labelled
from featlearn.data.line import line
from featlearn.data.linear_teacher import LinearTeacher, linear_teacher
from featlearn.data.mnist import mnist
from featlearn.data.power_law_gaussian import GaussianInputs, power_law_gaussian, power_law_spectrum
from featlearn.data.quadratic_form import QuadraticForm, quadratic_form
from featlearn.data.random_labels import random_labels
from featlearn.data.regression import Regression
from featlearn.data.selection import ImageOptions
from featlearn.data.shakespeare import Text, shakespeare
from featlearn.data.standardization import standardize
from featlearn.data.stl10 import stl10
from featlearn.data.svhn import svhn
from featlearn.data.two_gaussians import two_gaussians

__all__ = [
    "ChainMonomial",
    "GaussianInputs",
    "ImageOptions",
    "Labelled",
    "LinearTeacher",
    "QuadraticForm",
    "Regression",
    "Text",
    "alignment_reversing",
    "celeba",
    "chain_monomial",
    "cifar10",
    "cifar100",
    "digits",
    "gaussian_mixture",
    "gtsrb",
    "line",
    "linear_teacher",
    "mnist",
    "power_law_gaussian",
    "power_law_spectrum",
    "quadratic_form",
    "random_labels",
    "shakespeare",
    "standardize",
    "stl10",
    "svhn",
    "two_gaussians",
]
