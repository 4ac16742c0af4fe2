"""Images inside parquet files, as the Hugging Face Hub has them: written into a folder, each with its captions beside it.

The bytes of an image are written as they are, so nothing is encoded again. Rows are read in small batches.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from smalti import UserError
from smalti.data import DECODING_ERRORS, EXTENSIONS
from smalti_data.archives.row_images import holds_images, holds_texts
from smalti_data.tables.columns import leaf, leaves

_ROWS = 32  # read at once
_EXTENSIONS = {"JPEG": ".jpg", "TIFF": ".tif"}
"""By Pillow's name of the format, where it differs from the extension."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns to read. A dot reaches into a struct. `caption` None: no captions are written."""

    image: str
    caption: str | None


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What was written. `present` counts images that were there already; `unusable` has the reasons, by row."""

    images: int
    present: int
    unusable: Mapping[str, str]


def parquet_files(sources: Sequence[Path]) -> list[Path]:
    """Returns the parquet files among files and below folders, sorted. Raises UserError if there are none."""
    files = [file for source in sources for file in (sorted(source.rglob("*.parquet")) if source.is_dir() else [source])]
    if not files:
        raise UserError(
            f"no parquet file in {', '.join(map(str, sources))}", fix="name a *.parquet file, or a folder with some in it"
        )
    return files


def choose_columns(file: Path, image: str | None, caption: str | None, *, captions: bool = True) -> Columns:
    """Returns the columns of the images and the captions: those given, else the only ones that they can be.

    Raises UserError for a column that is not there, or if the choice is not clear; the message lists the columns.
    """
    schema = _opened(file).schema_arrow
    images = [field.name for field in schema if holds_images(field.type)]
    texts = [name for name in leaves(schema) if holds_texts(leaf(schema, name)) and name.partition(".")[0] not in images]
    return Columns(
        image=_choice(file, "image", image, images),
        caption=_choice(file, "caption", caption, texts, also="--no_captions") if captions else None,
    )


def unpack(
    files: Sequence[Path], folder: Path, columns: Columns, *, most: int | None = None, progress: Callable[[int], None]
) -> Unpacked:
    """Write the images of parquet files into a folder as 00000000.jpg ..., with captions in 00000000.txt, one a line.

    Images are numbered through all files. Calling it again continues: what is there already is compared and kept. Raises
    UserError for a file of another content, which is never overwritten, and if a parquet file cannot be read.
    """
    written, present, unusable = 0, 0, dict[str, str]()
    folder.mkdir(parents=True, exist_ok=True)
    for number, (place, data, captions) in enumerate(_rows(files, columns)):
        if number == most:
            break
        extension, problem = _extension(data)
        if data is None or problem:
            unusable[place] = problem
            continue
        if captions:
            _write(folder / f"{number:08}.txt", "".join(f"{caption}\n" for caption in captions).encode())
        is_new = _write(folder / f"{number:08}{extension}", data)
        written, present = written + is_new, present + (not is_new)
        progress(written + present)
    return Unpacked(images=written + present, present=present, unusable=unusable)


def _rows(files: Sequence[Path], columns: Columns) -> Iterator[tuple[str, bytes | None, list[str] | None]]:
    """Yields for each row where it is, the bytes of its image, and its captions."""
    wanted = [columns.image, *([columns.caption] if columns.caption else [])]
    for file in files:
        row = 0
        try:
            for batch in _opened(file).iter_batches(batch_size=_ROWS, columns=wanted):
                for values in batch.to_pylist():
                    image = _inside(values, columns.image)
                    data = image.get("bytes") if isinstance(image, Mapping) else image
                    captions = _captions(_inside(values, columns.caption)) if columns.caption else None
                    yield f"{file.name}, row {row}", data if isinstance(data, bytes) else None, captions
                    row += 1
        except (pa.ArrowException, OSError) as error:
            fix = "download the file again; what was written is kept"
            raise UserError(f"{file} cannot be read from row {row} on: {error}", fix=fix) from error


def _inside(values: object, column: str) -> object:
    for name in column.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _captions(value: object) -> list[str]:
    """All captions of a row. A line break would begin another caption, so it becomes a space."""
    texts = value if isinstance(value, list) else [value]
    return [" ".join(text.split()) for text in texts if isinstance(text, str) and text.strip()]


def _extension(data: bytes | None) -> tuple[str, str]:
    """Returns the extension of an image, and why it cannot be used, else ""."""
    if data is None:
        return "", "no image in the file, perhaps only its address"
    try:
        with Image.open(io.BytesIO(data)) as image:
            name = str(image.format)
    except DECODING_ERRORS:
        return "", "not an image that can be read"
    extension = _EXTENSIONS.get(name, f".{name.lower()}")
    return extension, "" if extension in EXTENSIONS else f"images of the format {name} are not read"


def _write(path: Path, data: bytes) -> bool:
    """Writes a file and returns whether it is new. Raises UserError if there is one of another content."""
    try:
        if path.exists():
            if path.read_bytes() == data:
                return False
            raise UserError(f"{path} exists with another content", fix="give --to a new folder, or remove the files in it")
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(data)
        draft.rename(path)
    except OSError as error:
        fix = "run the same command again: it continues where it stopped"
        raise UserError(f"cannot write {path}: {error.strerror}", fix=fix) from error
    return True


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable parquet file: {error}", fix="download it again") from error


def _choice(file: Path, what: str, given: str | None, possible: Sequence[str], *, also: str = "") -> str:
    if given is not None and given in possible:
        return given
    if given is None and len(possible) == 1:
        return possible[0]
    message = f"{file.name} has no column of {what}s"
    if possible:
        message = f"{file.name} has several columns that may be the {what}" if given is None else f"no {what}s in {given!r}"
    options = [f"--{what}_column={name}" for name in possible] + ([also] if also else [])
    raise UserError(message, fix=f"give {' or '.join(options)}" if options else "unpack another file")
