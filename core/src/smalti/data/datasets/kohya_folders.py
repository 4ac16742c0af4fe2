"""Folders of kohya's trainer, whose names say how often an image is seen and what it shows: `10_zwx cat`.

smalti reads them as kohya does where `kohya_folders` is set. Elsewhere names mean nothing, and a notice says what to write.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smalti.data.datasets.spec import DatasetSpec

_NAME = re.compile(r"(\d+)_(.*)")
_IMAGES, _REGULARISATION = "img", "reg"  # as its graphical interface names them
_LIKELY_VISITS = 500
_SHOWN = 3  # folders in a notice


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


def kohya_layout(root: Path) -> KohyaLayout | None:
    """Returns the numbered folders of `root`: its subfolders, those of its `img`, or itself. None if there are none."""
    regularisation = tuple(folder.path for folder in _numbered_in(root / _REGULARISATION))
    for place in (root, root / _IMAGES):
        if folders := tuple(_numbered_in(place)):
            named = {folder.path.name for folder in folders} | {_REGULARISATION, "log", "model"}
            others = tuple(path.name for path in _subfolders(place) if path.name not in named)
            return KohyaLayout(folders=folders, regularisation=regularisation, others=others)
    itself = numbered(root)
    return KohyaLayout(folders=(itself,), regularisation=(), others=()) if itself and root.is_dir() else None


def kohya_entries(entry: Mapping[str, object], layout: KohyaLayout) -> list[dict[str, object]]:
    """Returns an entry for each numbered folder. Keys of the entry itself win, apart from its folder."""
    return [
        {
            **folder.entry,
            "caption_extension": folder.caption_extension,
            **{key: value for key, value in entry.items() if key != "kohya_folders"},
            "id": f"{entry.get('id')}/{folder.path.name}",
            "instance_data_dir": str(folder.path),
        }
        for folder in layout.folders
    ]


def left_out_notices(name: str, layout: KohyaLayout) -> list[str]:
    """Notices about folders that are not read where `kohya_folders` is set."""
    notices = []
    if layout.regularisation:
        names = ", ".join(str(path) for path in layout.regularisation)
        notices.append(f"dataset {name}: left out, because they are regularisation images (is_regularisation_data): {names}")
    if layout.others:
        notices.append(f"dataset {name}: left out, because their names have no number: {', '.join(layout.others)}")
    return notices


def unread_names_notice(spec: DatasetSpec) -> list[str]:
    """A notice if the folder of a dataset has kohya's names, whose meaning is not used."""
    if spec.kohya_folders or spec.type != "local" or spec.metadata_backend != "discovery" or spec.instance_data_dir is None:
        return []
    layout = kohya_layout(spec.instance_data_dir)
    if layout is None or all(_same(spec, folder) or not folder.is_likely for folder in layout.folders):
        return []
    names = ", ".join(folder.path.name for folder in layout.folders[:_SHOWN]) + (", ..." if layout.folders[_SHOWN:] else "")
    entries = ", ".join(json.dumps({"id": folder.path.name, **folder.entry}) for folder in layout.folders[:_SHOWN])
    also = " Regularisation images are trained on like the others." if layout.regularisation else ""
    return [
        f"dataset {spec.id}: numbers and words in the names of its folders are not used ({names}).{also} To use them as kohya's"
        f' trainer does: --kohya_folders, or "kohya_folders": true in the entry, or these entries: {entries}'
    ]


def _same(spec: DatasetSpec, folder: KohyaFolder) -> bool:
    """Whether a dataset is one numbered folder, and its entry says what the name does."""
    return spec.instance_data_dir == folder.path and (spec.repeats == folder.visits - 1 or spec.uses_instance_prompt)


def _numbered_in(place: Path) -> Iterator[KohyaFolder]:
    return (folder for path in _subfolders(place) if (folder := numbered(path)))


def _subfolders(place: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones; none if it cannot be listed, which is reported when it is read.

    With scandir, which in most file systems knows a folder without another request: there may be a million images.
    """
    try:
        with os.scandir(place) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
