"""Read and change text files with captions. They are the user's: a change is explicit, and can be undone.

Nothing is written if the file has changed since it was shown. What was there before is kept in the user's data folder.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from smalti import UserError
from smalti.system import atomic_write, load_json, open_regular, read_regular
from smalti_webui.server.files import make_private

MOST_BYTES = 64 * 1024
"""Of a caption file. A larger text file is not a caption."""
_MOST_KEPT = 50
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The text of a file. `version` identifies its content; "" if there is no file. `problem` says why it cannot be edited."""

    text: str
    version: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that was saved: the bytes before it as Latin-1, or None if there was no file, and the version after it."""

    time: float
    before: str | None
    after: str


class ChangedMeanwhileError(UserError):
    """Somebody else has changed the file."""


def read_caption(file: Path) -> Caption:
    """The caption in a file. A file that is missing has an empty one."""
    content = _content(file)
    if content is None:
        return Caption(text="", version="")
    if len(content) > MOST_BYTES:
        return Caption(text="", version=_version(content), problem=f"{file.name} has more than {MOST_BYTES // 1024} KiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Caption(text="", version=_version(content), problem=f"{file.name} is not UTF-8 text")
    return Caption(text=text.replace("\r\n", "\n").removesuffix("\n"), version=_version(content))


class CaptionEditor:
    """Saves captions and keeps what was there before in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, file: Path, text: str, version: str) -> Caption:
        """Write a caption. Byte order mark, line ends and the last newline stay as they are in the file.

        Raises ChangedMeanwhileError if the content is no longer that of `version`, UserError if it cannot be written.
        """
        before = _content(file)
        self._check(file, before, version)
        if before is not None and (problem := read_caption(file).problem):
            raise UserError(problem, fix="change the file with another program")
        content = _encoded(text, before)
        if len(content) > MOST_BYTES:
            raise UserError(f"the caption is longer than {MOST_BYTES // 1024} KiB", fix="shorten it")
        if content != before:
            _replace(file, content, before)
            kept = None if before is None else before.decode("latin-1")
            self._keep(file, [*self.changes(file), Change(time=time.time(), before=kept, after=_version(content))])
        return read_caption(file)

    def undo(self, file: Path) -> Caption:
        """Take back the last change. Raises ChangedMeanwhileError if the file was changed since, UserError if there is none."""
        changes = self.changes(file)
        if not changes:
            raise UserError(f"there is no change of {file.name} to undo", fix="")
        last, now = changes[-1], _content(file)
        self._check(file, now, last.after)
        if last.before is None:
            file.resolve().unlink()
        else:
            _replace(file, last.before.encode("latin-1"), now)
        self._keep(file, changes[:-1])
        return read_caption(file)

    def changes(self, file: Path) -> list[Change]:
        """The changes of a file that can be undone, oldest first."""
        try:
            content = load_json(read_regular(self._record(file)))
            return [Change(**each) for each in content["changes"]]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def _keep(self, file: Path, changes: list[Change]) -> None:
        make_private(self._folder)
        kept = [asdict(each) for each in changes[-_MOST_KEPT:]]
        atomic_write(self._record(file), json.dumps({"file": str(file), "changes": kept}).encode(), mode=0o600)

    def _record(self, file: Path) -> Path:
        name = blake2b(os.fsencode(file.resolve()), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"

    @staticmethod
    def _check(file: Path, content: bytes | None, version: str) -> None:
        if _version(content) != version:
            raise ChangedMeanwhileError(
                f"{file.name} has changed since it was shown", fix="look at its present text, then save again"
            )


def _content(file: Path) -> bytes | None:
    """The beginning of the file, enough to recognize one that is too large. Raises UserError if it cannot be read."""
    try:
        with open_regular(file) as opened:
            return opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}", fix="check the owner and permissions") from error


def _version(content: bytes | None) -> str:
    return "" if content is None else blake2b(content, digest_size=12).hexdigest()


def _encoded(text: str, before: bytes | None) -> bytes:
    """The text as bytes, in the manner of what was there before. A new file ends with a newline."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
    had = b"\n" if before is None else before
    if had.endswith(b"\n"):
        lines += "\n"
    if b"\r\n" in had:
        lines = lines.replace("\n", "\r\n")
    return (_BOM if had.startswith(_BOM) else b"") + lines.encode("utf-8", "replace")


def _replace(file: Path, content: bytes, before: bytes | None) -> None:
    """Replace the file at once, with its permissions. A link stays a link. Raises UserError."""
    target = file.resolve()
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(content)
                mode = stat.S_IMODE(target.stat().st_mode) if before is not None else 0o666 & ~_umask()
                os.fchmod(opened.fileno(), mode)
                os.fsync(opened.fileno())
            if _content(target) != before:
                raise ChangedMeanwhileError(
                    f"{file.name} has just been changed", fix="look at its present text, then save again"
                )
            Path(draft).replace(target)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(draft).unlink()
            raise
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}", fix="check the owner and permissions"
        ) from error


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found
