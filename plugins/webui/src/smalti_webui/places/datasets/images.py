"""The images of a dataset in a folder, with the text files of their captions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from smalti import UserError
from smalti.data import EXTENSIONS, DatasetSpec

_SECONDS = 10.0
MOST = 500_000
"""Images that are listed; beyond them a folder is shown in part."""


@dataclass(frozen=True, kw_only=True)
class FolderImage:
    """An image. `key` is its path relative to the folder. `captioned` says whether the text file of its caption is there."""

    key: str
    captioned: bool


@dataclass(frozen=True, kw_only=True)
class Listing:
    images: tuple[FolderImage, ...]
    complete: bool

    @property
    def without_caption(self) -> int:
        return sum(not image.captioned for image in self.images)


class Listings:
    """The images of folders, listed again after some seconds, or when `forget` is called."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], tuple[float, Listing]] = {}

    def of(self, folder: Path, extension: str) -> Listing:
        key = folder, extension
        known = self._known.get(key)
        if known is None or time.monotonic() - known[0] > _SECONDS:
            known = time.monotonic(), list_images(folder, extension)
            self._known = {key: known}
        return known[1]

    def forget(self) -> None:
        self._known = {}


def list_images(folder: Path, extension: str = ".txt") -> Listing:
    """The images in a folder and its subfolders, by name. Hidden files and folders, and links to folders, are left out."""
    found: list[FolderImage] = []
    for relative, names in _walk(folder):
        texts = {name for name in names if name.lower().endswith(extension)}
        for name in names:
            path = PurePosixPath(name)
            if path.suffix.lower() in EXTENSIONS:
                if len(found) == MOST:
                    return Listing(images=tuple(found), complete=False)
                found.append(FolderImage(key=f"{relative}{name}", captioned=f"{path.stem}{extension}" in texts))
    return Listing(images=tuple(found), complete=True)


def is_browsable(spec: DatasetSpec) -> bool:
    """Whether the images are files of a folder of this machine."""
    return spec.type == "local" and spec.instance_data_dir is not None and spec.metadata_backend in ("discovery", "json")


def has_caption_files(spec: DatasetSpec) -> bool:
    """Whether the captions are text files beside the images."""
    return is_browsable(spec) and spec.caption_strategy == "textfile" and not spec.only_instance_prompt


def caption_file(spec: DatasetSpec, image: Path) -> Path:
    """The text file with the caption of an image."""
    return image.with_suffix(spec.caption_extension)


def is_addressable(key: str) -> bool:
    """Whether a browser can ask for the image: names that are not UTF-8 have no address."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def image_in(folder: Path, key: str) -> Path:
    """The image with this key. Raises UserError for a key that does not lie in the folder, or is not one of an image."""
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or any(part.startswith(".") for part in parts) or "\0" in key:
        raise UserError(f"{key!r} is not the name of an image of this dataset")
    if Path(key).suffix.lower() not in EXTENSIONS:
        raise UserError(f"{key!r} is not an image")
    return folder.joinpath(*parts)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = Path(place).relative_to(folder).as_posix()
        yield "" if relative == "." else f"{relative}/", sorted(name for name in names if not name.startswith("."))
