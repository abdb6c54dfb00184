"""Choose rate and scale for a phase: Corollaries 1 to 3 of Xu & Ziyin 2024, also for unequal rates.

With rates of mean c and difference delta = rate_u - rate_w the terms are A = 2 (gamma + c) and
B = 2 gamma + c + s, s = d + max(u - delta / 2, w + delta / 2). For equal rates s = d + max(u, w), as printed.
"""

from featlearn.errors import InputValueError
from featlearn.theory.phases.classification import EQUAL
from featlearn.theory.phases.exponents import Exponents, checked_exponent


def _size(exponents: Exponents) -> float:
    half = (exponents.rate_u - exponents.rate_w) / 2
    return exponents.d + max(exponents.u - half, exponents.w + half)


def stable_rate(exponents: Exponents) -> float:
    """The rate exponent with which training is neither frozen nor unstable (Cor. 1): min(-gamma, -2 gamma - s).

    See Xu & Ziyin 2024. The rates of `exponents` enter by their difference alone; the result is their mean, so
    ``exponents.at_rate(stable_rate(exponents))`` is the stable limit. s = d + max(u, w) for equal rates.
    """
    return min(-exponents.gamma, -2 * exponents.gamma - _size(exponents))


def learning_scaling(exponents: Exponents, rate: float | None = None) -> Exponents:
    """Return the same start in the feature learning phase (Xu & Ziyin 2024, Cor. 2): gamma = -rate with rate >= s.

    `rate` is the exponent of the learning rates, by default the smallest allowed, s = d + max(u, w) for equal rates:
    there both parts of the speed stay. Replaces gamma and the rates, whose difference is kept.
    """
    size = _size(exponents)
    power = size if rate is None else checked_exponent(rate, "rate")
    if power < size - EQUAL:
        raise InputValueError(f"rate={power}, expected at least {size} for feature learning; below it, kernel_scaling")
    return exponents.at_rate(power, gamma=-power)


def kernel_scaling(exponents: Exponents, rate: float | None = None) -> Exponents:
    """Return the same start in the kernel phase (Xu & Ziyin 2024, Cor. 3): gamma = -(s + rate) / 2 with rate < s.

    `rate` is the exponent of the learning rates, by default s - 1, s = d + max(u, w) for equal rates. Replaces gamma
    and the rates, whose difference is kept. A kernel phase only if P / Q -> 1: see `start_is_balanced`.
    """
    size = _size(exponents)
    power = size - 1 if rate is None else checked_exponent(rate, "rate")
    if power > size - EQUAL:
        raise InputValueError(f"rate={power}, expected less than {size} for the kernel phase; else learning_scaling")
    return exponents.at_rate(power, gamma=-(size + power) / 2)
