"""Watching a run of several ranks: rank 0 measures and writes, and training does not see it."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.monitoring.entry import watch
from featlearn.quantities.ntk import ntk
from featlearn.record import open_run

from .networks import inputs
from .ranks import on_ranks
from .sharded import plain, sharded

STEPS = 6


def run(model: nn.Module, folder: Path | None) -> list[Any]:
    """Losses and weights of a short training."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    x, y = inputs(7, 5), inputs(7, 3, seed=4)

    def loop(step: Any = None) -> list[float]:
        losses = []
        for number in range(STEPS):
            own = inputs(8, 5, seed=10 * number + dist.get_rank())
            loss = (model(own) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step is not None:
                step(loss=loss)
        return losses

    if folder is None:
        losses = loop()
    else:
        with watch(model, probe=(x, y), out=folder, every=2, budget=None, optimizer=optimizer) as seen:
            losses = loop(seen.step)
    return [losses, *(p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters())]


@on_ranks(2, 4)
def a_watched_run_of_sharded_ranks_is_that_of_plain_ones(rank: int, size: int) -> None:
    path = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(path)
    runs = {}
    for name, wrap in (("sharded", sharded), ("ddp", DistributedDataParallel)):
        folder = Path(path[0]) / name
        unwatched, watched = run(wrap(plain()), None), run(wrap(plain()), folder)
        assert watched[0] == unwatched[0]
        assert all(torch.equal(a, b) for a, b in zip(watched[1:], unwatched[1:], strict=True))
        dist.barrier()
        runs[name] = open_run(folder)
        assert runs[name].config["finished"]
        assert runs[name].config["measurements"] == 4
        assert not [event for event in runs[name].events if event["kind"] == "failed"], runs[name].events
    first = runs["sharded"].array("kernel", 0)["mean"]
    expected = ntk(plain(), inputs(7, 5))
    assert float((torch.from_numpy(first) - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    for name in ("ntk/alignment", "ntk/norm", "gap/network"):
        if name in runs["ddp"].names:
            values = [torch.from_numpy(one.scalar(name)[1]) for one in runs.values()]
            assert torch.allclose(values[0], values[1], rtol=1e-6, equal_nan=True), name
    assert {"ntk/alignment", "ntk/norm"} <= set(runs["sharded"].names) & set(runs["ddp"].names)
