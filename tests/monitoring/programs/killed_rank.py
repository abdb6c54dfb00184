"""One of two ranks that train and measure together, until one of them is killed in the middle of a measurement.

Arguments: the rank, the rank that is killed, and a folder for what they leave.
"""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.monitoring import shared_measurement
from featlearn.monitoring.entry import watch
from featlearn.monitoring.shared_measurement import SharedMeasurement

LIMIT = datetime.timedelta(seconds=60)
"""How long one rank waits for the other: longer than the test does."""


def train(path: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    with watch(model, probe=(x, y), out=path / "run", every=1, budget=None) as seen:
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.step(loss=loss)


def main(rank: int, victim: int, path: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(path / "store"), 2)  # as under torchrun, it does not go with a rank
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    shared_measurement.LEAST_SHARE, shared_measurement.WORTHWHILE = 1, 0.0
    perform, asked = SharedMeasurement._perform, [0]

    def perform_or_die(self: SharedMeasurement, act: str, arguments: tuple[Any, ...]) -> Any:
        asked[0] += act == "kernels"
        if asked[0] == 2:
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            (path / "died").write_text(str(time.time()))
        return perform(self, act, arguments)

    SharedMeasurement._perform = perform_or_die  # type: ignore[method-assign]
    try:
        train(path)
    except RuntimeError as error:
        seconds = time.time() - float((path / "died").read_text())
        (path / "survived.json").write_text(json.dumps({"error": str(error), "seconds": seconds}))
        sys.stderr.flush()
        os._exit(0)  # threads of gloo that have lost their peer may abort while the interpreter is taken down


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
