"""Commands, options, exit statuses and errors."""

import contextlib
import importlib
import json
import os
import pty
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from featlearn.cli.answer import Answer, document, table
from featlearn.cli.app import COMMANDS, RUNS, main, parsed
from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training import show_warnings

EVERY = [[name] for name in COMMANDS] + [["runs", name] for name in RUNS]

# refuses torch, and says on stderr how much processor time there was
GUARDED = """
import resource, sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "matplotlib", "scipy", "sklearn"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Guard())
from featlearn.cli.app import main
try:
    code = main(sys.argv[1:])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("words", [[], ["diagnose"]], ids=["featlearn", "diagnose"])
def test_help_takes_less_than_half_a_second_and_imports_nothing_heavy(words: list[str]):
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, *words, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "For example:" in done.stdout
    assert float(done.stderr.split()[-1]) < 0.5


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"featlearn {' '.join(words)}" in said.split("For example:")[1]
    assert "--json" in said
    assert "--debug" in said


@pytest.mark.parametrize("table_of", [COMMANDS, RUNS])
def test_every_command_is_there(table_of: dict[str, tuple[str, str]]):
    for place, _ in table_of.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_version(capsys: pytest.CaptureFixture[str]):
    import featlearn

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == featlearn.__version__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnos"], 'Did you mean "diagnose"'),
        (["runs", "compre"], 'Did you mean "compare"'),
        (["diagnose", "--widht", "3"], "Did you mean --width"),
        (["diagnose", "--optimizer", "adma"], 'Did you mean "adam"?'),
        (["diagnose", "--data", "mnits"], "did you mean 'mnist'?"),
        (["diagnose", "--width", "wide"], "--width"),
        (["diagnose", "--width"], "--width requires an argument"),
        (["diagnose", "a:b", "c:d"], "c:d"),
        (["diagnose", "--width", "0", "--lr", "-1"], "--width 0, expected at least 1; --lr -1.0"),
        (["diagnose", "--budget", "2"], "--budget 2.0, expected a fraction"),
        (["diagnose", "--seeds", "0"], "--seeds 0"),
        (["diagnose", "nonsense"], "expected module:function"),
        (["diagnose", "a:b", "--width", "3"], "--width is passed with a:b"),
        (["cite", "--style", "bibtx"], 'Did you mean "bibtex"?'),
        (["cite", "theory.off"], "did you mean 'theory.ofe'?"),
        (["reproduce", "004/tabel1"], "did you mean 004/table1?"),
        (["reproduce", "004/fig1", "--device", "cdua", "--dry-run"], "did you mean 'cuda'?"),
        (["diagnose", "--device", "cdua"], "did you mean 'cuda'?"),
        (["diagnose", "--device", "abacus"], "--device abacus does not exist"),
        (["diagnose", "--depth", "0"], "--depth 0, expected at least 1"),
        (["report"], "no run is passed"),
        (["runs", "compare", "a"], "expected at least two"),
    ],
)
def test_wrong_usage_is_told_without_a_traceback(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert err.lower().count("did you mean") <= 1


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "ls", "nowhere"],
        ["report", "nowhere"],
        ["runs", "show", "nowhere"],
        ["runs", "pack", "nowhere"],
        ["diagnose", "no_such_module:setup"],
        ["diagnose", "no_such_file.py:setup"],
        ["diagnose", "--data", "nowhere.npz"],
        ["diagnose", "--data", "mnist", "--data-root", "nowhere"],
        ["diagnose", "--samples", "100000"],
        ["diagnose", "--device", "cuda:99"],
        ["diagnose", "--config", "nowhere.toml"],
    ],
    ids=" ".join,
)
def test_what_fails_is_told_without_a_traceback(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == f"featlearn: {json.loads(out)['error']}\n"
    assert "Errno" not in err


@pytest.mark.parametrize("root", [None, "nowhere", "."], ids=["unsaid", "no folder", "no files"])
def test_missing_data_files_are_asked_for_by_the_names_of_the_command_line(
    root: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)
    assert main(["diagnose", "--data", "mnist", *([] if root is None else ["--data-root", root])]) == 1
    said = capsys.readouterr().err
    assert "--data-root" in said
    assert "root=" not in said


def test_the_lines_of_help_are_filled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["reproduce", "--help"]) == 0
    about = capsys.readouterr().out.split("For example:")[0].split("\n\n")[2]
    lines = about.splitlines()
    assert max(map(len, lines)) <= 80
    assert min(map(len, lines[:-1])) > 70


@pytest.mark.parametrize("by", ["option", "environment"])
def test_debug_shows_the_traceback(by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    if by == "environment":
        monkeypatch.setenv("FEATLEARN_DEBUG", "1")
    assert main(["runs", "show", "nowhere", *(["--debug"] if by == "option" else [])]) == 1
    assert "Traceback" in capsys.readouterr().err


def settings_of(words: list[str]) -> TrainingSettings:
    found = parsed(["diagnose", *words])[1].arguments["settings"]
    assert isinstance(found, TrainingSettings)
    return found


def test_options_reach_the_settings_they_name():
    found = settings_of(["--depth", "3", "--lr", "0.5", "--whiten", "--loss", "cross-entropy", "--batch=7"])
    assert found == TrainingSettings(hidden_layers=3, lr=0.5, whiten=True, loss="cross-entropy", batch=7)
    assert settings_of(["--learning-rate", "0.5", "--batch-size", "7"]) == TrainingSettings(lr=0.5, batch=7)


def test_a_config_file_gives_options_and_the_command_line_wins():
    Path("a.toml").write_text('lr = 0.5\noutput-scale = 2\nhidden_layers = 3\nmodel = "cnn"\nwhiten = true\n')
    found = settings_of(["--config", "a.toml", "--lr", "0.25"])
    assert found == TrainingSettings(lr=0.25, output_scale=2.0, hidden_layers=3, model="cnn", whiten=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("otput-scale = 2", "did you mean 'output-scale'?"),
        ("learningrate = 2", "did you mean 'learning-rate'?"),
        ('config = "b.toml"', "'config'"),
        ("lr = ", "not a TOML file"),
        ('lr = "fast"', "fast"),
        ('model = "cn"', 'Did you mean "cnn"?'),
    ],
)
def test_a_wrong_config_file_is_wrong_usage(content: str, said: str, capsys: pytest.CaptureFixture[str]):
    Path("a.toml").write_text(content)
    assert main(["diagnose", "--config", "a.toml"]) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*args: object, **options: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("featlearn.citations.citation", interrupted)
    assert main(["cite", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "interrupted"}
    assert err == "featlearn: interrupted\n"


def test_a_fault_of_ours_is_a_line_and_a_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def faulty(*args: object, **options: object) -> str:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("featlearn.citations.citation", faulty)
    assert main(["cite", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == f"featlearn: {json.loads(out)['error']}\n"
    assert err.startswith("featlearn: ZeroDivisionError: first line (")
    assert "--debug" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [["cite"], ["--help"]], ids=["answer", "help"])
def test_an_answer_that_cannot_be_written_is_a_failure(words: list[str]):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "featlearn", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "the output cannot be written" in done.stderr


def test_closed_streams_are_no_error_and_errors_do_not_go_to_stdout():
    command = f"{shlex.quote(sys.executable)} -m featlearn cite"
    closed = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
    wrong = subprocess.run(["sh", "-c", f"{command} nothing.such 2>&-"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_makes_help_plain_on_a_terminal(no_color: bool):
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_color else {})}
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-m", "featlearn", "runs", "--help"], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # Linux says EIO at the end
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    assert b"compare" in said
    assert (b"\x1b[" in said) != no_color


def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "featlearn", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_document_has_no_nan_and_paths_are_text():
    found = json.loads(document({"a": [float("nan"), 1.5], "b": Path("x"), 3: None}))
    assert found == {"a": [None, 1.5], "b": "x", "3": None}


def test_a_table_aligns_its_columns():
    assert table(["run", "loss"], [["a", "10"], ["long", "2"]]) == "run   loss\na       10\nlong     2"


def test_an_answer_gives_the_exit_status(monkeypatch: pytest.MonkeyPatch):
    answer = Answer(data=None, text="", code=1)
    monkeypatch.setattr(
        "featlearn.cli.app.parsed", lambda words: (lambda: answer, type("B", (), {"args": (), "kwargs": {}}))
    )
    assert main(["any"]) == 1


def test_warnings_are_shown_but_for_what_torch_deprecates_in_itself(capsys: pytest.CaptureFixture[str]):
    with show_warnings(quiet=False):
        warnings.warn_explicit("old", DeprecationWarning, "_script.py", 1, module="torch.jit._script")
        warnings.warn_explicit("yours", DeprecationWarning, "train.py", 1, module="train")
        warnings.warn_explicit("slow", UserWarning, "optimizer.py", 1, module="torch.optim")
    assert capsys.readouterr().err == "featlearn: yours\nfeatlearn: slow\n"
