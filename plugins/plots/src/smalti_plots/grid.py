"""One sheet with many pictures and a caption below each. Pillow is imported when a sheet is made."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import UserError
from smalti.rundir import write_png

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

MIN_WIDTH = 192
"""Pictures are enlarged to at least this many pixels, so that there is something to see and room for a caption."""
MAX_LINES = 3
_PAPER, _INK, _FAINT = (253, 253, 252), (38, 38, 38), (238, 238, 235)


def image_grid(
    pictures: Sequence[Path],
    captions: Sequence[str],
    target: Path,
    *,
    scale: int | None = None,
    columns: int | None = None,
    title: str = "",
) -> None:
    """Put pictures on one sheet and write it to `target` as PNG; title, captions and file names are in its metadata too.

    `scale` enlarges every picture by a whole factor, pixel by pixel; None takes the smallest that makes the widest at least
    `MIN_WIDTH` wide. `columns` None makes the sheet about square. Captions are cut after three lines, but not in the metadata.
    """
    if not pictures or len(pictures) != len(captions):
        raise ValueError(f"{len(pictures)} pictures with {len(captions)} captions")
    images = [_open(path) for path in pictures]
    factor = scale or max(1, math.ceil(MIN_WIDTH / max(image.width for image in images)))
    images = [_enlarged(image, factor) for image in images]
    width, height = max(image.width for image in images), max(image.height for image in images)
    font = _font(min(30, max(12, width // 20)))
    texts = [_wrapped(caption, width, font) for caption in captions]
    columns = columns or round(math.sqrt(len(images) * height / width))
    columns = min(max(1, columns), len(images))
    rows = [
        list(zip(images[start : start + columns], texts[start : start + columns], strict=True))
        for start in range(0, len(images), columns)
    ]
    sheet = _sheet(rows, width, title, font)
    settings = {
        "title": title,
        "captions": json.dumps(list(captions), ensure_ascii=False),
        "pictures": json.dumps([path.name for path in pictures], ensure_ascii=False),
    }
    write_png(target, sheet, settings, description=title or "\n".join(captions))


def _sheet(rows: list[list[tuple[Image, list[str]]]], width: int, title: str, font: FreeTypeFont) -> Image:
    """Draw the rows: every cell is `width` wide, a row is as high as its highest picture and its longest caption need."""
    from PIL import Image, ImageDraw

    size = round(font.size)
    line, gap = round(size * 1.35), round(size * 1.2)
    picture_heights = [max(image.height for image, _ in row) for row in rows]
    caption_heights = [size // 2 + line * max(len(text) for _, text in row) for row in rows]
    columns = max(len(row) for row in rows)
    heading = _font(round(size * 1.3))
    top = gap + (round(heading.size * 1.9) if title else 0)
    sheet = Image.new(
        "RGB",
        (gap + columns * (width + gap), top + sum(picture_heights) + sum(caption_heights) + gap * len(rows)),
        _PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((gap, gap), _wrapped(title, sheet.width - 2 * gap, heading, lines=1)[0], fill=_INK, font=heading)
    for row, picture_height, caption_height in zip(rows, picture_heights, caption_heights, strict=True):
        for column, (image, text) in enumerate(row):
            left = gap + column * (width + gap)
            draw.rectangle((left, top, left + width - 1, top + picture_height - 1), fill=_FAINT)
            sheet.paste(image, (left + (width - image.width) // 2, top + (picture_height - image.height) // 2))
            for number, words in enumerate(text):
                draw.text((left, top + picture_height + size // 2 + number * line), words, fill=_INK, font=font)
        top += picture_height + caption_height + gap
    return sheet


def _open(path: Path) -> Image:
    """A picture as RGB, on paper where it is transparent."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            layer = image.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} cannot be read as a picture: {error}") from error
    paper = Image.new("RGB", layer.size, _PAPER)
    paper.paste(layer, mask=layer)
    return paper


def _enlarged(image: Image, factor: int) -> Image:
    from PIL import Image

    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST) if factor > 1 else image


def _font(size: int) -> FreeTypeFont:
    """The font that matplotlib brings, which has more alphabets than Pillow's own."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)


def _wrapped(text: str, width: int, font: FreeTypeFont, lines: int = MAX_LINES) -> list[str]:
    """The text in at most `lines` lines of `width` pixels, with an ellipsis where it was cut."""
    wrapped: list[str] = []
    rest = " ".join(text.split())
    while rest and len(wrapped) < lines:
        count = _fitting(rest, width, font)
        if count < len(rest) and len(wrapped) == lines - 1:
            return [*wrapped, rest[: _fitting(rest, width - int(font.getlength("…")), font)].rstrip() + "…"]
        wrapped.append(rest[:count].rstrip())
        rest = rest[count:].lstrip()
    return wrapped


def _fitting(text: str, width: int, font: FreeTypeFont) -> int:
    """How many characters fit on a line; ends between words unless a single word is too long."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(text[:middle]) <= width else (low, middle - 1)
    if low < len(text) and not text[low].isspace() and (space := text.rfind(" ", 0, low)) > 0:
        return space
    return low
