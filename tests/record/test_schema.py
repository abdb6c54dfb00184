"""Which schemas are read."""

import json
from pathlib import Path

import pytest

from featlearn.errors import RunError
from featlearn.record import RunWriter, open_run


@pytest.mark.parametrize("number", [0, -1, "1", 1.0, True, None, [1], 10**30])
def test_what_is_no_schema_is_refused(tmp_path: Path, number: object):
    (tmp_path / "run.json").write_text(json.dumps({"schema": number}))
    with pytest.raises(RunError, match="schema"):
        open_run(tmp_path)


def test_a_newer_schema_is_refused_also_for_going_on(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"schema": 99}')
    for attempt in (lambda: open_run(tmp_path), lambda: RunWriter(tmp_path, {}, resume=True)):
        with pytest.raises(RunError, match=r"schema 99.*update"):
            attempt()
