"""Diagnose runs whose regime is known by construction, and count what the diagnosis says.

    python benchmarks/calibrate_diagnosis.py RUNS [--held-out] [--data-root ROOT] [--seeds 5] [--scales 0.1 10 ...]

The output of a network is divided by gamma, the learning rate multiplied by gamma^2 (`fl.steer.scale_output`): at an
output scale 1 / gamma of 10 and more training is lazy, at 0.1 and less it is rich, whatever the network. Full-batch or
mini-batch descent on squared error or cross-entropy, 128 samples of digits (of MNIST with --data-root) as the probe.

Without --held-out the networks on which thresholds were chosen are trained, seeds from 0; with it others, seeds from
101. Finished runs in RUNS are not trained again. The learning rate is a share of the largest stable one of the first
kernel, divided by four until training is stable; that a run got stuck is seen by its loss alone, never by its kernel.
"""

import argparse
import contextlib
import gzip
import io
import math
import shutil
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.record import open_run
from featlearn.steer import scale_output
from featlearn.watch import watch

SCALES = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
PROBE, TEST, TRAIN = 128, 64, 512


class Setting(NamedTuple):
    """A network and how it is trained."""

    network: str
    data: str = "digits"
    loss: str = "mean"
    batch: int = 0
    """0 for all of the probe, else so many of 512 samples of which the probe is a part"""
    momentum: float = 0.0
    steps: int = 3000


CHOSEN = {"mlp": Setting("mlp"), "cnn": Setting("cnn", steps=1500)}
HELD_OUT = {
    "mlp, other width": Setting("wide"),
    "mlp, deeper, tanh": Setting("deep"),
    "cnn, other": Setting("pooled", steps=1500),
    "mlp, mini-batches, momentum": Setting("mlp", batch=64, momentum=0.9),
    "mlp, cross-entropy": Setting("mlp", loss="cross-entropy"),
    "mlp, MNIST": Setting("mlp", data="mnist"),
    "cnn, MNIST": Setting("cnn", data="mnist", steps=1000),
}


def network(name: str, pixels: int) -> nn.Module:
    side = round(math.sqrt(pixels))
    image = nn.Unflatten(1, (1, side, side))
    if name == "cnn":
        return nn.Sequential(image, nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, 2, 1), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))  # fmt: skip
    if name == "pooled":
        return nn.Sequential(image, nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Conv2d(20, 10, 3, padding=1), nn.ReLU(), nn.Flatten(),
                             nn.Linear(10 * (side // 2) ** 2, 10))  # fmt: skip
    widths, activation = {"mlp": ([64, 64], nn.ReLU), "wide": ([150], nn.ReLU), "deep": ([80, 80, 80], nn.Tanh)}[name]
    sizes, layers = [pixels, *widths, 10], []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def data(name: str, root: str | None) -> tuple[Tensor, Tensor]:
    if name == "digits":
        digits = fl.data.digits("all")
        return digits.x, digits.labels
    if root is None:
        raise SystemExit("MNIST needs --data-root with the folder of its four files")
    files = [Path(root, f"train-{part}.gz") for part in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    images, labels = (
        numpy.frombuffer(gzip.decompress(f.read_bytes()), numpy.uint8, offset=o).copy()
        for f, o in zip(files, (16, 8), strict=True)
    )
    x = torch.from_numpy(images).reshape(-1, 28, 28)[:3000].float() / 255
    return nn.functional.avg_pool2d(x[:, None], 2).flatten(1), torch.from_numpy(labels)[:3000].long()


def trained(path: Path, setting: Setting, scale: float, seed: int, share: float, root: str | None) -> bool:
    """Train and watch; whether training was stable."""
    x, labels = data(setting.data, root)
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, labels = x[some], labels[some]
    y = nn.functional.one_hot(labels, 10).float() - 0.1
    torch.manual_seed(seed)
    model = scale_output(network(setting.network, x.shape[1]), 1 / scale)
    largest = float(torch.linalg.eigvalsh(fl.ntk(model.network, x[:PROBE]).double())[-1]) / PROBE
    entropy = setting.loss == "cross-entropy"
    lr = share / largest / (1 if entropy else 2) * model.rate_factor * (1 - setting.momentum)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=setting.momentum)
    probe = (x[:PROBE], labels[:PROBE] if entropy else y[:PROBE])
    test = (x[TRAIN : TRAIN + TEST], labels[TRAIN : TRAIN + TEST] if entropy else y[TRAIN : TRAIN + TEST])
    generator, first, best, last = torch.Generator().manual_seed(seed), math.inf, math.inf, math.inf
    with contextlib.redirect_stderr(io.StringIO()), watch(
        model, probe=probe, out=path, budget=None, test=test, optimizer=optimizer, loss=setting.loss,
        quantities=["kernel", "layers", "weights", "test"],
    ) as watched:  # fmt: skip
        for step in range(setting.steps):
            batch = slice(PROBE) if not setting.batch else torch.randint(TRAIN, (setting.batch,), generator=generator)
            optimizer.zero_grad()
            f = model(x[batch])
            loss = nn.functional.cross_entropy(f, labels[batch]) if entropy else (f - y[batch]).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watched.step(loss=loss)
            if step % 20 == 0:
                with torch.no_grad():
                    f = model(x[:PROBE])
                    last = float(
                        nn.functional.cross_entropy(f, labels[:PROBE])
                        if entropy
                        else (f - y[:PROBE]).square().sum(1).mean()
                    )
                first, best = min(first, last) if step == 0 else first, min(best, last)
                if not last < 1.5 * first or last < 0.05 * first:
                    break
    stuck = scale <= 0.3 and last > 0.5 * first
    return last < max(2 * best, 0.1 * first) and not stuck


def one(arguments: tuple[str, str, Setting, float, int, str | None]) -> tuple[str, float, str, list[tuple[str, float]]]:
    """Train one run, unless it is there, and diagnose it."""
    torch.set_num_threads(1)
    out, name, setting, scale, seed, root = arguments
    path = Path(out, f"{name}-{scale}-{seed}".replace(", ", "_").replace(" ", "_"))
    share = min(0.5, 2 * scale ** (4 / 3))
    while not (path / "done").exists():
        shutil.rmtree(path, ignore_errors=True)
        if trained(path, setting, scale, seed, share, root) or share < 1e-7:
            (path / "done").touch()
        share /= 4
    found = diagnose(open_run(path))
    return name, scale, found.regime, [(item.says, item.value) for item in found.evidence if item.topic == "regime"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES)
    parser.add_argument("--only", help="a part of the name of a setting")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    settings = HELD_OUT if given.held_out else CHOSEN
    settings = {name: s for name, s in settings.items() if given.data_root or s.data == "digits"}
    settings = {name: s for name, s in settings.items() if given.only is None or given.only in name}
    first = 101 if given.held_out else 0  # 100 was looked at, and changed how votes are counted
    jobs = [
        (given.runs, name, setting, scale, seed, given.data_root)
        for seed in range(first, first + given.seeds) for name, setting in settings.items() for scale in given.scales
    ]  # fmt: skip
    counts: dict[tuple[str, float], Counter[str]] = {}
    with ProcessPoolExecutor(given.processes) as pool:
        for name, scale, regime, numbers in pool.map(one, jobs):
            counts.setdefault((name, scale), Counter())[regime] += 1
            if given.verbose:
                print(name, scale, regime, *(f"{value:.3g}" for _, value in numbers), file=sys.stderr, flush=True)
    show(counts)


def show(counts: dict[tuple[str, float], Counter[str]]) -> None:
    """A table for each network, and the confusion table of all."""
    verdicts = ("lazy", "mixed", "rich", "cannot tell")
    print("| network | output scale | " + " | ".join(verdicts) + " |\n|" + " --- |" * 6)
    for (name, scale), counted in sorted(counts.items(), key=lambda item: (item[0][0], item[0][1])):
        print(f"| {name} | {scale:g} | " + " | ".join(str(counted[v] or "") for v in verdicts) + " |")
    print("\n| by construction | " + " | ".join(verdicts) + " |\n|" + " --- |" * 5)
    groups = {"rich (0.001 to 0.1)": (0, 0.1), "neither (0.3 to 3)": (0.3, 3), "lazy (10 and 100)": (10, 100)}
    for group, (low, high) in groups.items():
        total = sum((counted for (_, scale), counted in counts.items() if low <= scale <= high), Counter())
        print(f"| {group} | " + " | ".join(str(total[v]) for v in verdicts) + " |")


if __name__ == "__main__":
    main()
