"""A run directory where there are files already: of others, of a newer version, damaged, or no folder at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smalti.errors import UserError
from smalti.rundir.directory import RunDirectory
from smalti.rundir.writer import acquire, prepare


def test_a_run_may_live_beside_the_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with acquire(RunDirectory(tmp_path)):
        assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["run.json", "config.toml", "events.jsonl", "control/work.json"])
def test_a_file_of_others_with_the_name_of_a_run_file_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": true}')
    with pytest.raises(UserError, match="is not a run directory, and a run would overwrite"):
        prepare(RunDirectory(tmp_path))
    assert (tmp_path / name).read_text() == '{"mine": true}'


def test_a_damaged_record_is_reported_and_kept(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        prepare(RunDirectory(tmp_path))
    assert (tmp_path / "run.json").read_text() == "{"


def test_a_record_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    prepare(RunDirectory(tmp_path))
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "schema": 99}))
    with pytest.raises(UserError, match="update smalti"):
        prepare(RunDirectory(tmp_path))


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        prepare(RunDirectory(tmp_path / "file"))
