"""Pictures that carry what made them: the settings lie in the PNG itself, as text that any viewer of metadata shows.

Pillow is imported when a picture is written or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.errors import UserError
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
    """Write one picture with its settings; `more` are further ones ("guidance", "sampler" ...).

    A reader never sees half a picture. UserError when a file is there that smalti did not make.
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
    """The settings in a picture, as text, by name; empty for one that smalti did not make. UserError when it is no picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.load()  # text may follow the pixels
            texts = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} cannot be read as a picture: {error}", fix="give the path of a PNG file") from error
    return {name.removeprefix(_PREFIX): value for name, value in texts.items() if name.startswith(_PREFIX)}


def write_png(path: Path, image: Image, settings: Mapping[str, str], *, description: str) -> None:
    """Write a PNG with `settings` as text; `description` also goes where other programs look for one."""
    from PIL.PngImagePlugin import PngInfo

    if path.exists() and not image_settings(path):
        raise UserError(f"{path} is there and was not made by smalti", fix="move it away")
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
    """Text for PNG: no NUL, which would end it, and no halves of characters, as file names can have them."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
