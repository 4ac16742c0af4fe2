"""How long a rank waits for the directory of a save that the main rank has made on another node."""

import json
import threading

from smalti.rundir import visible_seconds, wait_for_directory


def measured(run, seconds) -> None:
    (run / "nodes").mkdir()
    (run / "nodes" / "preflight.json").write_text(json.dumps({"measured": {"visible_seconds": seconds}}))


def test_a_directory_that_is_seen_late_is_waited_for_as_long_as_was_measured(tmp_path):
    measured(tmp_path, 0.05)
    threading.Timer(0.3, (tmp_path / "late").mkdir).start()
    assert wait_for_directory(tmp_path / "late", tmp_path)


def test_without_a_measurement_a_missing_directory_is_missing_at_once(tmp_path):
    assert not wait_for_directory(tmp_path / "missing", tmp_path)
    measured(tmp_path, None)
    assert visible_seconds(tmp_path) == 0


def test_slow_storage_is_waited_for_longer_but_not_for_ever(tmp_path):
    measured(tmp_path, 0.01)
    assert visible_seconds(tmp_path) < 5
    (tmp_path / "nodes" / "preflight.json").write_text(json.dumps({"measured": {"visible_seconds": 60}}))
    assert visible_seconds(tmp_path) == 90
