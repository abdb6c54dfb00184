"""Odd against even digits with one output: the network of `mnist` at three learning rates.

The experiment behind Fig. 1 of Shan & Bordelon 2021b, as its text describes it. The learning rate of 20 in its appendix
is printed for ten outputs, over which the loss is averaged: outputs then move as those of one output at a rate of 2. At
20, one output is beyond the limit of stability from the start: rate times largest eigenvalue is 2.4 to 2.9, and the
limit is 2. It does not diverge: the loss rises for some steps, until the kernel is smaller.
"""

from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000.mnist import Setup, measure


def _experiment(id: str, lr: float, seeds: int) -> Experiment[Setup]:
    return Experiment(
        id=id,
        sizes={
            Scale.SMOKE: Size(
                setup=Setup(
                    data="digits",
                    labels="parity",
                    samples=60,
                    test_samples=40,
                    width=50,
                    lr=lr / 4,
                    steps=100,
                    growth=2.0,
                    few=10,
                ),
                seeds=1,
                seconds=1,
                mebibytes=50,
            ),
            Scale.LAPTOP: Size(
                setup=Setup(labels="parity", samples=300, test_samples=150, lr=lr, steps=1000, growth=1.5),
                seeds=seeds,
                seconds=40,
                mebibytes=200,
            ),
            Scale.PAPER: Size(
                setup=Setup(labels="parity", lr=lr, growth=1.5), seeds=5, seconds=60, mebibytes=2000, device="cuda"
            ),
        },
        measure=measure,
        paper_seeds=seeds,
    )


ODD_EVEN = _experiment("001/odd-even", 10.0, 5)
"""half of the printed rate, below the limit of stability at the start"""
ODD_EVEN_PRINTED = _experiment("001/odd-even-printed", 20.0, 3)
ODD_EVEN_SLOW = _experiment("001/odd-even-slow", 2.0, 3)
"""outputs move as fast as those of ten outputs at the printed rate"""
