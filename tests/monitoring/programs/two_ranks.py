"""One of two ranks that train a network together: unwatched, watched by both, and watched by rank 0 alone.

Arguments: the rank, and a folder for what they leave.
"""

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.errors import FeatlearnError
from featlearn.monitoring.entry import watch

STEPS = 30
LIMIT = datetime.timedelta(seconds=40)
"""How long one rank waits for the other, in everything that it does."""


def train(rank: int, path: Path, watched: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    torch.manual_seed(rank + 1)
    losses = []

    def loop(step: Any = None) -> None:
        for _ in range(STEPS):
            inputs, targets = torch.randn(5, 4), torch.randint(2, (5,))
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            if step is not None:
                step(loss=loss)

    if watched == "both" or (watched == "rank 0" and rank == 0):
        # A budget, so that clocks decide: those of other ranks say something else.
        with watch(model, probe=(x, y), out=path / watched, every=1, budget=0.5 if rank == 0 else 1e-6) as seen:
            loop(seen.step)
    else:
        loop()
    state = {"losses": losses, "weights": inner.state_dict(), "random": torch.get_rng_state()}
    torch.save(state | {"optimizer": optimizer.state_dict()}, path / f"{watched} {rank}.pt")


def refused(rank: int, path: Path) -> None:
    model = nn.Embedding(3, 2, max_norm=1.0) if rank == 0 else nn.Embedding(3, 2)
    try:
        watch(model, probe=(torch.zeros(4, dtype=torch.long), None), out=path / "refused").__enter__()
    except FeatlearnError as error:
        (path / f"refusal {rank}").write_text(str(error))


def store(rank: int, path: Path) -> dist.TCPStore:
    """Rank 0 takes a free port and says which."""
    said = path / "port"
    if rank == 0:
        found = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=LIMIT, wait_for_workers=False)
        part = path / "port.part"
        part.write_text(str(found.port))
        os.replace(part, said)
        return found
    limit = time.monotonic() + LIMIT.total_seconds()
    while not said.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(said.read_text()), 2, timeout=LIMIT, wait_for_workers=False)


def main(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store(rank, path), rank=rank, world_size=2, timeout=LIMIT)
    try:
        for watched in ("nobody", "both", "rank 0"):
            train(rank, path, watched)
        refused(rank, path)
        dist.barrier()  # the store goes with rank 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
