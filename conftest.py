"""What every test needs before torch is imported."""

import os
from contextlib import suppress

if "PYTEST_XDIST_WORKER" in os.environ:
    # the workers share the cores; torch reads this once, when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

with suppress(ImportError):  # a machine without it can still run the other tests
    from hypothesis import settings

    # One set of examples everywhere: a suite that passed once passes again. Others: --hypothesis-profile=default
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With -n, give each file to one worker: what its tests share is made once, not once in every worker."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
