"""Folders of kohya's trainer, whose names say how often an image is seen and what it shows: `10_zwx cat`.

They are read as kohya does where `kohya_folders` is set. Elsewhere names mean nothing, and a notice says what to write.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from smalti import Problem, Translation
from smalti_migrate.simpletuner.rules import is_on

_NAME = re.compile(r"(\d+)_(.*)")
_IMAGES, _REGULARISATION = "img", "reg"  # as its graphical interface names them
_LIKELY_VISITS = 500
_SHOWN = 3  # folders in a notice
_LOOKED_AT = 1000
"""Names in a folder that are read for a notice alone; there may be a million images, and every rank reads the entries."""


@dataclass(frozen=True, kw_only=True)
class KohyaFolder:
    """A folder of images. `visits` is how often each is seen in an epoch, at least 1; `prompt` may be ""."""

    path: Path
    visits: int
    prompt: str

    @property
    def is_likely(self) -> bool:
        """Whether the number is one of repeats, not of a year or a position, as in 2024_summer and 01_first."""
        return self.visits <= _LIKELY_VISITS and not self.path.name.startswith("0")

    @property
    def entry(self) -> dict[str, object]:
        """The keys of a dataset entry that say the same."""
        keys: dict[str, object] = {"instance_data_dir": str(self.path), "repeats": self.visits - 1}
        return {**keys, "instance_prompt": self.prompt, "instance_prompt_fallback": True} if self.prompt else keys

    @property
    def caption_extension(self) -> str:
        """`.caption`, kohya's default, if there are only such files; else `.txt`."""
        found = ".txt"
        with os.scandir(self.path) as files:
            for file in files:
                if file.name.lower().endswith(".txt"):
                    return ".txt"
                if file.name.lower().endswith(".caption"):
                    found = ".caption"
        return found


@dataclass(frozen=True, kw_only=True)
class KohyaLayout:
    """What is in a folder: the numbered folders, those of regularisation images, and other subfolders that have no number."""

    folders: tuple[KohyaFolder, ...]
    regularisation: tuple[Path, ...]
    others: tuple[str, ...]


def numbered(path: Path) -> KohyaFolder | None:
    """Returns a folder whose name begins with a number and an underscore; None for other names. 0 visits leave it out there."""
    match = _NAME.fullmatch(path.name)
    return KohyaFolder(path=path, visits=int(match[1]), prompt=match[2].strip()) if match and int(match[1]) else None


def kohya_layout(root: Path, most: int | None = None) -> KohyaLayout | None:
    """Returns the numbered folders of `root`: its subfolders, those of its `img`, or itself. None if there are none.

    At most `most` names are read in each folder.
    """
    regularisation = tuple(folder.path for folder in _numbered_in(root / _REGULARISATION, most))
    for place in (root, root / _IMAGES):
        if folders := tuple(_numbered_in(place, most)):
            named = {folder.path.name for folder in folders} | {_REGULARISATION, "log", "model"}
            others = tuple(path.name for path in _subfolders(place, most) if path.name not in named)
            return KohyaLayout(folders=folders, regularisation=regularisation, others=others)
    itself = numbered(root)
    return KohyaLayout(folders=(itself,), regularisation=(), others=()) if itself and root.is_dir() else None


def with_folders(found: Translation, option: Callable[[str], object]) -> list[Translation]:
    """An entry for each numbered folder of one that asks for them by its key `kohya_folders` or the option of that name.

    Keys of the entry win over what the names say, apart from its folder. Of other entries whose folder has such names a notice
    has the entries that say the same.
    """
    entry = {key: value for key, value in found.rest.items() if key != "kohya_folders"}
    asked = is_on(found.rest.get("kohya_folders", option("kohya_folders")))
    folder = entry.get("instance_data_dir")
    is_listed = entry.get("type", "local") == "local" and entry.get("metadata_backend", "discovery") == "discovery"
    applies = str(entry.get("dataset_type", "image")).lower() == "image" if asked else is_listed
    if not isinstance(folder, str) or not applies:
        return [replace(found, rest=entry)]
    try:
        root = Path(folder).expanduser().absolute()
        layout = kohya_layout(root, None if asked else _LOOKED_AT)
    except (RuntimeError, ValueError):
        layout, asked = None, False  # the folder is reported when the entry is checked
    if not asked:
        return [replace(found, rest=entry, notices=[*found.notices, *_unread_names(entry, layout, option)])]
    problems = list(found.problems)
    if "repeats" in entry:
        message = "kohya_folders takes the repeats from the names of the folders, and the entry has repeats too"
        problems.append(Problem(message=message, fix="remove one of them"))
    if layout is None:
        message = f"kohya_folders: no folder with a name like '10_zwx cat' in {folder}"
        problems.append(Problem(message=message, fix="check instance_data_dir, or remove kohya_folders"))
        return [replace(found, rest=entry, problems=problems)]
    entries = [
        {
            **each.entry,
            "caption_extension": each.caption_extension,
            **entry,
            "id": f"{entry.get('id')}/{each.path.name}",
            "instance_data_dir": str(each.path),
        }
        for each in layout.folders
    ]
    first = Translation(rest=entries[0], problems=problems, notices=[*found.notices, *_left_out(layout)])
    return [first, *(Translation(rest=each) for each in entries[1:])]


def _left_out(layout: KohyaLayout) -> list[tuple[str, str]]:
    """Notices about folders that are not read where `kohya_folders` is set."""
    notices = []
    if layout.regularisation:
        names = ", ".join(str(path) for path in layout.regularisation)
        notices.append(f"leaves out, because they are regularisation images (is_regularisation_data): {names}")
    if layout.others:
        notices.append(f"leaves out, because their names have no number: {', '.join(layout.others)}")
    return [("kohya_folders", notice) for notice in notices]


def _unread_names(
    entry: Mapping[str, object], layout: KohyaLayout | None, option: Callable[[str], object]
) -> list[tuple[str, str]]:
    """A notice if the folder of a dataset has kohya's names, whose meaning is not used."""
    if layout is None or all(_same(entry, each, option) or not each.is_likely for each in layout.folders):
        return []
    names = ", ".join(each.path.name for each in layout.folders[:_SHOWN]) + (", ..." if layout.folders[_SHOWN:] else "")
    entries = ", ".join(json.dumps({"id": each.path.name, **each.entry}) for each in layout.folders[:_SHOWN])
    also = " Regularisation images are trained on like the others." if layout.regularisation else ""
    text = (
        f"has folders whose names have numbers and words that are not used ({names}).{also} To use them as kohya's trainer"
        f' does: --kohya_folders, or "kohya_folders": true in the entry, or these entries: {entries}'
    )
    return [("instance_data_dir", text)]


def _same(entry: Mapping[str, object], folder: KohyaFolder, option: Callable[[str], object]) -> bool:
    """Whether an entry is of one numbered folder, and says what the name does, or has a prompt of its own."""
    if Path(str(entry.get("instance_data_dir"))).expanduser().absolute() != folder.path:
        return False
    prompts = ("prepend_instance_prompt", "only_instance_prompt", "instance_prompt_fallback")
    own = str(entry.get("caption_strategy", option("caption_strategy"))).lower() == "instanceprompt"
    return entry.get("repeats", 0) == folder.visits - 1 or own or any(is_on(entry.get(key)) for key in prompts)


def _numbered_in(place: Path, most: int | None) -> Iterator[KohyaFolder]:
    return (folder for path in _subfolders(place, most) if (folder := numbered(path)))


def _subfolders(place: Path, most: int | None) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones; none if it cannot be listed, which is reported when it is read.

    With scandir, which in most file systems knows a folder without another request.
    """
    try:
        with os.scandir(place) as entries:
            found = islice(entries, most)
            return sorted(Path(entry.path) for entry in found if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
