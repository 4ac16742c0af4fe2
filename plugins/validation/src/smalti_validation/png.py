"""PNG images with the settings that generated them in their metadata, as text that any viewer of metadata shows.

Pillow is imported when an image is written or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import UserError
from smalti.system import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

_PREFIX = "smalti:"


def save_image(
    path: Path,
    image: Image,
    *,
    prompt: str,
    seed: int,
    step: int,
    config_digest: str,
    run_id: str,
    **more: str | int | float,
) -> None:
    """Write an image with its settings atomically. `more` are further settings ("guidance", "sampler" ...).

    Raises UserError if the file exists and was not written by smalti.
    """
    settings = {
        "prompt": prompt,
        "seed": str(seed),
        "step": str(step),
        "config_digest": config_digest,
        "run_id": run_id,
        **{name: str(value) for name, value in more.items()},
    }
    write_png(path, image, settings, description=prompt)


def image_settings(path: Path) -> dict[str, str]:
    """The settings in an image, as text, by name; empty if smalti did not write it. Raises UserError if it is not an image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.load()  # text may follow the pixels
            texts = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}", fix="give the path of a PNG file") from error
    return {name.removeprefix(_PREFIX): value for name, value in texts.items() if name.startswith(_PREFIX)}


def write_png(path: Path, image: Image, settings: Mapping[str, str], *, description: str) -> None:
    """Write a PNG with `settings` as text. `description` is also stored under the usual name for it."""
    from PIL.PngImagePlugin import PngInfo

    if path.exists() and not image_settings(path):
        raise UserError(f"{path} exists and was not written by smalti", fix="move it to another folder")
    info = PngInfo()
    texts = {"Software": "smalti", "Description": description}
    texts |= {_PREFIX + name: value for name, value in settings.items()}
    for name, value in texts.items():
        info.add_itxt(name, _encodable(value))
    png = BytesIO()
    image.save(png, format="PNG", pnginfo=info)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, png.getvalue())


def _encodable(text: str) -> str:
    """Text for PNG: without NUL, which would end it, and without lone surrogates, which file names can contain."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
