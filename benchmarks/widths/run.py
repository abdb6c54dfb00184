"""Check networks whose parametrization is known, and print what `fl.width_check` says of each.

    python -m benchmarks.widths.run calibration|development|held-out [--only TEXT] [--seeds 3] [--widths 64 128 256 512]

A line per case: the scheme by construction, what was said, the planted layer and sign, the problems that were named,
and seconds. At the end the counts. Status 1 where a scheme is missed, or fewer than nine of ten errors are located.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import featlearn as fl
from benchmarks.widths.cases import SUITES, Case
from benchmarks.widths.networks import batch, made
from featlearn.widths import WidthCheck

WIDTHS = {"mlp": (64, 128, 256, 512), "cnn": (32, 64, 128, 256), "gpt": (32, 64, 128, 256)}


def checked(case: Case, seeds: int = 3, widths: Sequence[int] | None = None) -> WidthCheck:
    """What the check says of a case."""
    data = batch(case.network, case.seed)
    return fl.width_check(partial(_made, case), data, widths=widths or WIDTHS[case.network], seeds=seeds)


def _made(case: Case, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    for _ in range(case.seed):  # other weights than those of the calibration
        torch.rand(1)
    return made(case.network, case.setting, width)


def located(case: Case, found: WidthCheck) -> bool:
    """Whether exactly the planted layer is named, with the planted sign; none where none was planted."""
    if case.layer is None:
        return not found.problems
    wanted = case.layer.removesuffix(".attention").removesuffix(".bias")
    return bool(found.problems) and all(
        one.layer == wanted and (float(one.power) > 0) == (case.sign > 0) for one in found.problems
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", help="by default up to 512 for perceptrons, 256 else")
    options = parser.parse_args()
    cases = [case for case in SUITES[options.suite] if options.only in case.name]
    right = {"scheme": 0, "clean": 0, "located": 0}
    plain, planted = [case for case in cases if case.layer is None], [case for case in cases if case.layer is not None]
    for case in cases:
        begun = time.perf_counter()
        found = checked(case, options.seeds, options.widths)
        seconds = time.perf_counter() - begun
        told = "; ".join(f"{one.layer} {one.quantity} {float(one.power):+.2f}" for one in found.problems) or "-"
        good, place = found.scheme == case.scheme.split()[0], located(case, found)
        right["scheme"] += good and case.layer is None
        right["clean" if case.layer is None else "located"] += place
        aim = "" if case.layer is None else f" [{case.layer} {case.sign:+d}]"
        mark = "ok  " if place and (good or case.layer) else "MISS"
        print(f"{mark} {case.name + aim:72} {found.scheme:11}{found.phase!s:21} {told}  ({seconds:.0f} s)", flush=True)
    print(
        f"scheme told: {right['scheme']} of {len(plain)}; without false alarm: {right['clean']} of {len(plain)}; "
        f"errors located to the layer and the sign: {right['located']} of {len(planted)}"
    )
    return 0 if right["scheme"] == len(plain) and right["located"] >= 0.9 * len(planted) else 1


if __name__ == "__main__":
    sys.exit(main())
