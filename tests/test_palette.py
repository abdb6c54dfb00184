"""Colors that stand for different things look different to color-blind readers."""

from itertools import combinations

import numpy
import pytest

from featlearn import palette

# linear RGB -> linear RGB as a dichromat sees it (Machado, Oliveira & Fernandes 2009, severity 1)
SIMULATIONS = {
    "normal": numpy.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, simulation: str) -> numpy.ndarray:
    """CIELAB coordinates of a color as a reader sees it."""
    values = numpy.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = numpy.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ numpy.clip(numpy.array(SIMULATIONS[simulation]) @ linear, 0, 1) / TO_XYZ.sum(1)
    f = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return numpy.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distances(colors: dict[str, str], simulation: str) -> dict[tuple[str, str], float]:
    return {
        (a, b): float(numpy.linalg.norm(lab(colors[a], simulation) - lab(colors[b], simulation)))
        for a, b in combinations(colors, 2)
    }


@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_regimes_differ_for_every_reader(simulation: str):
    """A difference of 2.3 is just noticeable (Mahy et al. 1994)."""
    assert min(distances(dict(palette.REGIMES), simulation).values()) > 15


@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_curves_differ_for_every_reader(simulation: str):
    colors = {color: color for color in palette.COLORS}
    assert min(distances(colors, simulation).values()) > 8


def test_red_and_green_would_fail():
    pairs = distances({"red": "#D62728", "green": "#7F7F00"}, "deuteranopia")
    assert min(pairs.values()) < 15 < min(distances({"red": "#D62728", "green": "#7F7F00"}, "normal").values())
