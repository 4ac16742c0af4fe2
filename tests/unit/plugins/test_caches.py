"""What plugins keep between runs in one file, which many processes share."""

import subprocess
import sys

import pytest

from smalti.plugins.caches import CacheFile
from smalti.types import Cleared


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "smalti"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def kept(notes) -> CacheFile:
    return CacheFile("attic", report=notes.append)


def test_what_was_put_is_there_for_every_process(kept):
    kept.put("one", {"n": 1})
    kept.put("two", [2])
    other = CacheFile("attic")
    assert (other.get("one"), other.get("two"), other.get("three"), other.entries()) == ({"n": 1}, [2], None, 2)


def test_looking_makes_nothing(kept, home):
    assert (kept.get("one"), kept.entries(), kept.size(), kept.clear()) == (None, 0, 0, Cleared(count=0, bytes=0))
    assert not home.exists()


def test_processes_that_write_at_the_same_time_lose_nothing(kept):
    code = (
        "import sys\nfrom smalti.plugins import CacheFile\nfor n in range(25): CacheFile('attic').put(f'{sys.argv[1]}-{n}', n)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert kept.entries() == 75


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "entries": []}', '{"format": 99, "entries": {}}', "\x00"]
)
def test_a_broken_file_is_told_and_replaced(kept, notes, text):
    kept.put("one", 1)
    kept.path.write_text(text)
    assert (kept.get("one"), len(notes), "is damaged and will be replaced" in notes[0]) == (None, 1, True)
    kept.put("two", 2)
    assert (kept.get("two"), len(notes)) == (2, 1)


def test_a_folder_that_cannot_be_written_is_told_and_stops_nobody(kept, notes, home):
    home.parent.write_text("a file where the folder should be")
    kept.put("one", 1)
    assert (kept.get("one"), kept.entries()) == (None, 0)
    assert "not cached" in notes[0]


def test_clearing_takes_the_entries_and_tells_their_bytes(kept):
    kept.put("one", 1)
    size = kept.size()
    assert (kept.clear(), kept.entries(), kept.path.exists()) == (Cleared(count=1, bytes=size), 0, False)


def test_a_file_in_which_something_else_is_can_be_cleared(kept):
    kept.put("one", 1)
    kept.path.write_text("{")
    assert kept.clear() == Cleared(count=0, bytes=1)
