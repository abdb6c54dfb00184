"""Hyperparameters of a two-layer network as powers of a scaling parameter kappa (Xu & Ziyin 2024, Sec. 4)."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from featlearn.theory.arguments import checked_count, checked_number


def checked_exponent(value: Any, name: str) -> float:
    """Return a finite real number, given as one or as a tensor of one element."""
    return checked_number(value, name, hint="it is a power of kappa") + 0.0  # no negative zero


class Hyperparameters(NamedTuple):
    """The network of one kappa."""

    d: int
    """width"""
    scale: float
    """multiplier of the output, the gamma of the paper"""
    variance_u: float
    variance_w: float
    rate_u: float
    rate_w: float


@dataclass(frozen=True)
class Exponents:
    """Powers of kappa in f(x) = scale u . W x, for width, scale, variances of u_i and w_ij and both learning rates.

    d ~ kappa^d, scale ~ kappa^gamma, variances ~ kappa^u and kappa^w (of the squares, not the standard deviations),
    learning rates ~ kappa^rate_u and kappa^rate_w. u is the readout, w the input layer, whose fan-in is constant.
    """

    d: float
    gamma: float
    u: float
    w: float
    rate_u: float = 0.0
    rate_w: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checked_exponent(getattr(self, field.name), field.name))

    @property
    def feature_term(self) -> float:
        """A = 2 gamma + rate_u + rate_w: power of the part of t_c^-2 that the target brings (Eq. 15)."""
        return 2 * self.gamma + self.rate_u + self.rate_w

    @property
    def kernel_term(self) -> float:
        """B = 2 gamma + d + max(rate_w + u, rate_u + w): power of the initial NTK (Eq. 15)."""
        return 2 * self.gamma + self.d + max(self.rate_w + self.u, self.rate_u + self.w)

    @property
    def time_scale(self) -> float:
        """Power of t_c: t_c^-2 has a part kappa^A and a part kappa^(2 B) (Eq. 7)."""
        return -max(self.feature_term, 2 * self.kernel_term) / 2

    @property
    def initial_output(self) -> float:
        """Power of |f| at the start, for independent u and W. Positive for Xavier in its kernel phase, 1/2."""
        return self.gamma + (self.d + self.u + self.w) / 2

    @property
    def rate(self) -> float:
        """Mean of the two rate exponents."""
        return (self.rate_u + self.rate_w) / 2

    def at_rate(self, rate: float, *, gamma: float | None = None) -> "Exponents":
        """Return the same with another mean rate, and another gamma if given; the difference of the rates is kept."""
        shift = checked_exponent(rate, "rate") - self.rate
        return replace(
            self, gamma=self.gamma if gamma is None else gamma, rate_u=self.rate_u + shift, rate_w=self.rate_w + shift
        )

    def at(self, kappa: float, *, width: int = 1, rate: float = 1.0, scale: float = 1.0) -> Hyperparameters:
        """Return the hyperparameters for one kappa >= 1; `width`, `rate` and `scale` are those of kappa = 1."""
        kappa = checked_number(kappa, "kappa", least=1.0, hint="limits are those of large kappa")
        width, rate = checked_count(width, "width"), checked_number(rate, "rate")
        scale = checked_number(scale, "scale")
        return Hyperparameters(
            d=max(1, round(width * kappa**self.d)),
            scale=scale * kappa**self.gamma,
            variance_u=kappa**self.u,
            variance_w=kappa**self.w,
            rate_u=rate * kappa**self.rate_u,
            rate_w=rate * kappa**self.rate_w,
        )
