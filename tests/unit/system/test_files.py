import hashlib
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from smalti.checkpoint.format.manifest import FileRecord
from smalti.checkpoint.format.verification import matches, write_with_digest
from smalti.system.files import (
    atomic_write,
    load_json,
    load_toml,
    open_regular,
    parse_bytes,
    parse_json,
    read_regular,
    write_json_atomically,
)


def test_an_atomic_write_replaces_the_whole_file_and_leaves_no_draft(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old and longer")
    atomic_write(path, b"new")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.json", b"new")]


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            atomic_write(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.json", b"old")]


def test_a_new_file_has_the_permissions_that_the_user_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_json_is_readable_and_ends_with_a_newline(tmp_path):
    write_json_atomically(tmp_path / "a.json", {"ä": [1]})
    assert (tmp_path / "a.json").read_text() == '{\n  "ä": [\n    1\n  ]\n}\n'


def test_what_is_no_json_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomically(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_recorded_with_the_digest_of_its_contents_in_pieces_of_any_size(tmp_path):
    data = os.urandom(9_000_000)
    record = write_with_digest(tmp_path / "a", [data[:5_000_000], b"", data[5_000_000:]])
    assert record == FileRecord(size=len(data), digest=blake3(data).hexdigest(), algorithm="blake3")
    assert matches(tmp_path / "a", record)
    assert not matches(tmp_path / "a", replace(record, digest=blake3(data[:-1]).hexdigest()))


def test_files_recorded_with_sha256_can_still_be_compared(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    record = FileRecord(size=3, digest=hashlib.sha256(b"abc").hexdigest(), algorithm="sha256")
    assert matches(tmp_path / "a", record)
    (tmp_path / "a").write_bytes(b"abd")
    assert not matches(tmp_path / "a", record)


def test_sound_json_is_parsed():
    assert parse_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("10GB", 10**10), ("5GiB", 5 * 2**30), ("1.5 tib", 3 * 2**39), ("100G", 100 * 2**30)],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 B", "1,5GB", "10XB", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; give one such as"):
        parse_bytes(text)


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path):
    (tmp_path / "file").write_bytes(b"data")
    os.mkfifo(tmp_path / "pipe")
    with open_regular(tmp_path / "file") as file:
        assert file.read(2) == b"da"
    assert read_regular(tmp_path / "file") == b"data"
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_text_that_is_nested_too_deeply_is_a_value_error():
    assert (load_json(b'{"a": [1]}'), load_toml("a = [1]")) == ({"a": [1]}, {"a": [1]})
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_toml("a = " + "[" * 100_000)
