"""Tangent kernels side by side with every peer: time, memory, ratio, equality.

    python benchmarks/kernels.py                      every workload and method on the CPU, one thread
    python benchmarks/kernels.py --workloads W3 W4 --methods featlearn torch_func --repeats 3
    python benchmarks/kernels.py --small              a few samples in float64: equality alone
    python benchmarks/kernels.py --device cuda        this library and torch.func on a GPU

Each measurement is a fresh process; repeats of all methods are interleaved, and the best of them counts. Time is CPU
time of one thread, memory the peak resident size above what the process held before (on a GPU: events, and the
allocator's peak).
Peers that are not installed are left out, with a word: `--python` names an interpreter that has them beside this
library, `--jax-python` one with neural-tangents.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
TORCH = ("featlearn", "torch_func", "nngeometry", "backpack", "curvlinops", "torchjd", "plain_hooks")
JAX = {"neural_tangents_1": 1, "neural_tangents_3": 3}
METHODS = (*TORCH, *JAX)
LOOSE = {"nngeometry": 1e-5}
"""Tolerances of peers that keep fewer digits than float64 has: nngeometry 0.4 on convolutions."""


@dataclass
class Result:
    """What one method did on one workload."""

    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    version: str = ""
    scaled: bool = False
    kernel: Any = None
    failure: str = ""


def main() -> int:
    """Measure, print, and fail if a kernel differs."""
    options = _options()
    workloads = _workloads(options)
    print(f"torch {version('torch')}, numpy {numpy.__version__}, python {sys.version.split()[0]}")
    equal = True
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in workloads:
            results = _measured(name, options, Path(folder))
            versions |= {method: result.version for method, result in results.items() if result.version}
            equal &= _printed(name, results, options)
    print("\nversions: " + "; ".join(dict.fromkeys(versions.values())))
    return 0 if equal else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=None, help="such as W1-each, W3, R18-one; all by default")
    parser.add_argument("--methods", nargs="+", default=None, choices=METHODS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of wall time after which a method is ended")
    parser.add_argument("--small", action="store_true", help="a few samples in float64; equality alone")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--autotuned", action="store_true", help="on a GPU: torch.backends.cudnn.benchmark, for every method"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the peers that use torch")
    parser.add_argument("--jax-python", default=None, help="an interpreter with neural-tangents")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}, expected at least 1")
    for interpreter in filter(None, (options.python, options.jax_python)):
        if shutil.which(interpreter) is None:
            parser.error(f"{interpreter} is no interpreter")
    if options.device == "cuda" and not _has_cuda():
        parser.error("--device cuda, but torch sees no GPU here")
    if options.methods is None:
        options.methods = list(METHODS) if options.device == "cpu" else ["featlearn", "torch_func", "plain_hooks"]
    return options


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _workloads(options: argparse.Namespace) -> list[str]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.workloads import WORKLOADS

    known = [name for name, one in WORKLOADS.items() if (one.samples if options.device == "cpu" else one.cuda)]
    unknown = [name for name in options.workloads or () if name not in known]
    if unknown:
        raise SystemExit(f"unknown workloads {', '.join(unknown)}; there are {', '.join(known)}")
    return options.workloads or known


def _measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Result]:
    """Every method, repeats interleaved."""
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[name]
    samples = 7 if options.small else workload.samples if options.device == "cpu" else workload.cuda
    dtype = "float64" if options.small else "float32"
    results = {method: Result() for method in options.methods}
    # On a GPU repeats happen inside the process: events time them well, and starting up takes longer than they do.
    repeats = 1 if options.small or options.device == "cuda" else options.repeats
    given = folder / "given.npz"
    if any(method in JAX for method in options.methods):
        _write_given(name, samples, dtype, given)
    for _ in range(repeats):
        for method, result in results.items():
            if result.failure or (result.seconds and result.seconds[0] > options.limit / 4):
                continue  # once is enough for the slow ones
            _one(method, name, samples, dtype, result, options, folder, given)
    return results


def _write_given(name: str, samples: int, dtype: str, path: Path) -> None:
    import torch

    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[name]
    network = workload.network(getattr(torch, dtype))
    weights = {key: p.detach().numpy() for key, p in network.named_parameters()}
    numpy.savez(path, x=workload.probe(samples, getattr(torch, dtype)).numpy(), **weights)


def _one(
    method: str,
    name: str,
    samples: int,
    dtype: str,
    result: Result,
    options: argparse.Namespace,
    folder: Path,
    given: Path,
) -> None:
    from benchmarks.workloads import WORKLOADS

    out = folder / f"{method}.npy"
    if method in JAX:
        if options.jax_python is None:
            result.failure = "not run: --jax-python names no interpreter"
            return
        script = str(ROOT / "benchmarks" / "peers" / "neural_tangents.py")
        command = [
            options.jax_python,
            script,
            name,
            WORKLOADS[name].mode,
            str(given),
            str(out),
            "--implementation",
            str(JAX[method]),
        ]
    else:
        command = [
            options.python,
            "-m",
            "benchmarks.peers.child",
            method,
            name,
            str(out),
            "--samples",
            str(samples),
            "--dtype",
            dtype,
            "--device",
            options.device,
            *(["--autotuned"] if options.autotuned else []),
        ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
    }
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=options.limit, check=False
        )
    except subprocess.TimeoutExpired:
        result.failure = f"over {options.limit:.0f} s"
        return
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        missing = [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))]
        last = "killed (memory)" if done.returncode < 0 else lines[-1] if lines else "failed"
        result.failure = f"not installed ({missing[-1]})" if missing else f"fails: {last[:90]}"
        return
    line = json.loads(done.stdout.splitlines()[-1])
    result.seconds.append(line["seconds"])
    result.bytes.append(line["bytes"])
    result.version, result.scaled = line["version"], bool(line.get("scaled"))
    result.kernel = numpy.load(out)


def _printed(name: str, results: dict[str, Result], options: argparse.Namespace) -> bool:
    """Print one workload; whether all kernels agree."""
    ours = results.get("featlearn")
    reference = ours.kernel if ours is not None else None
    equal = True
    print(f"\n{name}", flush=True)
    for method, result in results.items():
        if result.failure:
            print(f"  {method:<18} {result.failure}")
            equal &= method != "featlearn"
            continue
        seconds = min(result.seconds)
        scaled = "~" if result.scaled else " "
        line = f"  {method:<18}"
        if not options.small:  # seven samples say nothing of speed
            line += f" {seconds * 1e3:>10.1f} ms{scaled} {min(result.bytes) / 2**20:>8.0f} MiB"
            if ours is not None and ours.seconds:
                line += f"  {seconds / min(ours.seconds):>7.2f}x"
        if reference is not None:
            whole = reference[:, : result.kernel.shape[1]] if result.scaled else reference
            tolerance = LOOSE.get(method, 1e-9) if options.small else 2e-4
            error = float(abs(result.kernel - whole).max() / abs(reference).max())
            equal &= error <= tolerance
            line += f"  {'equal' if error <= tolerance else 'DIFFERS'} ({error:.0e})"
        print(line, flush=True)
    return bool(equal)


if __name__ == "__main__":
    sys.exit(main())
