"""Runs on disk: written line by line while training goes on, read back without running anything they hold.

A run is a directory (or one `.zip` of it):

    run.json                    what was run: configuration, versions, seed, device, probe, schema
    scalars.jsonl               one line for each measurement: step, seconds, numbers by name
    arrays/<name>/<step>.npz    kernels, spectra, matrices; the step in twelve digits
    events.jsonl                what happened: measurements skipped, a diverged kernel, the end

A killed process loses at most the measurement in progress (writer.py says how). Nothing is pickled, and opening a run
that is not trusted is safe: it is read, or refused with a `RunError` (files.py, arrays.py). An older layout is read
through its upgrade (schema.py). Nothing here imports torch.
"""

from featlearn.record.reader import Run, open_run
from featlearn.record.writer import RunWriter

__all__ = ["Run", "RunWriter", "open_run"]
