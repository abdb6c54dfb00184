"""Commands that read recorded runs, and those that read nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import featlearn as fl
from featlearn.cli.app import main
from featlearn.record import RunWriter


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_ls_has_a_line_for_each_run(recorded: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(recorded, "two")
    fl.open_run("two/seed-0").pack("packed.zip")
    Path("damaged").mkdir()
    Path("damaged/run.json").write_text("{" + "\033" * 200)
    assert main(["runs", "ls", "."]) == 0
    said = capsys.readouterr().out.splitlines()
    lines, unread = said[:5], said[5:]  # the head and four runs; why one cannot be read
    assert re.split(r" {2,}", lines[0]) == ["run", "date", "steps", "verdict", "probe loss", "kernel moved"]
    assert {line.split()[0] for line in lines[1:]} == {"two/seed-0", "two/seed-1", "packed.zip", "damaged"}
    assert any(re.search(r"two/seed-0 +\d{4}-\d\d-\d\d \d\d:\d\d +12 ", line) for line in lines)
    assert any("damaged" in line and "cannot be read" in line for line in lines)
    assert unread[0].startswith("damaged cannot be read: ")
    assert max(map(len, said)) <= 100
    assert all(line.isprintable() for line in said)


def test_ls_in_json_has_the_numbers_of_the_runs(recorded: Path, capsys: pytest.CaptureFixture[str]):
    found = {entry["name"]: entry for entry in answer(["runs", "ls", str(recorded)], capsys)["runs"]}
    run = fl.open_run(recorded / "seed-1")
    assert found["seed-1"]["numbers"]["probe squared error"] == run.scalar("probe/loss")[1][-1]
    assert found["seed-1"]["numbers"]["kernel moved"] == run.scalar("ntk/centered_distance")[1][-1]
    assert found["seed-1"]["regime"] == fl.diagnose(run).regime


def test_a_report_names_the_folder_that_is_not_there(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(recorded / "seed-0"), "--out", "no/such/a.html"]) == 1
    said = "the report cannot be written to no/such/a.html: there is no folder no/such; make it first"
    assert capsys.readouterr().err == f"featlearn: {said}\n"


def test_an_empty_folder_has_no_runs(capsys: pytest.CaptureFixture[str]):
    assert main(["runs", "ls", "."]) == 0
    assert capsys.readouterr().out == "no runs in ., up to two levels deep\n"
    assert main(["runs", "ls"]) == 1
    assert "runs is not a folder, expected a folder of runs: featlearn runs ls FOLDER" in capsys.readouterr().err


def test_events_are_told_in_words(capsys: pytest.CaptureFixture[str]):
    writer = RunWriter("told", {"name": "told"})
    writer.scalars(0, {"probe/loss": 1.0})
    writer.event("finished", 7, complete=True, last_line=7, wall_share=0.84853701, measuring=1.25)
    writer.event("failed", 3, what="features", message="a " * 80 + "\033[31m")
    writer.close()
    assert main(["runs", "show", "told"]) == 0
    said = capsys.readouterr().out
    events = said[said.index("events:") :]
    assert "finished at step 7: complete: yes; share of the wall time: 0.849; seconds of measuring: 1.25" in events
    assert "last_line" not in events
    assert "failed at step 3: what: features; message: a a " in events
    assert "\033" not in events
    assert max(map(len, events.splitlines())) <= 100


def test_show_says_all(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", "show", str(recorded / "seed-0")]) == 0
    said = capsys.readouterr().out
    for part in ("mlp on digits, output scale 0.03: 12 steps of SGD", "regime:", "thresholds:", "events:", "finished"):
        assert part in said
    found = answer(["runs", "show", str(recorded / "seed-0")], capsys)
    assert found["config"]["settings"]["width"] == 8
    assert found["diagnosis"] == json.loads(fl.diagnose(recorded / "seed-0").to_json())


def watched(path: str, rate: float, **settings: object) -> None:
    """A run of `fl.watch`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with fl.watch(
        model, (x, x[:, :1]), out=path, optimizer=optimizer, loss="mean", budget=None, settings=settings
    ) as run:
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss.detach())


@pytest.mark.filterwarnings("ignore:fl.watch")
def test_runs_of_watch_are_told_by_what_they_recorded(capsys: pytest.CaptureFixture[str]):
    watched("sound", 0.05, a=1, output_scale="large")
    watched("broken", 1e3, a=2)
    capsys.readouterr()
    assert main(["runs", "show", "sound"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert re.fullmatch(r"sound, recorded \d{4}-\d\d-\d\d \d\d:\d\d, seed 0", second)
    assert first == "Sequential, 21 parameters: 30 steps of SGD, learning rate 0.05"  # 3 * 4 + 4 + 4 + 1
    assert main(["runs", "ls", "."]) == 0
    marked = {line.split()[0]: "diverged" in line for line in capsys.readouterr().out.splitlines()[1:]}
    assert marked == {"sound": False, "broken": True}
    assert main(["runs", "compare", "sound", "broken"]) == 0
    said = capsys.readouterr().out
    names = [line[: line.index("  ")] for line in said.splitlines()[1:]]
    assert len(names) == len(set(names))
    assert {"kernel turned", "kernel grew", "a", "broke down", "output_scale"} <= {*names}
    assert "--a" not in said
    assert "nan" not in said
    assert "linearization gap" in names


def fitted(name: str, loss: str | None, numbers: dict[str, float]) -> str:
    """A run that recorded these numbers at two steps."""
    writer = RunWriter(name, {"name": name, "loss_convention": loss})
    for step in (0, 5):
        writer.scalars(step, numbers)
    writer.close()
    return name


def test_ls_marks_losses_that_are_no_squared_errors(capsys: pytest.CaptureFixture[str]):
    fitted("squares", "mean", {"probe/loss": 0.25, "probe/cross_entropy": 0.7})
    fitted("entropy", "cross-entropy", {"probe/loss": 4.5, "probe/cross_entropy": 0.125})
    assert main(["runs", "ls", "."]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 0.25 " in lines["squares"]
    assert " 0.125 ce " in lines["entropy"]
    assert lines["ce:"] == "ce: cross-entropy; others are squared errors"
    assert "tr:" not in lines


def test_show_says_how_many_samples_of_the_probe_were_measured(capsys: pytest.CaptureFixture[str]):
    writer = RunWriter("thin", {"probe": {"samples": 130, "measured": 33}})
    writer.scalars(7, {"probe/loss": 1.0})
    writer.close()
    assert main(["runs", "show", "thin"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "a network: 7 steps, measured on 33 of 130 probe samples"


def test_pack_writes_one_file_that_reads_the_same(recorded: Path, capsys: pytest.CaptureFixture[str]):
    found = answer(["runs", "pack", str(recorded / "seed-0"), "--out", "a.zip"], capsys)
    assert found["packed"] == "a.zip"
    assert found["bytes"] == Path("a.zip").stat().st_size
    assert fl.open_run("a.zip").lines == fl.open_run(recorded / "seed-0").lines
    assert main(["runs", "pack", str(recorded / "seed-0"), "--out", "a.zip"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_report_writes_a_page_and_figures(recorded: Path, capsys: pytest.CaptureFixture[str]):
    runs = [str(recorded / f"seed-{seed}") for seed in (0, 1)]
    found = answer(["report", *runs, "--out", "both.html", "--no-kernels", "--title", "Two seeds"], capsys)
    assert found["report"] == "both.html"
    assert "Two seeds" in Path("both.html").read_text(encoding="utf-8")
    assert found["figures"] == []


def test_cite_gives_each_entry_once(capsys: pytest.CaptureFixture[str]):
    assert main(["cite", "002", "metrics.alignment", "002", "--style", "text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines))
    assert fl.citation("002", style="text") in lines
    assert main(["cite"]) == 0
    assert capsys.readouterr().out.strip() == fl.citation().strip()
