"""Contact sheets: many images, each with its caption below. Pillow is imported when a sheet is made."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import UserError
from smalti_validation.png import write_png

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

MIN_WIDTH = 192
"""Images are enlarged to at least this many pixels, so that details are visible and a caption fits."""
MAX_LINES = 3
_PAPER, _INK, _FAINT = (253, 253, 252), (38, 38, 38), (238, 238, 235)


def image_grid(
    paths: Sequence[Path],
    captions: Sequence[str],
    target: Path,
    *,
    scale: int | None = None,
    columns: int | None = None,
    together: int = 1,
    title: str = "",
) -> None:
    """Write a contact sheet of these images to `target` as PNG; title, captions and file names are in its metadata too.

    `scale` enlarges every image by an integer factor, nearest neighbour; None: the smallest that makes the widest at least
    `MIN_WIDTH` wide. `columns` None: about square. So many images `together` stay in one row. Captions are truncated after
    three lines, but not in the metadata. Raises UserError for a file that is not an image.
    """
    if not paths or len(paths) != len(captions):
        raise ValueError(f"{len(paths)} images with {len(captions)} captions")
    images = [_open(path) for path in paths]
    factor = scale or max(1, math.ceil(MIN_WIDTH / max(image.width for image in images)))
    images = [_enlarged(image, factor) for image in images]
    width, height = max(image.width for image in images), max(image.height for image in images)
    font = _font(min(30, max(12, width // 20)))
    texts = [_wrapped(caption, width, font) for caption in captions]
    columns = columns or round(math.sqrt(len(images) * height / width / together**2)) * together
    columns = min(max(together, columns), len(images))
    rows = [
        list(zip(images[start : start + columns], texts[start : start + columns], strict=True))
        for start in range(0, len(images), columns)
    ]
    sheet = _sheet(rows, width, title, font)
    settings = {
        "title": title,
        "captions": json.dumps(list(captions), ensure_ascii=False),
        "images": json.dumps([path.name for path in paths], ensure_ascii=False),
    }
    write_png(target, sheet, settings, description=title or "\n".join(captions))


def _sheet(rows: list[list[tuple[Image, list[str]]]], width: int, title: str, font: FreeTypeFont) -> Image:
    """The sheet of these rows: every cell is `width` wide, a row is as high as its highest image and longest caption need."""
    from PIL import Image, ImageDraw

    size = round(font.size)
    line, gap = round(size * 1.35), round(size * 1.2)
    image_heights = [max(image.height for image, _ in row) for row in rows]
    caption_heights = [size // 2 + line * max(len(text) for _, text in row) for row in rows]
    columns = max(len(row) for row in rows)
    heading = _font(round(size * 1.3))
    top = gap + (round(heading.size * 1.9) if title else 0)
    sheet = Image.new(
        "RGB",
        (gap + columns * (width + gap), top + sum(image_heights) + sum(caption_heights) + gap * len(rows)),
        _PAPER,
    )
    canvas = ImageDraw.Draw(sheet)
    if title:
        canvas.text((gap, gap), _wrapped(title, sheet.width - 2 * gap, heading, lines=1)[0], fill=_INK, font=heading)
    for row, image_height, caption_height in zip(rows, image_heights, caption_heights, strict=True):
        for column, (image, text) in enumerate(row):
            left = gap + column * (width + gap)
            canvas.rectangle((left, top, left + width - 1, top + image_height - 1), fill=_FAINT)
            sheet.paste(image, (left + (width - image.width) // 2, top + (image_height - image.height) // 2))
            for number, line_text in enumerate(text):
                canvas.text((left, top + image_height + size // 2 + number * line), line_text, fill=_INK, font=font)
        top += image_height + caption_height + gap
    return sheet


def _open(path: Path) -> Image:
    """An image as RGB, on the colour of the sheet where it is transparent. Raises UserError if it cannot be read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            layer = image.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
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
    """The text in at most `lines` lines of `width` pixels, with an ellipsis where it was truncated."""
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
