"""Expected traces of words with a random matrix in them, exact at every size.

See Beaglehole et al. 2024, App. E; here without the assumption of freeness.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import checked_count
from featlearn.theory.early.symmetric import checked_data_matrices, checked_symmetric

LONGEST = 6
"""Words of seven factors have over 300,000 pairings."""

Cycle = tuple[int, ...]
T = TypeVar("T", int, str)


@dataclass(frozen=True)
class WordTraces:
    """The three traces of the early correlation of f = a^T (W x)^2, with R = W^T diag(a^2) W.

    See Beaglehole et al. 2024, Eq. 9, 15, 19, 21.

    In the convention without the factor 2 of phi' = 2 z: with it they are 64, 16 and 256 times as large, which leaves
    the correlation as it is.
    """

    numerator: float
    """tr(A R A R B R)"""
    den1: float
    """tr(A R A R)"""
    den2: float
    """tr(A R B R A R B R)"""

    @property
    def correlation(self) -> float:
        """numerator / sqrt(den1 den2): Eq. 6 with the expectation taken before the ratio; nan where one vanishes."""
        if not (self.den1 > 0 and self.den2 > 0):
            return math.nan
        return self.numerator / (math.sqrt(self.den1) * math.sqrt(self.den2))


def exact_word_traces(A: Tensor, B: Tensor, width: int) -> WordTraces:
    """E Tr of A R A R B R, A R A R and A R B R A R B R over networks of finite width: **unnormalized** traces.

    R = W^T diag(a^2) W (d, d) with a_s ~ N(0, 1) and W_si ~ N(0, 1/k), k = `width`: the network f = a^T (W x)^2 of
    Beaglehole et al. 2024, App. E. `A` = (X^T L X)^2 and `B` = X^T X, (d, d), come from `data_matrices`. Exact at any
    width and dimension, also for spiked data, where the free-probability limit is off by several percent: see
    `exact_trace`. For example E Tr(A R A R) = (1 + 5/k) Tr A^2 + (3/k) (Tr A)^2. The correlation still takes the
    expectation before the ratio (Assumption 7), and a single narrow network scatters around it.
    """
    first, second = checked_data_matrices(A, B)
    traces = _Traces({"A": first, "B": second})
    k = checked_count(width, "width")
    return WordTraces(*(_expected(word, traces, k) for word in ("AAB", "AA", "ABAB")))


def exact_trace(factors: Sequence[Tensor], width: int) -> float:
    """E Tr(C_1 R C_2 R ... C_m R) for symmetric (d, d) matrices C_1 ... C_m and R = W^T diag(a^2) W, m <= 6.

    a_s ~ N(0, 1) and W_si ~ N(0, 1/k), k = `width`; the trace is the sum of the diagonal. R is a sum of k independent
    terms a_s^2 w_s w_s^T: the expectation sums over the ways in which the m factors R share terms (set partitions),
    with E[a^2j] = (2j - 1)!! for each part, and over the Gaussian pairings of the w's within every part (Wick), which
    close the C's into cycles. Beaglehole et al. 2024, App. E, assume freeness instead.
    """
    if not 1 <= len(factors) <= LONGEST:
        raise InputValueError(f"{len(factors)} factors, expected 1 to {LONGEST}: the sum grows as (2m - 1)!!")
    matrices = [checked_symmetric(factor, f"factors[{i}]") for i, factor in enumerate(factors)]
    shapes = {tuple(matrix.shape) for matrix in matrices}
    if len(shapes) > 1:
        raise InputValueError(f"factors have shapes {sorted(shapes)}, expected one size (d, d)")
    letters = [chr(ord("A") + i) for i in range(len(matrices))]
    k = checked_count(width, "width")
    return _expected("".join(letters), _Traces(dict(zip(letters, matrices, strict=True))), k)


@cache
def cycle_weights(length: int) -> dict[tuple[int, tuple[Cycle, ...]], int]:
    """E Tr(C_0 R C_1 R ... R) with `length` factors as a table {(parts, cycles of C's): weight}.

    The expectation is the sum of weight * k (k - 1) ... (k - parts + 1) / k^length * product of Tr(C C ...) per cycle.
    """
    weights: Counter[tuple[int, tuple[Cycle, ...]]] = Counter()
    for partition in _set_partitions(list(range(length))):
        readout = math.prod(odd_factorial(len(part)) for part in partition)  # E[a^2j] of every part
        # factor R_i has the ends 2i (left) and 2i + 1 (right), both of them the vector w of its part
        ends = [[end for i in part for end in (2 * i, 2 * i + 1)] for part in partition]
        for pairings in itertools.product(*(list(_pairings(part)) for part in ends)):
            partner = {a: b for pairs in pairings for pair in pairs for a, b in (pair, pair[::-1])}
            weights[len(partition), _cycles(partner, length)] += readout
    return dict(weights)


def odd_factorial(order: int) -> int:
    """(2j - 1)!! = E[a^2j] of a standard normal a."""
    return math.prod(range(1, 2 * order, 2))


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in _set_partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def _pairings(ends: list[int]) -> Iterator[list[tuple[int, int]]]:
    if not ends:
        yield []
        return
    first, rest = ends[0], ends[1:]
    for i, other in enumerate(rest):
        for pairs in _pairings(rest[:i] + rest[i + 1 :]):
            yield [(first, other), *pairs]


def _cycles(partner: dict[int, int], length: int) -> tuple[Cycle, ...]:
    """Return the cycles into which a pairing of ends closes the factors C_0 ... C_(m-1).

    C_i stands between the right end of R_(i-1) and the left end of R_i. A walk that leaves it at its right side, end
    2i, goes on at the partner of that end: through C_j backwards if that is its right side, 2j, forwards otherwise.
    """
    left, cycles = set(range(length)), []
    while left:
        start = min(left)
        end, cycle = 2 * start, [start]
        while (end := partner[end]) != (2 * start - 1) % (2 * length):
            backwards = end % 2 == 0
            factor = end // 2 if backwards else (end + 1) // 2 % length
            end = (2 * factor - 1) % (2 * length) if backwards else 2 * factor
            cycle.append(factor)
        left -= set(cycle)
        cycles.append(_canonical(cycle))
    return tuple(sorted(cycles))


def _canonical(cycle: Sequence[T]) -> tuple[T, ...]:
    """The smallest of all rotations of a cycle and of its mirror image: with symmetric factors all have one trace."""
    mirrored = cycle[::-1]
    turns = [tuple(way[i:]) + tuple(way[:i]) for way in (cycle, mirrored) for i in range(len(cycle))]
    return min(turns)


def _expected(word: str, traces: "_Traces", width: int) -> float:
    scale = width ** len(word)
    # perm: k (k - 1) ..., the ways to give every part a hidden unit of its own
    return math.fsum(
        weight * math.perm(width, parts) / scale * math.prod(traces("".join(word[i] for i in c)) for c in cycles)
        for (parts, cycles), weight in cycle_weights(len(word)).items()
    )


class _Traces:
    """Traces of products of named symmetric matrices, each computed once."""

    def __init__(self, matrices: dict[str, Tensor]) -> None:
        self._products = dict(matrices)
        self._traces: dict[str, float] = {}

    def __call__(self, letters: str) -> float:
        word = "".join(_canonical(letters))
        if word not in self._traces:
            half = len(word) // 2
            right = self._product(word[half:])
            trace = (self._product(word[:half]).T * right).sum() if half else right.trace()
            self._traces[word] = float(trace)
        return self._traces[word]

    def _product(self, word: str) -> Tensor:
        if word not in self._products:
            self._products[word] = self._product(word[:-1]) @ self._product(word[-1])
        return self._products[word]
