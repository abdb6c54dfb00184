"""Every figure and table that is reproduced, declared in one place. Imports no torch."""

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from featlearn.errors import InputValueError

if TYPE_CHECKING:
    from featlearn_papers.frame.reproduction import Reproduction


class Declaration(NamedTuple):
    """One figure, and the file that holds it."""

    id: str
    """PAPER/FIGURE"""
    title: str
    module: str
    """below featlearn_papers; it has a `Reproduction` of this id"""

    @property
    def written(self) -> bool:
        """Whether the file is there."""
        try:
            return find_spec(f"featlearn_papers.{self.module}") is not None
        except ModuleNotFoundError:  # not even the folder
            return False


DECLARATIONS = (
    Declaration("000/fig1", "Networks learn faster than their first kernel: MNIST", "paper_000.fig1"),
    Declaration("000/fig2", "Optimal feature evolution of an infinite-width kernel", "paper_000.fig2"),
    Declaration("000/fig3", "Kernels of two-layer linear networks align with the task", "paper_000.fig3"),
    Declaration("000/fig4", "Kernels specialize in ReLU networks, not in linear ones", "paper_000.fig4"),
    Declaration("000/fig5", "The readout aligns with all targets, hidden layers with their own", "paper_000.fig5"),
    Declaration("000/fig6", "Deeper networks align and specialize more: MNIST", "paper_000.fig6"),
    Declaration("000/fig7", "The final kernel of a two-layer linear network, approximated", "paper_000.fig7"),
    Declaration("000/starts", "Ours: from which start a network beats its rescaled kernel", "paper_000.starts"),
    Declaration("001/fig1", "Networks learn faster than their first kernel: odd and even digits", "paper_001.fig1"),
    Declaration("001/fig2", "Rescaled output: richer networks align more and learn faster", "paper_001.fig2"),
    Declaration("001/fig3", "Kernels of single outputs specialize: MNIST and CIFAR-10", "paper_001.fig3"),
    Declaration("001/fig4", "Kernels of linear networks turn to the task and do not specialize", "paper_001.fig4"),
    Declaration("001/fig5", "Deeper ReLU networks align more: MNIST", "paper_001.fig5"),
    Declaration("001/fig6", "Two-layer ReLU networks: which part of the kernel turns", "paper_001.fig6"),
    Declaration("001/fig7", "Which part of the kernel specializes: Gaussian mixture and MNIST", "paper_001.fig7"),
    Declaration("002/fig1", "Silent alignment: the kernel turns before the loss falls", "paper_002.fig1"),
    Declaration("002/fig2", "The kernel turns before the function leaves the origin", "paper_002.fig2"),
    Declaration("002/fig3", "Deep linear networks learn after a time that is a power of the scale", "paper_002.fig3"),
    Declaration("002/fig4", "Anisotropic inputs spoil silent alignment", "paper_002.fig4"),
    Declaration("002/figC1", "Anisotropic inputs: the kernel turns twice", "paper_002.figC1"),
    Declaration("002/figC2", "The scale of initial weights sets the time of silence", "paper_002.figC2"),
    Declaration("002/figC3", "Strength and kernel of two-layer networks over both phases", "paper_002.figC3"),
    Declaration("002/figE1", "Deeper linear networks: later, sharper and more aligned", "paper_002.figE1"),
    Declaration("002/figE2", "ReLU networks of several depths on whitened images", "paper_002.figE2"),
    Declaration("002/figE3", "Final kernels on partially whitened images show the classes", "paper_002.figE3"),
    Declaration("002/figF1", "Aligned kernels on other tasks: transfer curves", "paper_002.figF1"),
    Declaration("002/figH1", "Ten classes: modes learned one by one", "paper_002.figH1"),
    Declaration("002/figJ1", "A residual network on images that are not whitened", "paper_002.figJ1"),
    Declaration("002/figJ2", "Residual networks of several depths on whitened images", "paper_002.figJ2"),
    Declaration("002/figJ3", "Residual networks of several widths on whitened images", "paper_002.figJ3"),
    Declaration("002/map", "Ours: where alignment is silent, over whitening and initial scale", "paper_002.map"),
    Declaration("003/fig1", "Neural and gradient features agree, unless the kernel is corrupted", "paper_003.fig1"),
    Declaration("003/fig2", "Centered and uncentered correlations of neural features", "paper_003.fig2"),
    Declaration("003/fig3", "Early correlations that free probability predicts", "paper_003.fig3"),
    Declaration("003/fig4", "Speed-limited optimization drives feature learning", "paper_003.fig4"),
    Declaration("003/fig5", "The change of the kernel in the centered correlation", "paper_003.fig5"),
    Declaration("003/fig6", "Whether the kernel turns toward the initial weights", "paper_003.fig6"),
    Declaration("003/fig7", "Early correlations of deeper networks to first order", "paper_003.fig7"),
    Declaration("003/fig8", "Initial scales: correlations and losses, isotropic data", "paper_003.fig8"),
    Declaration("003/fig9", "Initial scales: eigenvalues of the data 1/(1+k)", "paper_003.fig9"),
    Declaration("003/fig10", "Initial scales: eigenvalues of the data 1/(1+k^2)", "paper_003.fig10"),
    Declaration("003/fig11", "Features over initial scales, with and without speed limits", "paper_003.fig11"),
    Declaration("003/fig12", "Adaptive speed limits drive the layer that is behind", "paper_003.fig12"),
    Declaration("003/fig13", "Both correlations in every layer: six data sets", "paper_003.fig13"),
    Declaration("003/fig14", "Losses and moving weights of perceptrons: six data sets", "paper_003.fig14"),
    Declaration("003/fig15", "Losses and moving weights of VGG-11 and GPT", "paper_003.fig15"),
    Declaration("003/fig16", "Diagonals of features agree, unless the kernel is corrupted", "paper_003.fig16"),
    Declaration("003/fig17", "Speed-limited optimization on SVHN", "paper_003.fig17"),
    Declaration("003/batch", "Ours: neural features against the size of the batch", "paper_003.batch"),
    Declaration("003/optimizers", "Ours: neural features under Adam, LARS and speed limits", "paper_003.optimizers"),
    Declaration("004/fig1", "Layers align or disalign as the exact solution says", "paper_004.fig1"),
    Declaration("004/fig2", "Layer alignment over initialization scales: MNIST", "paper_004.fig2"),
    Declaration("004/fig3", "Larger initial weights: larger norm, lower test accuracy", "paper_004.fig3"),
    Declaration("004/fig4", "Widths and scalings: two phases of every initialization", "paper_004.fig4"),
    Declaration("004/fig5", "Exponents of the initial weights decide the phase", "paper_004.fig5"),
    Declaration("004/fig6", "Layer alignment over initialization scales: six layers", "paper_004.fig6"),
    Declaration("004/fig7", "Layers align or disalign in classification as well", "paper_004.fig7"),
    Declaration("004/phase-rate", "Ours: output scale x learning rate, MNIST", "paper_004.phase_rate"),
    Declaration("004/phase-scalings", "Ours: kernel motion over width and initial scale", "paper_004.phase_scalings"),
    Declaration("004/phase-width", "Ours: output scale x width, MNIST and CIFAR-10", "paper_004.phase_width"),
    Declaration("004/sgd", "Ours: SGD against full-batch descent from poor starts", "paper_004.sgd"),
    Declaration("004/table1", "Phases of five common scalings", "paper_004.table1"),
)


def declaration(id: str) -> Declaration:
    """The figure of an id, or an error with the nearest ones."""
    known = {one.id.lower(): one for one in DECLARATIONS}
    if id.lower() not in known:
        close = get_close_matches(id.lower(), known, n=1)
        hint = f"did you mean {known[close[0]].id}?" if close else "--list shows all"
        raise InputValueError(f"there is no figure {id!r}, expected PAPER/FIGURE as in {DECLARATIONS[0].id}; {hint}")
    return known[id.lower()]


def load(id: str) -> "Reproduction":
    """The reproduction of an id, from its file."""
    from featlearn_papers.frame.reproduction import Reproduction

    declared = declaration(id)
    if not declared.written:
        raise InputValueError(
            f"{declared.id} should be in featlearn_papers.{declared.module}, and there is no such module: it is not "
            "written yet, or mistyped in registry.py; --list shows the figures that can be run"
        )
    module = import_module(f"featlearn_papers.{declared.module}")
    for value in vars(module).values():
        if isinstance(value, Reproduction) and value.id == declared.id:
            return value
    raise InputValueError(
        f"{module.__name__} has no Reproduction with id {declared.id!r}, expected one at its top level"
    )
