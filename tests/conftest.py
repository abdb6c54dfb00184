"""What every test needs before torch is imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # the workers share the cores; torch reads this once, when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
