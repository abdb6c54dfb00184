"""Parse and run commands, and print their results and errors."""

import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from inspect import BoundArguments
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

import featlearn
from featlearn.cli.answer import DONE, FAILED, INTERRUPTED, USAGE, Answer, UsageError, document
from featlearn.cli.user_errors import one_line_message
from featlearn.errors import FeatlearnError, did_you_mean

ABOUT = """Did the network learn features, or only fit with its initial kernel?

For example:

    featlearn diagnose
    featlearn diagnose --output-scale 30
    featlearn runs ls

Every command has --help and --json. Exit status: 0 done, 1 failed, 2 wrong
usage, 130 interrupted. FEATLEARN_DEBUG=1 or --debug shows where an error came
from, NO_COLOR=1 switches colors off."""

COMMANDS = {
    "diagnose": ("featlearn.cli.diagnose:diagnose", "Train a network, watch it, and diagnose it."),
    "report": ("featlearn.cli.report:report", "Write an HTML page about recorded runs."),
    "live": ("featlearn.cli.serve:live", "Serve a page that follows running trainings."),
    "sweep": ("featlearn.cli.sweep:sweep", "Diagnose at every point of a grid, in parallel."),
    "widths": ("featlearn.cli.widths:widths", "Check how a network scales with its width, layer by layer."),
    "explore": ("featlearn.cli.explore:explore", "Write an interactive page of the theories."),
    "cite": ("featlearn.cli.cite:cite", "Print what to cite for a result."),
    "doctor": ("featlearn.cli.doctor:doctor", "Check what is installed, and how to install the rest."),
}
COMMAND_GROUP = "featlearn.commands"
"""Entry points of other distributions that add commands; a distribution's summary describes its command."""
KNOWN_DISTRIBUTIONS = {"reproduce": ("featlearn-papers", "Repeat a figure of the five papers, and check its claims.")}
"""Command -> the distribution that adds it, and a summary shown if it is not installed."""
RUNS = {
    "ls": ("featlearn.cli.runs:ls", "List the runs in a folder."),
    "show": ("featlearn.cli.runs:show", "Show everything about a run."),
    "compare": ("featlearn.cli.runs:compare", "Compare key numbers of several runs."),
    "pack": ("featlearn.cli.runs:pack", "Pack a run into a .zip file."),
}


def application(words: Sequence[str]) -> App:
    """Build the commands, loaded on demand; `words` are the words of the command line."""
    app = App(
        name="featlearn",
        help=ABOUT,
        version=featlearn.__version__,
        help_format="plaintext",
        console=_console(),
        # a list takes all words up to the next option; flags have no --no- form
        default_parameter=Parameter(consume_multiple=True, negative=()),
    )
    runs = App(name="runs", help="Recorded runs: ls, show, compare, pack.", help_format="plaintext")
    for parent, commands in ((app, COMMANDS | _installed_commands()), (runs, RUNS)):
        for name, (location, summary) in commands.items():
            # The list of commands shows the summary; a command on the command line shows its docstring.
            parent.command(location, name=name, help=None if name in words else summary)
    app.command(runs)
    for name in KNOWN_DISTRIBUTIONS:
        if name not in app:
            app.command(_missing_command(name), name=name)
    return app


def _installed_commands() -> dict[str, tuple[str, str]]:
    """Return commands of other installed distributions: name -> (location, summary)."""
    return {
        entry.name: (entry.value, (entry.dist.metadata["Summary"] if entry.dist else None) or entry.value)
        for entry in entry_points(group=COMMAND_GROUP)
    }


def _missing_command(name: str) -> Callable[..., Answer]:
    """Return a command that says which distribution to install."""
    distribution, summary = KNOWN_DISTRIBUTIONS[name]

    def command(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> Answer:
        raise FeatlearnError(
            f"`featlearn {name}` is in the distribution {distribution}, which is not installed; in a clone of the "
            "repository: pip install -c constraints.txt ./papers"
        )

    command.__doc__ = f"{summary} Needs the distribution {distribution}."
    return command


def _console() -> Any:
    """Return the console of --help: None for the default, or a console without colors."""
    if not os.environ.get("NO_COLOR"):
        return None
    from rich.console import Console

    return Console(color_system=None)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process; return the exit status."""
    words = list(sys.argv[1:] if words is None else words)
    # closed streams are None, and print(file=None) would write errors to stdout
    sys.stdout, sys.stderr = (stream or StringIO() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr] # for terminals without ±
    try:
        try:
            code = _run_command(words)
        except KeyboardInterrupt:
            code = _report_error(words, "interrupted", INTERRUPTED)
        print(end="", flush=True)  # --help flushes only at exit, which is too late to report an error
        return code
    except BrokenPipeError:  # the reader has closed the pipe: `featlearn ... | head`
        _drop_output()
        return DONE
    except OSError as error:  # for example a full disk
        _drop_output()
        _print_error(f"the output cannot be written: {error.strerror or error}")
        return FAILED


def _run_command(words: list[str]) -> int:
    try:
        command, bound = parsed(words)
        prints = isinstance(getattr(command, "__self__", None), App)  # --help and --version
        answer: Answer | None = None if prints else command(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        return _report_error(words, f"{' '.join(str(error).split())} Try --help.", USAGE)
    except UsageError as error:
        return _report_error(words, str(error), USAGE)
    except BrokenPipeError:
        raise
    except FeatlearnError as error:
        return _report_error(words, str(error), FAILED)
    except OSError as error:  # without errno
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _report_error(words, message, FAILED)
    except Exception as error:  # unexpected errors
        return _report_error(words, one_line_message(error), FAILED)
    if answer is None:
        with suppress(SystemExit):  # raised by rich if the reader of --help has closed the pipe
            command(*bound.args, **bound.kwargs)
        return DONE
    print(document(answer.data) if "--json" in words else answer.text, flush=True)
    return answer.code


def parsed(words: list[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the function to call and its arguments; the command line overrides the file of --config."""
    app = application(words)
    command, bound, *_ = app.parse_args(words, print_error=False, exit_on_error=False)
    config = bound.arguments.get("config")
    if config is not None:
        app.config = (_from_file(Path(config), app[words[0]]),)
        command, bound, *_ = app.parse_args(words, print_error=False, exit_on_error=False)
    return command, bound


def _from_file(path: Path, command: App) -> Dict:
    """Read options of a TOML file, named as on the command line without --."""
    if not path.is_file():
        raise FeatlearnError(f"{path} does not exist, expected a TOML file with options for --config")
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from error
    options = command.assemble_argument_collection(parse_docstring=False)
    names = [name.removeprefix("--") for option in options for name in option.names if name.startswith("--")]
    for key in entries:
        if key.replace("_", "-") not in names or key == "config":
            raise UsageError(
                f"{path} has an unknown option {key!r}, expected options of --help{did_you_mean(key, names)}"
            )
    values = {key.replace("_", "-"): value for key, value in entries.items()}
    return Dict(values, source=str(path), use_commands_as_keys=False)


def _report_error(words: Sequence[str], message: str, code: int) -> int:
    if "--debug" in words or os.environ.get("FEATLEARN_DEBUG"):
        traceback.print_exc()
    else:
        _print_error(message)
    if "--json" in words:
        print(document({"error": message}), flush=True)
    return code


def _print_error(message: str) -> None:
    print(f"featlearn: {message}", file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discard buffered output, which Python would try to write again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
