"""Made-up runs of residual networks that are as App. J of Atanasov et al. 2022 describes them."""

import numpy

from featlearn_papers.paper_002.residual import Setup
from featlearn_papers.paper_002.whitened import Residual

SETUP = Setup(networks=(Residual(b=1, k=1.0), Residual(b=2, k=2.0)))
STEPS = numpy.arange(0.0, 101.0)


def made_up(later=0.5, amount=2.0):
    """Alignment at once; then losses fall and norms grow, in the second network `later` and to `amount`, as factors."""
    rows = []
    for half, last in ((60.0, 1.0), (60.0 * later, amount)):
        grown = 1 / (1 + numpy.exp((half - STEPS) / 3))
        early = 0.5 - 0.4 * numpy.exp(-STEPS / 5)
        adam = numpy.where(STEPS > 0, early, numpy.nan)
        rows.append(
            {
                "steps": STEPS,
                "loss": 1 - grown,
                "norm": last * (0.01 + grown),
                "alignment": early,
                "centered_alignment": early,
                "update_alignment": adam,
                "update_centered_alignment": adam,
                "error": numpy.array([0.1, 0.5, 0.08]),
                "correlation": numpy.array([0.98, 0.8, 0.99]),
                "predictions": numpy.ones((4, 7)),
            }
        )
    return {name: numpy.stack([row[name] for row in rows]) for name in rows[0]}


def changed(found, network, **changes):
    """The same with other numbers of one network."""
    found = {name: values.copy() for name, values in found.items()}
    for name, values in changes.items():
        found[name][network] = values
    return found
