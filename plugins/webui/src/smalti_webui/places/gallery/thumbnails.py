"""Thumbnails of images, kept in the user's data folder of the page. Imports Pillow when one is made."""

from __future__ import annotations

import os
import threading
from hashlib import blake2b
from pathlib import Path

from smalti import UserError
from smalti.system import atomic_write
from smalti_webui.server.files import make_private

WIDTHS = (160, 320, 640)
"""The widths that can be asked for, so that nobody can fill the disk with others."""
MOST_BYTES = 256 * 1024 * 1024
"""Of all thumbnails; the oldest are removed."""
_MOST_PIXELS = 300_000_000
_AT_ONCE = 2
"""A large image takes much memory while it is decoded."""


class Thumbnails:
    """Thumbnails by source file, width and time of the last change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = 0
        self._slots = threading.Semaphore(_AT_ONCE)

    def of(self, source: Path, width: int) -> Path:
        """The thumbnail of an image, which is made if it is not there. Raises UserError if the file is not a readable image."""
        if width not in WIDTHS:
            raise UserError(f"no thumbnails of width {width}", fix=f"one of {', '.join(map(str, WIDTHS))}")
        try:
            found = source.stat()
        except OSError as error:
            raise UserError(
                f"{source} cannot be read: {error.strerror or error}", fix="look whether the file is there"
            ) from error
        key = f"{source.absolute()}|{found.st_mtime_ns}|{found.st_size}|{width}"
        target = self.folder / f"{blake2b(key.encode(errors='surrogateescape'), digest_size=16).hexdigest()}.webp"
        if not target.is_file():
            make_private(self.folder)
            with self._slots:
                atomic_write(target, _rendered(source, width), mode=0o600)
                self._made += 1
            if self._made % 500 == 0:
                self.trim(MOST_BYTES)
        return target

    def files(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.folder) as entries:
                return [entry for entry in entries if entry.name.endswith(".webp") and entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def size(self) -> int:
        """Bytes of all thumbnails."""
        return sum(entry.stat().st_size for entry in self.files())

    def trim(self, most: int) -> int:
        """Remove the oldest thumbnails until at most this many bytes are left. Returns the bytes that were removed."""
        entries = sorted(self.files(), key=lambda entry: entry.stat().st_mtime)
        over = sum(entry.stat().st_size for entry in entries) - most
        removed = 0
        for entry in entries:
            if removed >= over:
                break
            removed += entry.stat().st_size
            Path(entry.path).unlink(missing_ok=True)
        return removed


def _rendered(source: Path, width: int) -> bytes:
    """A WebP image of at most this width and height."""
    from io import BytesIO

    from PIL import Image, ImageOps

    try:
        with Image.open(source) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise UserError(f"{source} has {image.width}x{image.height} pixels", fix="reduce its size")
            image.draft("RGB", (width, width))
            whole = image.convert("I").point(lambda value: value / 256).convert("L") if image.mode.startswith("I") else image
            turned = ImageOps.exif_transpose(whole)
            made = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
            made.thumbnail((width, width), Image.Resampling.LANCZOS)
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{source} is not a readable image: {error}", fix="look at the file with another program") from error
    target = BytesIO()
    made.save(target, format="WEBP", quality=82, method=2)
    return target.getvalue()
