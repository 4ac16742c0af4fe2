"""Small images with captions, for tests in which nothing depends on what they show."""

from pathlib import Path


def images_in(folder: Path, count: int, size: tuple[int, int] = (32, 32), caption: str = "colour {}") -> Path:
    """Write `count` images of different colours, each with its caption beside it, and return the folder.

    It is left as it is if it exists with images in it. "{}" in the caption is the number of the image.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for number in range(count):
            shade = number * 255 // count
            Image.new("RGB", size, (shade, 255 - shade, 99)).save(folder / f"{number:02}.png")
            (folder / f"{number:02}.txt").write_text(caption.format(number))
    return folder
