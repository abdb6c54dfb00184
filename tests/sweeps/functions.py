"""Functions to sweep, at the top of a module, for worker processes to import."""

import os
import signal
import time
from pathlib import Path


def begun(folder: Path, name: str) -> int:
    """Note that something began; returns how often it has."""
    with (folder / name).open("a") as file:
        file.write("begun\n")
    return (folder / name).read_text().count("begun")


def product(a, b=1, seed=0):
    return {"product": a * b + 0.1 * seed, "word": "large" if a * b > 6 else "small"}


def alone(x):
    return x**2


def counted(a, b, seed, notes):
    begun(Path(notes), f"{a}-{b}-{seed}")
    return a + b + seed


def slow(a, b, seed, notes, pause):
    """Leaves a line when it begins, and takes its time."""
    begun(Path(notes), f"{a}-{b}-{seed}")
    time.sleep(pause)
    return {"sum": a + b + seed}


def picky(a, seed):
    if a % 3 == 0:
        raise ZeroDivisionError(f"{a} is a multiple of three\nand this is not the first line")
    if a == 7:
        raise SystemExit(3)
    return float(a)


def slowly_picky(a, seed):
    time.sleep(0.1)
    return picky(a, seed)


def killed(a, times, notes):
    """Kills its own process the first `times` times where a is odd."""
    if begun(Path(notes), str(a)) <= times and a % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return a


def waits_once(a, notes):
    """Writes its process id and waits for a minute, the first time, as a long job that is preempted."""
    if begun(Path(notes), str(a)) == 1:
        (Path(notes) / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    return a


def recorded(gamma, width, seed, out):
    """A run written by hand; richer for larger gamma."""
    from tests.reporting.runs import by_hand  # loads torch, which takes workers a second

    gap = gamma / (1 + gamma)
    left = [1.0, 0.6, 0.1, 0.01]
    return by_hand(
        Path(out),
        {
            "probe/loss": left,
            "gap/probe": [0.0, gap / 2, gap, gap],
            "ntk/norm": [1.0, 1.0, 1.0 + gamma, 1.0 + gamma],
            "ntk/centered_distance": [0.0, 0.1 * gap, gap, gap],
            "weights/0/norm": [1.0, 1.0, 1.0, float(width + seed)],
            "loss": left,
        },
        [0, 1, 10, 100],
        settings={"gamma": gamma, "width": width, "seed": seed},
    )


def left_over(a, out):
    """Fails where a folder is not empty; the first attempt leaves something and is killed."""
    out = Path(out)
    there = [one.name for one in out.iterdir()]
    (out / "left").touch()
    if not (out.parent.parent.parent / "again").exists():
        (out.parent.parent.parent / "again").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"there": len(there)}


def gone_on(a, out, resume):
    """As `left_over`, and goes on with what is there."""
    return {**left_over(a, out), "resumed": resume}
