"""`featlearn widths`: how a user's network scales with its size."""

import logging
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Literal

from featlearn.cli.answer import DONE, FAILED, Answer, UsageError
from featlearn.cli.user_errors import reporting_user_errors


def widths(
    subject: str,
    /,
    *,
    sizes: tuple[int, ...] = (64, 128, 256, 512),
    along: Literal["width", "depth", "rank", "heads", "experts"] = "width",
    steps: int = 10,
    seeds: int = 3,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    lr: float | None = None,
    transfer: bool = False,
    plot: Path | None = None,
    page: Path | None = None,
    quiet: bool = False,
    json: bool = False,
    debug: bool = False,
) -> Answer:
    """Train your network at several sizes for a few steps, and find parameters that scale wrongly.

    It fits powers of the size for every use of a parameter, and reports the parametrization (standard, NTK,
    mean-field, muP), whether the network learns features at infinite width, and which parameter deviates by which
    power, with a change to paste. If there are problems, the exit status is 1.

    For example:

        featlearn widths train.py:setup
        featlearn widths train.py:setup --optimizer adam --lr 0.001
        featlearn widths train.py:setup --sizes 32 64 128 --plot widths.png
        featlearn widths train.py:setup --along depth --sizes 2 4 8 16

    The function setup takes a size and returns (model, (x, y), loss), or a mapping
    with model, data and perhaps loss and optimizer, a torch.optim.Optimizer on the
    model. Or it takes nothing and returns (make_model, (x, y), loss), or a mapping
    with make_model, data and perhaps loss and optimizer, a function of the model.

    Args:
        subject: module:function or path.py:function.
        sizes: Increasing widths, or what --along says.
        along: What the size is.
        steps: Training steps per size.
        seeds: Number of networks per size.
        optimizer: Optimizer, if setup returns none.
        lr: Learning rate at all sizes; by default 0.01, or 0.001 for adam.
        transfer: Find the best learning rate at each size by short runs.
        plot: Draw a panel per layer into this file, .png or .pdf.
        page: Write problems, text to paste, panels and numbers into this HTML file.
        quiet: No progress on stderr.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        numbers = " ".join(map(str, sizes))
        raise UsageError(f"--sizes {numbers}, expected at least two increasing numbers, such as 64 128 256")
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise UsageError(f"{name} {value}, expected at least 1")
    if lr is not None and not lr > 0:
        raise UsageError(f"--lr {lr}, expected a number > 0")
    if plot is not None and plot.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--plot {plot}, expected a name that ends in .png, .pdf or .svg")
    start = time.perf_counter()

    def progress(done: int, count: int) -> None:
        if not quiet:
            seconds = time.perf_counter() - start
            print(
                f"networks={done}/{count} {along}={sizes[(done - 1) // seeds]} seconds={seconds:.1f}", file=sys.stderr
            )

    with reporting_user_errors(subject), redirect_stdout(sys.stderr):
        from featlearn.cli.width_task import width_task  # torch takes a second to load
        from featlearn.widths.check import scale_check

        task = width_task(subject, sizes[0], optimizer, lr)
        log, handler = logging.getLogger("featlearn"), logging.StreamHandler(sys.stderr)  # the cost estimate
        if transfer and not quiet:
            log.addHandler(handler)
            log.setLevel(logging.INFO)
        check = scale_check(
            task.make_model,
            task.data,
            sizes=sizes,
            along=along,
            optimizer=task.optimizer,
            steps=steps,
            seeds=seeds,
            loss=task.loss,
            transfer=transfer,
            progress=progress,
        )
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    text = str(check)
    if plot is not None:
        import matplotlib

        matplotlib.use("agg")
        check.plot().savefig(plot)
        text += f"\npicture: {plot}"
    if page is not None:
        import matplotlib

        from featlearn.reporting.width_page import width_page

        matplotlib.use("agg")
        text += f"\npage: {width_page(check, page, title=subject)}"
    data = {**check.entries, "picture": plot, "page": page}
    return Answer(data=data, text=text, code=FAILED if check.problems else DONE)
