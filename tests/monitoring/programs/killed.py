"""A watched run that is killed again and again, and goes on each time; says how many measurements it had finished.

Arguments: where to record it, how many kills, a seed. This process itself computes nothing: a copy of one that has
worked with several threads may wait for them for ever.
"""

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

from featlearn.monitoring.entry import watch
from featlearn.record import open_run

SAMPLES = 8


def train(path: Path, pipe: int) -> None:
    """Goes on with the run, and says after each step that it was made."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 2
    with watch(model, probe=(x, y), out=path, every=1, budget=None, resume=True, optimizer=optimizer) as seen:
        os.write(pipe, b"%d\n" % seen.steps)
        while seen.steps < 10**6:
            loss = model(torch.randn(10, 4)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.step(loss=loss)
            os.write(pipe, b"%d\n" % seen.steps)


def checked(path: Path, finished: set[int]) -> int:
    """Everything that was finished is there, whole, and at most one measurement more; returns the last step."""
    run = open_run(path)
    steps = [line["step"] for line in run.lines]
    assert steps == list(range(len(steps))), steps
    last = max(finished, default=-1)
    assert len(steps) - 1 in (last, last + 1), (len(steps) - 1, last)
    for line in run.lines:
        step, values = line["step"], line["values"]
        assert {"ntk/norm", "features/0/uncentered", "weights/distance", "probe/loss"} <= values.keys(), values
        kernel = run.array("kernel", step)["mean"]
        assert kernel.shape == (SAMPLES, SAMPLES)
        assert abs(float(numpy.linalg.norm(kernel.astype(float))) / values["ntk/norm"] - 1) < 1e-5
        assert run.array("outputs", step)["f"].shape == (SAMPLES, 2)
    if steps:
        assert {"mean", "each"} <= run.array("kernel", 0).keys()
        assert run.array("initial", 0)
    assert set(steps) <= set(run.arrays.get("kernel", [])) <= {*steps, len(steps)}
    assert [event["kind"] for event in run.events if event["kind"] not in ("started", "resumed")] == []
    return len(steps) - 1


def killed(path: Path, delay: float, words: int) -> set[int]:
    """One process, killed so many seconds after so many words; the steps that it finished."""
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            train(path, pipe)
        finally:
            os._exit(1)
    os.close(pipe)
    said, limit = b"", time.monotonic() + 30
    try:
        while said.count(b"\n") < words:
            if not select.select([reader], [], [], limit - time.monotonic())[0]:
                raise SystemExit(f"a run that goes on said {said!r} within 30 s")
            said += os.read(reader, 1000)
        time.sleep(delay)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    with open(reader, "rb") as rest:
        return set(map(int, (said + rest.read()).split()))


def main(path: Path, kills: int, seed: int) -> None:
    chance, finished = random.Random(seed), set[int]()
    for kill in range(kills):
        # every third while it begins, or goes on; others in the middle of it
        finished |= killed(path, chance.uniform(0.0, 0.2), 3 if kill % 3 else 0)
        if (path / "run.json").exists():
            last = checked(path, finished)
            finished |= set(range(last + 1))
    print(len(finished))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
