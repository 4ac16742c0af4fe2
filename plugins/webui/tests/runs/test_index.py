"""Runs are found by their run.json, cheaply, and not through links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from smalti.errors import ExitCode
from smalti.rundir import RunDirectory, RunWriter, acquire
from smalti_webui.runs.index import RunIndex


def begin(path: Path) -> RunWriter:
    return acquire(RunDirectory(path))


def make(path: Path, steps: int = 0) -> None:
    with begin(path) as writer:
        for step in range(1, steps + 1):
            writer.events.append("step", step=step, max_steps=steps, loss=1.0 / step, samples=1)
        writer.end(steps, "finished", "done", ExitCode.DONE)


def looked(index: RunIndex) -> list[str]:
    index._looked = -10.0
    return sorted(run.path.name for run in index.runs())


def test_runs_appear_and_disappear(tmp_path: Path) -> None:
    make(tmp_path / "a" / "first")
    index = RunIndex([tmp_path])
    assert looked(index) == ["first"]
    make(tmp_path / "a" / "deeper" / "second", steps=2)
    make(tmp_path / "third")
    assert looked(index) == ["first", "second", "third"]
    shutil.rmtree(tmp_path / "third")
    assert looked(index) == ["first", "second"]


def test_folders_without_news_are_not_read_again(tmp_path: Path) -> None:
    for number in range(5):
        make(tmp_path / f"group-{number}" / "run")
    for path in [*tmp_path.rglob("*"), tmp_path]:
        if path.is_dir():
            os.utime(path, (1, 1))
    index = RunIndex([tmp_path])
    assert len(looked(index)) == 5
    read = index.folders_read
    assert len(looked(index)) == 5
    assert index.folders_read == read
    make(tmp_path / "group-0" / "other")
    assert len(looked(index)) == 6
    assert index.folders_read <= read + 2


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    make(outside / "foreign")
    make(root / "own")
    make(root / "leaves")
    (root / "link").symlink_to(outside)
    (root / "leaves" / "events.jsonl").unlink()
    (root / "leaves" / "events.jsonl").symlink_to(outside / "foreign" / "events.jsonl")
    assert looked(RunIndex([root])) == ["own"]


def test_a_copy_has_another_id(tmp_path: Path) -> None:
    make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    index = RunIndex([tmp_path])
    runs = {run.id: run.path.name for run in index.runs()}
    assert sorted(runs.values()) == ["a", "b"]
    assert len(runs) == 2
    assert all(index.find(run_id).path.name == name for run_id, name in runs.items())  # type: ignore[union-attr]
    assert index.find("unknown") is None


def test_damaged_and_foreign_records_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "good")
    for name, text in {"damaged": '{"kind": "smal', "foreign": '{"kind": "other"}', "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert looked(RunIndex([tmp_path])) == ["good"]


def test_the_summary_follows_the_run(tmp_path: Path) -> None:
    index = RunIndex([tmp_path])
    with begin(tmp_path / "run") as writer:
        writer.events.append("step", step=1, max_steps=4, loss=2.0, samples=1)
        (run,) = index.runs()
        found = index.summary(run)
        assert found is not None
        assert (found.status.condition, found.step, found.loss) == ("running", 1, 2.0)
        writer.events.append("step", step=2, max_steps=4, loss=1.0, samples=1)
        writer.end(2, "stopped", "on request", ExitCode.STOPPED)
    found = index.summary(run)
    assert found is not None
    assert (found.status.condition, found.step) == ("stopped", 2)
    assert index.summary(run) is found
