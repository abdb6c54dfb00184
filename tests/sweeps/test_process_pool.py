"""Jobs in processes: one thread each, and a worker that is killed costs its own job only."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from featlearn.errors import InputValueError, WorkerKilledError, WorkerStartError
from featlearn.sweeps.process_pool import THREADS, ProcessPool, Serial, available_cores


def killed(path: str, times: int) -> int:
    """Kill the own process until it was begun more than `times` times."""
    with open(path, "a") as file:
        file.write("begun\n")
    begun = Path(path).read_text().count("begun")
    if begun <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return begun


def slow_square(number: int) -> tuple[int, int]:
    time.sleep(0.3)
    return number**2, os.getpid()


def environment() -> list[str | None]:
    return [os.environ.get(name) for name in THREADS]


def broken() -> None:
    raise LookupError("no such thing")


def sleep_long(path: str) -> None:
    Path(path).touch()
    time.sleep(120)


def test_jobs_run_in_other_processes_of_one_thread(monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    with ProcessPool(2) as pool:
        squares = [pool.submit(slow_square, n) for n in range(4)]
        threads = pool.submit(environment)
        assert [future.result()[0] for future in squares] == [0, 1, 4, 9]
        assert threads.result() == ["1"] * len(THREADS)
    assert len({future.result()[1] for future in squares} - {os.getpid()}) == 2
    assert environment() == [None] * len(THREADS)


def test_an_error_is_that_of_the_job():
    with ProcessPool(1) as pool:
        with pytest.raises(LookupError, match="no such thing"):
            pool.submit(broken).result()
        assert pool.submit(slow_square, 3).result()[0] == 9


def test_a_killed_worker_costs_its_own_job_and_no_other(tmp_path):
    """The job is begun twice, and jobs beside it go on where they are."""
    with ProcessPool(2) as pool:
        beside = [pool.submit(slow_square, n) for n in range(3)]
        once = pool.submit(killed, str(tmp_path / "once"), 1)
        twice = pool.submit(killed, str(tmp_path / "twice"), 2)
        assert once.result() == 2
        with pytest.raises(WorkerKilledError, match="killed 2 times, perhaps out of memory"):
            twice.result()
        assert [future.result()[0] for future in beside] == [0, 1, 4]
        assert pool.submit(slow_square, 5).result()[0] == 25
    assert (tmp_path / "twice").read_text().count("begun") == 2


def test_after_an_error_jobs_under_way_end_and_others_are_dropped():
    pool = ProcessPool(1)
    futures = [pool.submit(slow_square, n) for n in range(9)]
    futures[0].result()
    with pytest.raises(ZeroDivisionError), pool:
        raise ZeroDivisionError
    assert futures[0].result()[0] == 0
    assert futures[-1].cancelled()
    assert sum(not future.cancelled() for future in futures) <= 3


def test_an_interrupt_ends_the_workers_at_once(tmp_path):
    begun, pool = time.monotonic(), ProcessPool(1)
    future = pool.submit(sleep_long, str(tmp_path / "begun"))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 60
    assert isinstance(wait([future]).done.pop().exception(), WorkerKilledError)


def test_a_script_that_starts_workers_as_it_is_imported_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import math\nfrom featlearn.sweeps.process_pool import ProcessPool\n"
        "with ProcessPool(1) as pool:\n    pool.submit(math.sqrt, 4).result()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    own, _, parents = done.stderr.partition("WorkerStartError: a worker process tried")
    assert "WorkerStartError" in parents
    assert done.stderr.count("if __name__ == '__main__':") >= 2
    assert own


def test_a_worker_does_not_start_another_pool_while_it_is_imported(monkeypatch):
    from multiprocessing import current_process

    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    with pytest.raises(WorkerStartError, match="every worker imports the script"):
        ProcessPool(1)


def test_there_is_at_least_one_worker():
    with pytest.raises(InputValueError, match="workers=0"):
        ProcessPool(0)
    with ProcessPool() as pool:
        assert pool.workers == available_cores() >= 1


def test_serial_jobs_run_here_when_they_are_asked_for():
    seen = []
    jobs = [Serial().submit(seen.append, n) for n in range(3)]
    assert seen == []
    for job in jobs[:2]:
        job.result()
    assert seen == [0, 1]


PARENT = """
import os, time
from featlearn.sweeps.process_pool import ProcessPool
if __name__ == "__main__":
    pool = ProcessPool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    os.kill(worker, 0)
    process.kill()
    process.wait()
    process.stdout.close()
    until = time.monotonic() + 10
    while runs_still(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs_still(worker)


def runs_still(pid: int) -> bool:
    """Whether a process is there, and more than an entry that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
