"""How time and memory of `fl.ntk` grow with samples, outputs, width, depth and positions, beside the cost model.

    python benchmarks/scaling.py [--out benchmarks/scaling.png] [--quick]

Every point is a fresh process: CPU seconds of one thread, peak resident size above that before. Exponents are slopes of
straight lines through the logarithms; those of the cost model are the slopes of what `fl.plan` says for the same
points: multiply-adds of contractions and passes, bytes that are held at most.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = {"samples": 600, "outputs": 4, "width": 256, "depth": 3, "positions": 1}
AXES = {
    "samples": [500, 1000, 2000, 4000],
    "outputs": [4, 8, 16, 32, 64],
    "width": [256, 512, 1024, 2048],
    "depth": [4, 8, 16, 32],
    "positions": [1, 2, 4, 8, 16, 32, 64],
}
FIXED = {"positions": {"samples": 100, "outputs": 1}, "width": {"samples": 400}}
"""Sizes other than the base's along one axis, so that no point takes long."""


def measured(sizes: dict[str, int]) -> dict[str, float]:
    """One point, in this process."""
    import torch
    from torch import nn

    import featlearn as fl
    from benchmarks.peers.peak import Peak

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = sizes["width"]
    layers: list[nn.Module] = []
    for _ in range(sizes["depth"]):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    model = nn.Sequential(*layers, Mean(), nn.Linear(width, sizes["outputs"], bias=False))
    x = torch.randn(sizes["samples"], sizes["positions"], width)
    fl.ntk(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(600, 8))  # what is loaded once
    peak = Peak()
    plan = fl.plan(model, x)
    seconds = math.inf
    for _ in range(2):
        begin = time.process_time()
        fl.ntk(model, x)
        seconds = min(seconds, time.process_time() - begin)
    size = sum(p.numel() for p in model.parameters())
    # A forward and, for every output, a backward pass: a multiply-add per weight and position each.
    passes = sizes["samples"] * sizes["positions"] * size * (1 + sizes["outputs"])
    return {
        "seconds": seconds,
        "bytes": peak.bytes(),
        "model_operations": (plan.operations / 2 if plan.symmetric else plan.operations) + passes,
        # The audit also holds gradients of the weights' size: of two batches, as read, and compared.
        "model_bytes": max(plan.peak, plan.kernel_bytes + 5 * 4 * size),
    }


def slope(x: list[int], y: list[float]) -> float:
    """The exponent of a power law by least squares in the logarithms."""
    a, b = [math.log(v) for v in x], [math.log(max(v, 1e-9)) for v in y]
    mean = sum(a) / len(a)
    return sum((u - mean) * v for u, v in zip(a, b, strict=True)) / sum((u - mean) ** 2 for u in a)


def main() -> None:
    """Measure all points, print the exponents, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "scaling.png")
    parser.add_argument("--quick", action="store_true", help="two points along every axis, no picture")
    parser.add_argument("--point", help="one point as JSON, for internal use")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measured(json.loads(options.point))))
        return
    found = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    for axis, values in AXES.items():
        chosen, points = (values[:2] if options.quick else values), []
        for value in chosen:
            sizes = BASE | FIXED.get(axis, {}) | {axis: value}
            command = [sys.executable, __file__, "--point", json.dumps(sizes)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            points.append(json.loads(done.stdout.splitlines()[-1]))
        found[axis] = (chosen, points)
        # The last half, where what grows outweighs what does not.
        half = chosen[len(chosen) // 2 - 1 :]
        tail = points[len(chosen) // 2 - 1 :]
        exponents = {key: slope(half, [p[key] for p in tail]) for key in tail[0]}
        print(
            f"{axis:<10} time {exponents['seconds']:.2f} (cost model {exponents['model_operations']:.2f})   "
            f"memory {exponents['bytes']:.2f} (cost model {exponents['model_bytes']:.2f})",
            flush=True,
        )
    if not options.quick:
        draw(found, options.out)


def draw(found: dict[str, tuple[list[int], list[dict[str, float]]]], out: Path) -> None:
    """Measured points and the cost model, scaled to meet the last of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(found), figsize=(2.3 * len(found), 4.2), sharey="row")
    rows = (("seconds", "model_operations", "CPU seconds"), ("bytes", "model_bytes", "MiB above the start"))
    for column, (name, (values, points)) in enumerate(found.items()):
        for row, (key, model, label) in enumerate(rows):
            ax, unit = axes[row][column], 1.0 if key == "seconds" else 2**20
            given = [p[key] / unit for p in points]
            expected = [p[model] for p in points]
            half = len(values) // 2 - 1
            ax.loglog(
                values, given, "o-", color="#0072B2", label=f"measured, ^{slope(values[half:], given[half:]):.2f}"
            )
            line = [e * given[-1] / expected[-1] for e in expected]
            ax.loglog(
                values, line, "--", color="#D55E00", label=f"cost model, ^{slope(values[half:], expected[half:]):.2f}"
            )
            ax.legend(fontsize=6, frameon=False)
            ax.set_xticks(values, [str(value) for value in values], fontsize=7)
            ax.minorticks_off()
            ax.tick_params(labelsize=7)
            if row == 1:
                ax.set_xlabel(name, fontsize=8)
            if column == 0:
                ax.set_ylabel(label, fontsize=8)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
