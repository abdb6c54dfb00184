"""Names that the watch itself writes; user numbers under these names are refused."""

import re
from collections.abc import Collection, Iterable

from featlearn.errors import InputValueError

ALWAYS = {"probe"}
"""Quantities of every measurement."""

_NAMES = {
    "probe": r"probe/(loss|accuracy|(binary_)?cross_entropy)",
    "gap": r"gap/((probe|test|unshrunk)(_error)?|change)",
    "richness": r"richness/low_rank",
    "convergence": r"convergence/.+",
    "kernel": r"ntk/(norm|trace|effective_rank|(centered_)?(distance|alignment)|velocity|specialization"
    r"|layers/.+/(share|alignment))",
    "features": r"features/.+/(uncentered|(double_|ptk_)?centered|centered_share|weight_change)",
    "layers": r"layers/.+--.+/(alignment|random|balance_drift)",
    "weights": r"weights/(.+/)?(norm|distance)",
    "test": r"test/(loss|accuracy|(binary_)?cross_entropy)|ntk/test/(centered_)?alignment",
    "optimizer": r"ntk/optimizer/(norm|alignment)",
    "rate": r"lr",
    "loss": r"loss",
    "axes": r"step|seconds",
}
_PATTERNS = {quantity: re.compile(pattern) for quantity, pattern in _NAMES.items()}


def is_measured(name: str) -> bool:
    """Whether a name belongs to a measured number."""
    return any(_PATTERNS[quantity].fullmatch(name) for quantity in _PATTERNS.keys() - {"rate", "loss", "axes"})


def refuse_reserved(names: Iterable[str], quantities: Collection[str]) -> None:
    """Refuse names that one of these quantities records.

    Names of quantities that are switched off are allowed: without `test=`, `test/accuracy` is free.
    """
    for name in names:
        for quantity in quantities:
            if quantity in _PATTERNS and _PATTERNS[quantity].fullmatch(name):
                raise InputValueError(
                    f"{name!r} is given as a number of your own, but the run itself records that name "
                    f"({_WHAT.get(quantity, f'the quantity {quantity!r}')}); choose another, 'own/{name}' for example"
                )


def refuse_own(names: Iterable[str], quantity: str, own: Collection[str]) -> None:
    """Refuse names that a user's own quantity already records."""
    for name in names:
        if name in own:
            raise InputValueError(
                f"{name!r} is given as a number of a step, but your own quantity {quantity!r} records that name; "
                f"choose another, 'own/{name}' for example"
            )


_WHAT = {
    "probe": "how well the probe is fitted",
    "rate": "the learning rate of optimizer=",
    "loss": "the loss of the steps",
    "axes": "every line has one",
}
