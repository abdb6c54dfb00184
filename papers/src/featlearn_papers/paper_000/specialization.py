"""The kernel specialization matrix (Shan & Bordelon 2021a, Eq. 16), from class alignments: numbers and picture.

Class alignments are (..., C, C), rows kernels and columns targets, as `fl.metrics.class_alignment` gives them.
"""

from typing import Any

import numpy


def specialization(classes: Any) -> Any:
    """(..., C, C): every column divided by its mean, as `fl.metrics.specialization` does from kernels."""
    return classes / classes.mean(-2, keepdims=True)


def diagonal_and_others(matrix: Any) -> tuple[Any, Any]:
    """(...,) each: mean of the diagonal, and of the rest."""
    count = matrix.shape[-1]
    diagonal = numpy.trace(matrix, axis1=-2, axis2=-1) / count
    return diagonal, (matrix.sum((-2, -1)) / count - diagonal) / (count - 1)


def contrast(classes: Any) -> Any:
    """(...,): mean of the diagonal of the specialization matrix less the mean of the rest."""
    diagonal, others = diagonal_and_others(specialization(classes))
    return diagonal - others


def own_peaks(classes: Any) -> Any:
    """(...,): share of targets with which their own kernel is aligned best: columns that peak on the diagonal."""
    return (classes.argmax(-2) == numpy.arange(classes.shape[-1])).mean(-1)


def draw(ax: Any, classes: Any, *, span: float) -> None:
    """The matrix, mean over seeds of class alignments (S, C, C); colors from 1 - span to 1 + span, white at 1."""
    from matplotlib import colormaps

    matrix = specialization(classes).mean(0)
    diagonal, others = diagonal_and_others(matrix)
    steps = colormaps["RdBu_r"].resampled(25)  # few colors make a small file
    image = ax.imshow(matrix, cmap=steps, vmin=1 - span, vmax=1 + span, label="specialization, row c, column d")
    ax.figure.colorbar(image, ax=ax, shrink=0.85).ax.tick_params(labelsize=7)
    ticks = range(0, len(matrix), 3)
    ax.set(xticks=ticks, yticks=ticks, ylabel="kernel $c$")
    ax.set_xlabel(f"target $d$\non the diagonal {diagonal:.3f}, off {others:.3f}", fontsize=7)


def span(*matrices: Any) -> float:
    """Of colors that show all matrices, of class alignments (S, C, C), alike."""
    return float(max(abs(specialization(classes).mean(0) - 1).max() for classes in matrices))
