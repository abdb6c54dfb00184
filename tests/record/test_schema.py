"""Which schemas are read, and how an older one would be."""

import json
from pathlib import Path

import numpy
import pytest

from featlearn.errors import RunError
from featlearn.record import RunWriter, open_run, schema
from featlearn.record.files import Files


class _Renamed:
    """A run of schema 1 as schema 2 might have it: `loss` is called `train/loss`, arrays K are called kernel."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def names(self) -> list[str]:
        return [name.replace("arrays/K/", "arrays/kernel/") for name in self._files.names()]

    def weight(self, place: str) -> int | None:
        return self._files.weight(place.replace("arrays/kernel/", "arrays/K/"))

    def read(self, place: str, most: int) -> bytes | None:
        content = self._files.read(place.replace("arrays/kernel/", "arrays/K/"), most)
        if content is None or place.startswith("arrays/"):
            return content
        return content.replace(b'"loss"', b'"train/loss"').replace(b'"schema": 1', b'"schema": 2')


def test_every_older_schema_has_its_upgrade():
    assert set(schema.UPGRADES) == set(range(1, schema.SCHEMA))


def test_an_older_run_is_read_through_its_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunWriter(tmp_path / "a", {})
    run.scalars(3, {"loss": 0.5})
    run.array("K", 3, x=numpy.eye(2))
    packed = open_run(tmp_path / "a").pack()

    monkeypatch.setattr(schema, "SCHEMA", 2)
    monkeypatch.setattr(schema, "UPGRADES", {1: _Renamed})
    for path in (tmp_path / "a", packed):
        found = open_run(path)
        assert (found.schema, found.config["schema"], found.names) == (1, 2, ["train/loss"])
        assert found.array("kernel", 3)["x"].tolist() == [[1, 0], [0, 1]]
    # packing writes it as it is read
    anew = open_run(open_run(tmp_path / "a").pack(tmp_path / "new.zip"))
    assert (anew.schema, anew.names, anew.arrays) == (2, ["train/loss"], {"kernel": [3]})
    with pytest.raises(RunError, match="start a new run"):
        RunWriter(tmp_path / "a", {}, resume=True)
    RunWriter(tmp_path / "b", {})
    assert open_run(tmp_path / "b").schema == 2


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
