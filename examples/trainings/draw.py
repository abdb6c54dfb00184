"""The linearization gap of runs along training, and what they reach on unseen data, as one picture.

python examples/trainings/draw.py trainings.png runs/resnet-cifar10 runs/vit-cifar10 ...
"""

import sys

from matplotlib.figure import Figure

import featlearn as fl

LAZY, RICH = 0.15, 0.25
"""thresholds of the verdict"""


def main(path: str, *folders: str) -> None:
    """Two panels over the step, logarithmic; a run is a line."""
    figure = Figure(figsize=(6.75, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhspan(LAZY, RICH, color="0.9")
    for number, folder in enumerate(folders):
        look = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        run = fl.open_run(folder)
        names = [name for name in ("gap/unshrunk", "gap/test", "gap/probe") if name in run.names]
        gaps: dict[int, float] = {}
        for name in names:  # where weights shrank, the smaller of both counts
            for step, value in zip(*run.scalar(name), strict=True):
                gaps[int(step)] = min(float(value), gaps.get(int(step), float(value)))
        left.plot(sorted(gaps), [gaps[step] for step in sorted(gaps)], label=run.name, **look)
        if "held_out_accuracy" in run.names:
            right.plot(*run.scalar("held_out_accuracy"), label=run.name, **look)
        else:
            right.plot([], [], label=run.name, **look)
    left.set(xscale="log", yscale="log", ylim=(1e-2, None), xlabel="step", ylabel="linearization gap")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="step", ylabel="accuracy on unseen data")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
