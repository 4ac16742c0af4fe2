"""Saving a draft: the difference to the file first, and never over a file that has changed since it was shown."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from smalti import UserError
from smalti.rundir import RunDirectory
from smalti.system import atomic_write, read_regular
from smalti_webui.configs.drafts import digest

CONTEXT = 3
MASK = "•" * 8


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a difference. `kind` "gap" stands for lines that are the same and not shown."""

    kind: Literal["same", "add", "remove", "gap"]
    text: str
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """A file as it is now. `seen` is "" if there is none."""

    path: Path
    text: str
    seen: str


class ChangedMeanwhile(Exception):  # noqa: N818 - not an error of the server
    """The file is not the one that was shown."""


def on_disk(path: Path) -> OnDisk:
    """Raises UserError if the path cannot be one of a configuration that is saved."""
    if path.suffix.lower() != ".toml":
        raise UserError(f"{path.name} does not end in .toml", fix=f"save it as {path.with_suffix('.toml').name}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", fix="choose a folder that exists")
    run = RunDirectory(path.parent)
    if path == run.config_file and run.record_file.exists():
        raise UserError(f"{path.parent} is a run directory, and the run writes {path.name}", fix="choose another file")
    try:
        content = read_regular(path)
        return OnDisk(path=path, text=content.decode("utf-8-sig"), seen=digest(content))
    except FileNotFoundError:
        return OnDisk(path=path, text="", seen="")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}", fix="choose another file") from None


def save(path: Path, text: str, seen: str) -> str:
    """Write the text, and return the digest of the file. `seen` is the digest of the file whose difference was shown.

    Raises ChangedMeanwhile if the file has another content by now, also if it exists though there was none.
    """
    now = on_disk(path)
    if now.seen != seen:
        raise ChangedMeanwhile(str(path))
    content = text.encode()
    try:
        atomic_write(path, content, mode=stat.S_IMODE(path.stat().st_mode) if now.seen else None)
    except OSError as error:
        fix = "check the permissions of the folder and the free disk space"
        raise UserError(f"cannot write {path}: {error}", fix=fix) from error
    return digest(content)


def difference(old: str, new: str, secrets: Iterable[str] = ()) -> list[Line]:
    """The lines that differ, with three lines around them. `secrets` are masked."""
    before, after = (_masked(text, secrets).splitlines() for text in (old, new))
    lines: list[Line] = []
    at = 0
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        if (skipped := group[0][1] - at) > 0:
            lines.append(Line(kind="gap", text=f"{skipped} unchanged lines" if skipped > 1 else "1 unchanged line"))
        for tag, i1, i2, j1, j2 in group:
            lines += _changes(tag, before[i1:i2], after[j1:j2], i1, j1)
        at = group[-1][2]
    return lines


def _changes(tag: str, old: Sequence[str], new: Sequence[str], at: int, to: int) -> list[Line]:
    if tag == "equal":
        return [Line(kind="same", text=text, number=to + n + 1) for n, text in enumerate(new)]
    removed = [Line(kind="remove", text=text, number=at + n + 1) for n, text in enumerate(old)]
    return removed + [Line(kind="add", text=text, number=to + n + 1) for n, text in enumerate(new)]


def _masked(text: str, secrets: Iterable[str]) -> str:
    for each in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(each, MASK)
    return text
