"""Text files of captions: what is written, what is refused, and what can be undone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smalti import UserError
from smalti_webui.places.datasets.captions import CaptionEditor, ChangedMeanwhileError, read_caption


@pytest.fixture
def editor(tmp_path: Path) -> CaptionEditor:
    return CaptionEditor(tmp_path / "kept")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a cat\n", b"a dog\nin two lines\n"),
        (b"a cat", b"a dog\nin two lines"),
        (b"a cat\r\non a mat\r\n", b"a dog\r\nin two lines\r\n"),
        (b"\xef\xbb\xbfa cat", b"\xef\xbb\xbfa dog\nin two lines"),
    ],
)
def test_a_saved_caption_keeps_the_form_of_its_file(editor: CaptionEditor, tmp_path: Path, before: bytes, after: bytes) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(before)

    editor.save(file, "a dog\r\nin two lines\n", read_caption(file).version)

    assert file.read_bytes() == after


def test_a_change_is_undone_to_the_byte_and_once_only(editor: CaptionEditor, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfa cat \r\n\r\n")
    file.chmod(0o640)
    first = editor.save(file, "one", read_caption(file).version)
    editor.save(file, "two", first.version)

    assert file.stat().st_mode & 0o777 == 0o640
    assert editor.undo(file).text == "one"
    editor.undo(file)
    assert file.read_bytes() == b"\xef\xbb\xbfa cat \r\n\r\n"
    with pytest.raises(UserError, match=r"no change of a\.txt"):
        editor.undo(file)


def test_the_texts_that_are_kept_are_closed_to_others(editor: CaptionEditor, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a cat")
    (tmp_path / "kept").mkdir(mode=0o755)  # as older versions made it
    editor.save(file, "one", read_caption(file).version)
    (kept,) = (tmp_path / "kept").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (kept.parent, kept)] == [0o700, 0o600]


def test_a_file_that_has_changed_meanwhile_is_not_overwritten(editor: CaptionEditor, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a cat\n")
    shown = read_caption(file)
    file.write_text("of somebody else\n")

    with pytest.raises(ChangedMeanwhileError):
        editor.save(file, "mine", shown.version)
    assert file.read_text() == "of somebody else\n"

    editor.save(file, "mine", read_caption(file).version)
    file.write_text("somebody else again\n")
    with pytest.raises(ChangedMeanwhileError):
        editor.undo(file)
    assert file.read_text() == "somebody else again\n"


def test_undoing_a_new_file_removes_it_only_as_the_page_wrote_it(editor: CaptionEditor, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    editor.save(file, "new", read_caption(file).version)
    assert file.read_bytes() == b"new\n"

    editor.undo(file)

    assert not file.exists()


def test_a_link_stays_a_link_and_what_is_no_text_is_not_edited(editor: CaptionEditor, tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("a cat\n")
    link.symlink_to(real)
    editor.save(link, "a dog", read_caption(link).version)
    assert link.is_symlink()
    assert real.read_text() == "a dog\n"

    real.write_bytes(b"\xff\xfe\x00")
    assert read_caption(real).problem == "real.txt is not UTF-8 text"
    with pytest.raises(UserError, match="not UTF-8"):
        editor.save(real, "text", read_caption(real).version)
    assert real.read_bytes() == b"\xff\xfe\x00"


def test_nothing_is_left_beside_the_file_if_it_cannot_be_written(
    editor: CaptionEditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "a.txt"
    file.parent.mkdir()
    file.write_text("a cat\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        editor.save(file, "a dog", read_caption(file).version)

    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]
    assert file.read_text() == "a cat\n"


def test_a_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match="not a regular file"):
        read_caption(tmp_path / "a.txt")
