"""Phases of training: which scaling limits learn features, and which only move along a fixed kernel.

See Xu & Ziyin 2024, Sec. 4.

Width, output scale, variances of the two layers and their learning rates are powers of one parameter kappa, which
grows. The learning time t_c of `theory.latent` then grows, vanishes or stays; where it stays, the kernel either stays
too or changes by as much as its own size.

- `Exponents`: the powers; `classify`: the phase; `start_is_balanced`: the condition that exponents cannot show;
- `stable_rate`, `learning_scaling`, `kernel_scaling`: Corollaries 1 to 3, how to choose rate and scale for a phase;
- `TABLE_1`, `column`: the table of common scalings, computed, and the column of any other;
- `diagram`: the phases over any two exponents, as numbers and, by `.plot()`, as a picture.

    phases.classify(phases.Exponents(d=1, gamma=-1/2, u=0, w=0))                     # kernel: the NTK parametrization
    phases.learning_scaling(phases.Exponents(d=1, gamma=-1/2, u=0, w=0))             # gamma -1, rates 1: mean field
    phases.diagram(phases.Exponents(d=1, gamma=0, u=0, w=0), "gamma", "rate").plot()
"""

from featlearn.theory.phases.classification import Phase, classify, start_is_balanced
from featlearn.theory.phases.diagram import Diagram, Segment, diagram
from featlearn.theory.phases.exponents import Exponents, Hyperparameters
from featlearn.theory.phases.scalings import kernel_scaling, learning_scaling, stable_rate
from featlearn.theory.phases.table import TABLE_1, Cell, Column, column

__all__ = [
    "TABLE_1",
    "Cell",
    "Column",
    "Diagram",
    "Exponents",
    "Hyperparameters",
    "Phase",
    "Segment",
    "classify",
    "column",
    "diagram",
    "kernel_scaling",
    "learning_scaling",
    "stable_rate",
    "start_is_balanced",
]
