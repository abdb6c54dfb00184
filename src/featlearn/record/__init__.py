"""Runs on disk: written line by line during training, and read without executing any content.

A run is a directory (or a `.zip` of it):

    run.json                    what was run: configuration, versions, seed, device, probe, schema
    scalars.jsonl               a line per measurement: step, seconds, numbers by name
    arrays/<name>/<step>.npz    kernels, spectra, matrices; the step in twelve digits
    events.jsonl                what happened: measurements skipped, a diverged kernel, the end

A killed process loses at most the measurement in progress (see writer.py). Nothing is pickled, and opening an untrusted
run is safe: it is read, or raises `RunError` (files.py, arrays.py). This package does not import torch.
"""

from featlearn.record.reader import Run, open_run
from featlearn.record.writer import RunWriter

__all__ = ["Run", "RunWriter", "open_run"]
