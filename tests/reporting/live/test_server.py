"""Attacks on the server: who is answered, what is served, and what no run can do to it."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from featlearn.errors import FeatlearnError, InputValueError, RunError
from featlearn.record import RunWriter
from featlearn.reporting.live import server as serving
from featlearn.reporting.live.feed import MOST_PAGES, REPORT_PERIOD
from tests.reporting.live.serving import TOKEN, Page, answer, raw, served

SECRET = "the-secret-of-another-user"


def begun(path: Path, lines: int = 3, **config: object) -> RunWriter:
    writer = RunWriter(path, {"name": path.name, **config})
    for step in range(lines):
        writer.scalars(step, {"loss": 1.0 / (1 + step)}, seconds=0.5 * step)
    return writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    begun(found / "a")
    (found.parent / "secret.txt").write_text(SECRET)
    return found


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with served(folder) as found:
        yield found


def test_the_page_is_served_to_who_has_the_token(port: int):
    status, body, headers = answer(port)
    assert status == 200
    assert "featlearn live" in body
    assert "connect-src 'self'" in body
    assert "default-src 'none'" in body
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert TOKEN not in body
    assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/events",
        "/?token=",
        "/?token=t",
        f"/?token={TOKEN}x",
        f"/events?token={TOKEN[1:]}",
        f"/?Token={TOKEN}",
        "/?token=%F0%9F%98%80",
        "/?" + "&".join(["a=1"] * 99),
    ],
)
def test_nobody_else_is_answered(port: int, path: str):
    status, body, _ = answer(port, path)
    assert status == 403
    assert "featlearn live" not in body


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "0.0.0.0",
        "127.0.0.1@evil.example",
        "",
        "[::1]x",
        "127.0.0.1:99999999",
    ],
)
def test_other_hosts_are_refused(port: int, host: str):
    assert answer(port, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8300", "127.0.0.1:9", "localhost", "[::1]:77"])
def test_a_tunnel_has_another_port(port: int, host: str):
    assert answer(port, Host=host)[0] == 200
    assert answer(port, Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost:8300", "http://localhost:8301", ""]
)
def test_other_origins_are_refused(port: int, origin: str):
    assert answer(port, Host="localhost:8300", Origin=origin)[0] == 403


def test_two_hosts_are_refused(port: int):
    found = raw(port, f"GET /?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
    assert found.split(b" ")[1] in (b"400", b"403")


@pytest.mark.parametrize(
    "path",
    [
        "/a/run.json",
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/....//secret.txt",
        "/etc/passwd",
        "//etc/passwd",
        "/static/live.js",
        "/a/../../secret.txt",
    ],
)
def test_no_path_leads_to_a_file(port: int, path: str):
    found = raw(port, f"GET {path}?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert found.startswith(b"HTTP/1.1 404")
    assert SECRET.encode() not in found


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(port: int, method: str):
    assert answer(port, method=method)[0] == 405


@pytest.mark.parametrize(
    "request_", [b"\x00" * 300, b"GET / HTTP/9.9\r\n\r\n", b"GET /?" + b"a" * 70000, b"\r\n" * 1000 + b"x y z\r\n\r\n"]
)
def test_what_is_no_request_does_not_end_it(port: int, request_: bytes):
    try:
        found = raw(port, request_)
    except ConnectionResetError:
        found = b""
    assert SECRET.encode() not in found
    assert answer(port)[0] == 200


def test_it_listens_on_this_machine_only():
    with serving.open_socket() as opened:
        assert opened.getsockname()[0] == "127.0.0.1"
        with pytest.raises(FeatlearnError, match="cannot be used"):
            serving.open_socket(opened.getsockname()[1])
    with pytest.raises(InputValueError, match="65535"):
        serving.open_socket(70000)


def test_the_token_differs_and_stands_in_the_address():
    token = serving.new_token()
    assert len(token) >= 43
    assert token != serving.new_token()
    with serving.open_socket() as opened:
        assert serving.page_address(opened, token) == f"http://127.0.0.1:{opened.getsockname()[1]}/?token={token}"


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(FeatlearnError, match=r"pip install 'featlearn\[live\]'"):
        serving.make_server(tmp_path, TOKEN)


def test_what_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="expected the folder of a run"):
        serving.make_server(tmp_path / "file", TOKEN)


def test_half_open_connections_do_not_lock_the_owner_out(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "HEADER_PERIOD", 1.0)
    with served(folder) as port, contextlib.ExitStack() as stack:
        page = stack.enter_context(Page(port))  # its stream is a whole request, and stays
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        for line in lines[::2]:
            line.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert answer(port)[0] == 503
        time.sleep(3.0)
        assert answer(port)[0] == 200
        begun(folder / "later")
        page.until(lambda latest: len(latest["runs"]) == 2)


def _link(run: Path, outside: Path) -> None:
    begun(outside / "other")
    (run / "scalars.jsonl").unlink()
    (run / "scalars.jsonl").symlink_to(outside / "other" / "scalars.jsonl")


def _linked_config(run: Path, outside: Path) -> None:
    begun(outside / "other", secret=SECRET)
    (run / "run.json").unlink()
    (run / "run.json").symlink_to(outside / "other" / "run.json")


def _bad_line(run: Path, outside: Path) -> None:
    with (run / "scalars.jsonl").open("a") as file:
        file.write('{"step": "<img src=x>"}\n')


def _deep(run: Path, outside: Path) -> None:
    (run / "run.json").write_text("[" * 100000)


def _large(run: Path, outside: Path) -> None:
    os.truncate(run / "scalars.jsonl", 2**40)


def _long_line(run: Path, outside: Path) -> None:
    (run / "scalars.jsonl").write_bytes(b"1" * (3 * 2**20))


def _pipe(run: Path, outside: Path) -> None:
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")


def _newer(run: Path, outside: Path) -> None:
    (run / "run.json").write_text('{"schema": 99}')


def _array(run: Path, outside: Path) -> None:
    (run / "arrays" / "kernel").mkdir(parents=True)
    (run / "arrays" / "kernel" / f"{1:012d}.npz").write_bytes(b"PK no archive")


def _overflow(run: Path, outside: Path) -> None:
    (run / "scalars.jsonl").write_text('{"step": 1, "values": {"loss": 1' + "0" * 400 + "}}\n")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_link, "is a link"),
        (_linked_config, "is a link"),
        (_bad_line, "expected"),
        (_deep, "damaged"),
        (_large, "at most"),
        (_long_line, "has a line of more"),
        (_pipe, "has no run.json"),
        (_newer, "schema 99"),
        (_array, "damaged"),
        (_overflow, "too large"),
    ],
)
def test_a_hostile_run_shows_an_error_and_the_server_lives(tmp_path: Path, harm, said: str):
    run = tmp_path / "runs" / "a"
    begun(run)
    with served(run) as port, Page(port) as page:
        page.until(lambda known: known["runs"])
        harm(run, tmp_path / "outside")
        known = page.until(lambda known: said in "".join(known["errors"]))
        assert SECRET not in json.dumps(known)
        assert answer(port)[0] == 200


def test_links_out_of_the_folder_are_no_runs(tmp_path: Path):
    begun(tmp_path / "outside" / "other")
    begun(tmp_path / "runs" / "inside")
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "outside" / "other")
    (tmp_path / "runs" / "deep").symlink_to(tmp_path / "outside")
    with served(tmp_path / "runs") as port, Page(port) as page:
        known = page.until(lambda known: known["html"])
        assert [run["name"] for run in known["runs"]] == ["inside"]
        assert known["left_out"] == 0


def test_other_runs_are_reported_beside_a_damaged_one(tmp_path: Path):
    begun(tmp_path / "bad")
    begun(tmp_path / "good")
    _bad_line(tmp_path / "bad", tmp_path)
    with served(tmp_path) as port, Page(port) as page:
        known = page.until(lambda known: known["html"] and known["errors"])
        assert "good" in known["html"]
        assert "bad" in known["errors"][0]


def test_a_finished_run_is_reported_at_once(tmp_path: Path):
    writer = begun(tmp_path / "a")
    with served(tmp_path / "a") as port, Page(port) as page:
        page.until(lambda known: known["html"])
        writer.scalars(999, {"loss": 0.1})
        writer.describe(finished=True)
        written = time.monotonic()
        known = page.until(lambda known: "999" in known["html"])
        assert time.monotonic() - written < REPORT_PERIOD - 1
        assert known["runs"][0]["finished"]


def test_pages_are_limited(tmp_path: Path):
    begun(tmp_path / "a")
    with served(tmp_path / "a") as port:
        pages = [Page(port) for _ in range(MOST_PAGES)]
        for page in pages:
            page.message()
        assert answer(port, f"/events?token={TOKEN}")[0] == 503
        assert answer(port)[0] == 200
        for page in pages:
            page.__exit__()


def _held() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc")
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_reconnects_leak_nothing(tmp_path: Path, count: int):
    begun(tmp_path / "a")
    with served(tmp_path / "a") as port:
        with Page(port) as page:
            page.until(lambda known: known["html"])  # all threads have begun
        time.sleep(0.5)
        before = _held()
        for _ in range(count):
            with Page(port) as page:
                page.message()
        end = time.monotonic() + 10
        while any(now > then for now, then in zip(_held(), before, strict=True)) and time.monotonic() < end:
            time.sleep(0.1)
        threads, files = _held()
        assert threads <= before[0]
        assert files <= before[1]
        with Page(port) as page:  # none of the pages before takes a place
            assert page.message()[1]["runs"]


def _lags(run: Path, lines: int, updates: int) -> list[float]:
    """Seconds from writing each of `updates` steps to the message that shows it, after `lines` earlier ones."""
    writer = begun(run, 0)
    with (run / "scalars.jsonl").open("w") as file:
        for step in range(lines):
            values = {"loss": 1 / (1 + step), "accuracy": step / lines, "ntk/norm": 1.0 + step}
            file.write(json.dumps({"step": step, "seconds": step / 10, "values": values}) + "\n")
    lags = []
    with served(run) as port, Page(port) as page:
        page.until(lambda known: known["runs"])
        for step in range(lines, lines + updates):
            writer.scalars(step, {"loss": 0.5})
            written = time.monotonic()
            page.until(lambda known, step=step: any(f"step {step}," in line["facts"] for line in known["runs"]))
            lags.append(time.monotonic() - written)
    return lags


@pytest.mark.parametrize("lines", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_a_step_arrives_within_a_second(tmp_path: Path, lines: int):
    assert max(_lags(tmp_path / "a", lines, 10)) < 1.0
