"""Diagnose runs whose regime is known by construction, and count what the diagnosis says.

    python benchmarks/calibrate_diagnosis.py TABLE [--data-root ROOT] [--processes 16] [--minutes 8]
    python benchmarks/calibrate_diagnosis.py --from-table benchmarks/diagnosis_calibration.jsonl

The output of a network is divided by gamma, the learning rate multiplied by gamma^2 (`fl.steer.scale_output`): at an
output scale 1 / gamma of 10 and more training is lazy, at 0.1 and less it is rich, whatever the network. Every run is
watched, diagnosed and thrown away; TABLE keeps one line of JSON for each, with all numbers of its diagnosis. Runs that
are in the table are not trained again. `--from-table` trains nothing: it applies the thresholds as they now are in
`featlearn.diagnosis.evidence` to the numbers in the table, prints how each number is spread over the regimes, and the
confusion tables; a change of thresholds is judged in a second.

Thresholds are chosen on the settings of CHOSEN. Those of HELD_OUT, other networks, other data, other ways to train,
are only counted. The learning rate of SGD is half of the largest stable one of the present kernel, less where a step
would change the weights by more than a hundredth, so that every run is stable; that of Adam is fixed.
"""

import argparse
import contextlib
import io
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process for every core, not a thread

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from featlearn.record import Run

SCALES = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
SCALES_HELD_OUT = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
TEST, TRAIN = 48, 512
STRIDE = 0.01
"""What a step may change of the weights."""
LONGEST = 100
"""Seconds after which a run is given up, and stands in the table as such."""


class Setting(NamedTuple):
    """A network and how it is trained."""

    network: str
    data: str = "digits"
    loss: str = "mean"
    batch: int = 0
    """0 for all of the probe, else so many of 512 samples of which the probe is a part"""
    momentum: float = 0.0
    adam: float = 0.0
    """learning rate of Adam at an output scale of one; 0 for SGD"""
    steps: int = 3000
    probe: int = 128


CHOSEN = {
    "MLP, digits": Setting("mlp"),
    "MLP, MNIST": Setting("mlp", data="mnist"),
    "CNN, digits": Setting("cnn", momentum=0.9, steps=2500, probe=64),
    "CNN, MNIST": Setting("cnn", data="mnist", momentum=0.9, steps=2500, probe=64),
}
HELD_OUT = {
    "MLP, one wide hidden layer": Setting("wide"),
    "MLP, deeper, tanh": Setting("deep"),
    "MLP, one output, odd or even": Setting("mlp", data="parity"),
    "MLP, mini-batches, momentum": Setting("mlp", batch=64, momentum=0.9),
    "MLP, cross-entropy": Setting("mlp", loss="cross-entropy"),
    "MLP, Adam": Setting("mlp", adam=1e-3, batch=64, steps=2000),
    "CNN, MNIST, pooled, mini-batches": Setting("pooled", data="mnist", momentum=0.9, batch=64, steps=1200, probe=64),
    "CNN, BatchNorm, Adam": Setting("normed", adam=1e-3, batch=64, steps=1000, probe=64),
    "transformer, SGD": Setting("transformer", momentum=0.9, steps=1000, probe=64),
    "transformer, Adam": Setting("transformer", adam=1e-3, batch=64, steps=1000, probe=64),
}


class Block(nn.Module):
    """Attention over the rows of an image and a small MLP, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.first(x)).chunk(3, -1)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Rows of an image as tokens; the mean over them is read."""

    def __init__(self, side: int, outputs: int, width: int = 24) -> None:
        super().__init__()
        self.side = side
        self.embed, self.position = nn.Linear(side, width), nn.Parameter(0.1 * torch.randn(side, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unflatten(1, (self.side, self.side))) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def network(name: str, pixels: int, outputs: int) -> nn.Module:
    """A small network for images of so many pixels in a row."""
    side = round(math.sqrt(pixels))
    image = nn.Unflatten(1, (1, side, side))
    if name == "transformer":
        return Transformer(side, outputs)
    if name == "cnn":
        return nn.Sequential(image, nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, 2, 1), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, outputs))  # fmt: skip
    if name == "pooled":
        return nn.Sequential(image, nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Conv2d(16, 10, 3, padding=1), nn.ReLU(), nn.Flatten(),
                             nn.Linear(10 * (side // 2) ** 2, outputs))  # fmt: skip
    if name == "normed":
        return nn.Sequential(image, nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
                             nn.Conv2d(12, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
                             nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, outputs))  # fmt: skip
    widths, activation = {"mlp": ([64, 64], nn.ReLU), "wide": ([150], nn.ReLU), "deep": ([80, 80, 80], nn.Tanh)}[name]
    layers: list[nn.Module] = []
    for n, m in zip([pixels, *widths], [*widths, outputs], strict=True):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def data(name: str, root: str | None, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images in rows, labels, targets; in an order of their own for each seed."""
    import featlearn as fl

    if name == "mnist":
        x, labels = mnist(Path(root or ""))
    else:
        digits = fl.data.digits("all")
        x, labels = digits.x, digits.labels
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, labels = x[some], labels[some]
    if name == "parity":
        return x, labels % 2, 1.0 - 2.0 * (labels % 2)[:, None]
    return x, labels, nn.functional.one_hot(labels, 10).float() - 0.1


def mnist(root: Path) -> tuple[Tensor, Tensor]:
    """3000 images of half the side, of mean zero and variance one as is usual."""
    import gzip

    import numpy

    folder = root / "mnist" if (root / "mnist").is_dir() else root
    files = [folder / f"train-{part}.gz" for part in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    images, labels = (
        numpy.frombuffer(gzip.decompress(f.read_bytes()), numpy.uint8, offset=o).copy()
        for f, o in zip(files, (16, 8), strict=True)
    )
    x = torch.from_numpy(images).reshape(-1, 1, 28, 28)[:3000].float() / 255
    return nn.functional.avg_pool2d((x - 0.1307) / 0.3081, 2).flatten(1), torch.from_numpy(labels)[:3000].long()


class Sharpness:
    """Largest eigenvalue of J^T J, followed through training by a few power iterations at a time."""

    def __init__(self, model: nn.Module, x: Tensor, seed: int) -> None:
        self.model, self.x = model, x
        generator = torch.Generator().manual_seed(seed)
        self.vector = {name: torch.randn(p.shape, generator=generator) for name, p in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def value(self, iterations: int) -> float:
        """After so many more iterations."""

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.model, parameters, (self.x,))

        parameters = self._parameters()
        _, back = torch.func.vjp(outputs, parameters)
        size = 0.0
        for _ in range(iterations):
            _, change = torch.func.jvp(outputs, (parameters,), (self.vector,))
            (found,) = back(change)
            size = math.sqrt(sum(float(part.square().sum()) for part in found.values()))
            self.vector = {name: part / size for name, part in found.items()}
        return size


def trained(path: Path, setting: Setting, scale: float, seed: int, root: str | None) -> None:
    """Train and watch one run."""
    from featlearn.monitoring.entry import watch
    from featlearn.steer import scale_output

    x, labels, y = data(setting.data, root, seed)
    torch.manual_seed(seed)
    model = scale_output(network(setting.network, x.shape[1], y.shape[1]), 1 / scale)
    entropy, probe = setting.loss == "cross-entropy", slice(setting.probe)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # the largest stable rate is 2 over the curvature of the loss: 2 J^T J / P, at most half of it for cross-entropy
    curvature = (0.5 if entropy else 2.0) / setting.probe
    sharpness = None if setting.adam else Sharpness(model, x[probe], seed)
    optimizer: torch.optim.Optimizer
    if sharpness is None:
        # steps of Adam do not know the size of a gradient: the outputs move with the rate over gamma
        optimizer = torch.optim.Adam(parameters, min(setting.adam / scale, 5e-3))
    else:
        stable = 1 / (curvature * sharpness.value(20))
        optimizer = torch.optim.SGD(parameters, stable, momentum=setting.momentum)

    def loss_of(rows: Any) -> Tensor:
        f = model(x[rows])
        return nn.functional.cross_entropy(f, labels[rows]) if entropy else (f - y[rows]).square().sum(1).mean()

    generator, group = torch.Generator().manual_seed(seed), optimizer.param_groups[0]
    test, first = slice(TRAIN, TRAIN + TEST), math.nan
    with contextlib.redirect_stderr(io.StringIO()), watch(
        model, probe=(x[probe], labels[probe] if entropy else y[probe]), out=path, budget=None,
        test=(x[test], labels[test] if entropy else y[test]), optimizer=optimizer, loss=setting.loss,
        quantities=["kernel", "layers", "weights", "test"],
    ) as watched:  # fmt: skip
        for step in range(setting.steps):
            rows = probe if not setting.batch else torch.randint(TRAIN, (setting.batch,), generator=generator)
            optimizer.zero_grad()
            loss = loss_of(rows)
            loss.backward()
            if sharpness is not None:
                stable = stable if step % 10 else 1 / (curvature * sharpness.value(2))
                group["lr"] = (1 - setting.momentum) * min(stable, stride(parameters))
            optimizer.step()
            watched.step(loss=loss)
            if step % 10 == 0:
                with torch.no_grad():
                    now = float(loss_of(probe))
                first = now if step == 0 else first
                if not now < 3 * first or now < 0.05 * first:
                    break


def stride(parameters: list[nn.Parameter]) -> float:
    """The learning rate at which a step changes the weights by STRIDE."""
    weight = sum(float(p.detach().square().sum()) for p in parameters)
    gradient = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
    return STRIDE * math.sqrt(weight / max(gradient, 1e-300))


class Job(NamedTuple):
    """One run of the grid."""

    name: str
    scale: float
    seed: int
    held_out: bool
    root: str | None

    @property
    def setting(self) -> Setting:
        return (HELD_OUT if self.held_out else CHOSEN)[self.name]


def row(job: Job) -> dict[str, Any]:
    """Train and diagnose one run: what the table keeps of it."""
    torch.set_num_threads(1)
    begun, kept = time.perf_counter(), {"setting": job.name, "scale": job.scale, "seed": job.seed}
    kept |= {"held_out": job.held_out, "by_construction": construction(job.scale)}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run")
            trained(path, job.setting, job.scale, job.seed, job.root)
            kept["training_seconds"] = round(time.perf_counter() - begun, 1)
            kept |= diagnosed(path)
    except Exception as error:  # one run that fails must not cost the others
        kept["failed"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    return {**kept, "seconds": round(time.perf_counter() - begun, 1)}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {LONGEST} s")


def diagnosed(path: Path) -> dict[str, Any]:
    """All numbers of a diagnosis."""
    from featlearn.diagnosis import diagnose
    from featlearn.record import open_run

    run = open_run(path)
    found = json.loads(diagnose(run).to_json())
    evidence = {f"{item['topic']}: {i}": item["value"] for i, item in enumerate(found["evidence"])}
    return {
        "steps": run.lines[-1]["step"], "numbers": found["numbers"], "times": found["times"], "silent": found["silent"],
        "kernel_machine": found["kernel_machine"], "specialization": found["specialization"],
        "feature_rate": found["feature_rate"], "evidence": evidence,
        "mechanisms": Counter(one["name"] for one in found["mechanism"].values()), "curves": curves(run),
    }  # fmt: skip


def curves(run: "Run") -> dict[str, list[float]]:
    """Loss, kernel and alignment through the run, in three digits."""
    from featlearn.diagnosis.findings import Findings
    from featlearn.metrics import kernel_distance

    reading = Findings(run).reading
    steps, loss = reading.kernel_steps, reading.loss
    aligned = reading.curve("ntk/centered_alignment")
    at = torch.tensor(steps, dtype=torch.float64)
    kernels = torch.stack([reading.kernel(step).double() for step in steps])
    found = {
        "step": at, "loss": loss.at(at) if loss else at * math.nan, "norm": kernels.norm(dim=(1, 2)),
        "moved": kernel_distance(kernels, kernels[0], centered=True), "moved_raw": kernel_distance(kernels, kernels[0]),
        "alignment": aligned.at(at) if aligned else at * math.nan,
    }  # fmt: skip
    return {name: [float(f"{value:.3g}") for value in values.tolist()] for name, values in found.items()}


def construction(scale: float) -> str:
    """The regime that an output scale makes."""
    return "lazy" if scale >= 10 else "rich" if scale <= 0.1 else "neither"


def grid(seeds: int, seeds_held_out: int, root: str | None, only: str | None) -> Iterator[Job]:
    """Seed by seed, so that what is done when time is up is spread evenly; other seeds for what is held out."""
    for i in range(max(seeds, seeds_held_out)):
        for held_out, settings, scales, count in ((False, CHOSEN, SCALES, seeds),
                                                  (True, HELD_OUT, SCALES_HELD_OUT, seeds_held_out)):  # fmt: skip
            # long ones first: nothing is worse than one that begins last
            for name, setting in sorted(settings.items(), key=lambda item: item[1].network != "cnn"):
                if i < count and (root or setting.data != "mnist") and (only is None or only in name):
                    for scale in scales:
                        yield Job(name, scale, (101 if held_out else 0) + i, held_out, root)


def computed(jobs: list[Job], table: Path, processes: int, minutes: float) -> None:
    """Train what the table does not have yet, until time is up."""
    begun = time.monotonic()
    have = {(line["setting"], line["scale"], line["seed"]) for line in rows(table)} if table.exists() else set()
    missing = [job for job in jobs if (job.name, job.scale, job.seed) not in have]
    table.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool, table.open("a") as out:
        futures = [pool.submit(row, job) for job in missing]
        try:
            for done, future in enumerate(as_completed(futures, timeout=60 * minutes), 1):
                line = future.result()
                out.write(json.dumps(line) + "\n")
                out.flush()
                told = [f"{done}/{len(missing)}", f"{time.monotonic() - begun:.0f} s", line["setting"], line["scale"],
                        line["seconds"], line.get("failed", "")]  # fmt: skip
                print(*told, file=sys.stderr, flush=True)
        except TimeoutError:
            print(f"{minutes} minutes are over; start again for the rest", file=sys.stderr)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):  # those in progress are not waited for
                process.terminate()


def rows(table: Path) -> list[dict[str, Any]]:
    """What a table holds; null is nan."""
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    for line in lines:
        line["numbers"] = {n: math.nan if v is None else v for n, v in line.get("numbers", {}).items()}
    return lines


def said(line: dict[str, Any]) -> str:
    """The regime by the present thresholds."""
    from featlearn.diagnosis.evidence import sample
    from featlearn.diagnosis.judgement import regime_of

    numbers = [line["numbers"].get(n, math.nan) for n in ("kernel_moved", "speedup", "alignment_rise", "loss_left")]
    return regime_of(*(sample([number]) for number in numbers))


def show(lines: list[dict[str, Any]]) -> None:
    """How numbers are spread, and what was said; for chosen and held-out runs."""
    lost = [line for line in lines if "failed" in line]
    for line in lost:
        print("failed:", line["setting"], line["scale"], line["seed"], line["failed"])
    for held_out in (False, True):
        some = [line for line in lines if line["held_out"] == held_out and "failed" not in line]
        print(f"\n{'held out' if held_out else 'chosen'}: {len(some)} runs")
        if some:
            show_spread(some)
            show_settings(some)
            show_confusion(some)


def show_spread(lines: list[dict[str, Any]]) -> None:
    """Quantiles of each number by output scale."""
    shares = (0.0, 0.1, 0.5, 0.9, 1.0)
    for name in ("kernel_moved", "kernel_moved_raw", "speedup", "speedup_rescaled", "alignment_rise", "loss_left"):
        print(f"\n{name + ': lowest, 10 %, 50 %, 90 %, highest':60}")
        for scale in sorted({line["scale"] for line in lines}):
            values = sorted(v for one in lines if one["scale"] == scale and math.isfinite(v := one["numbers"][name]))
            told = [f"{values[round(share * (len(values) - 1))]:10.3g}" for share in shares] if values else []
            print(f"{scale:8g} ({len(values):3d})", *told)


SHORT = {"cannot tell": "?"}
VERDICTS = ("lazy", "mixed", "rich", "cannot tell")


def show_settings(lines: list[dict[str, Any]]) -> None:
    """What was said of each setting at each output scale."""
    scales, width = sorted({line["scale"] for line in lines}), 34
    print("\n" + f"{'output scale':{width}}" + "".join(f"{scale:<16g}" for scale in scales).rstrip())
    for name in sorted({line["setting"] for line in lines}):
        cells = []
        for scale in scales:
            counted = Counter(said(line) for line in lines if (line["setting"], line["scale"]) == (name, scale))
            cells.append(" ".join(f"{counted[v]} {SHORT.get(v, v)}" for v in VERDICTS if counted[v]))
        print(f"{name:{width}}" + "".join(f"{cell:<16}" for cell in cells).rstrip())


def show_confusion(lines: list[dict[str, Any]]) -> None:
    """What was said against what was made."""
    print("\n" + f"{'by construction':24}" + "".join(f"{verdict:<13}" for verdict in VERDICTS).rstrip())
    for made, where in (("rich", "0.001 to 0.1"), ("neither", "0.3 to 3"), ("lazy", "10 and 100")):
        counted = Counter(said(line) for line in lines if line["by_construction"] == made)
        print(f"{made + f' ({where})':24}" + "".join(f"{counted[v]:<13}" for v in VERDICTS).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a file of one line of JSON for each run, added to")
    parser.add_argument("--from-table", action="store_true", help="train nothing")
    parser.add_argument("--data-root", help="the folder that holds mnist; without it MNIST is left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seeds-held-out", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", help="a part of the name of a setting")
    given = parser.parse_args()
    if not given.from_table:
        jobs = list(grid(given.seeds, given.seeds_held_out, given.data_root, given.only))
        computed(jobs, given.table, given.processes, given.minutes)
    show(rows(given.table))


if __name__ == "__main__":
    main()
