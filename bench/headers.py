"""An index from headers, against opening and against decoding each image with Pillow; and the share of a file that it reads.

The files are a few generated images under many names (hard links), as large as photos, half of them JPEG and half WebP. The
bytes are counted with files as they are on the web: 100 to 300 kB, 30 % of them WebP.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from run import Result, paired
from sizes import sized

from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.scan.build import build_index
from smalti.data.scan.image_sizes import open_image, orientation, read_header
from smalti.data.storage.local import LocalStorage

FILES = int(os.environ.get("FILES", sized("20000", short="20")))
PAIRS = sized(3, short=1)
DISTINCT = sized(10, short=2)
DECODED = sized(40, short=2)
ON_THE_WEB = sized(30, short=4)


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos(folder)
        ours, opened, decoded = [], [], []
        for _ in range(PAIRS):
            ours.append(cpu_seconds(lambda: index(folder)))
            opened.append(cpu_seconds(lambda: open_all(folder)))
            decoded.append(cpu_seconds(lambda: decode_some(folder)) * FILES / DECODED)
    return [
        paired(f"headers: index of {FILES} photos, over opening them", ours, opened, unit="CPU s", goal=1.0),
        paired(f"headers: index of {FILES} photos, over decoding them", ours, decoded, unit="CPU s", goal=0.05),
        bytes_read(),
    ]


def index(folder: Path) -> None:
    [spec], _ = parse_datasets(
        [{"id": "photos", "instance_data_dir": str(folder), "caption_strategy": "filename"}], where="", defaults=DataDefaults()
    )
    storage = LocalStorage(folder)
    with tempfile.TemporaryDirectory() as name:
        built = build_index(spec, storage, Catalog().open_source(spec, storage), Path(name) / "photos.arrow")
        assert len(built) == FILES


def open_all(folder: Path) -> None:
    for entry in os.scandir(folder):
        with open_image(Path(entry.path).read_bytes()) as image:
            orientation(image)


def decode_some(folder: Path) -> None:
    for path in sorted(folder.iterdir())[:DECODED]:
        with Image.open(path) as image:
            image.load()


def bytes_read() -> Result:
    """Bytes that are read for the sizes, over those of the files."""
    with tempfile.TemporaryDirectory() as name:
        folder, read = Path(name), 0
        for number in range(ON_THE_WEB):
            edge = 500 + 20 * number % 400
            kind = "webp" if number % 10 < 3 else "jpeg"
            (folder / f"{number:02}.{kind}").write_bytes(encoded(texture(number, edge * 4 // 3, edge), kind, quality=88))

        class Counting(LocalStorage):
            def read_range(self, key: str, start: int, length: int) -> bytes:
                nonlocal read
                read += len(data := super().read_range(key, start, length))
                return data

        storage = Counting(folder)
        files = list(storage.list())
        for file in files:
            read_header(partial(storage.read_range, file.key), file.size)
        total = sum(file.size for file in files)
    return paired("headers: bytes read of web images, over all bytes", [read], [total], unit="bytes", goal=0.10)


def photos(folder: Path) -> None:
    originals = []
    for number in range(DISTINCT):
        kind = "webp" if number % 2 else "jpeg"
        originals.append((encoded(texture(number, 2400, 1600), kind, quality=90), kind))
    for number in range(FILES):
        data, kind = originals[number % DISTINCT]
        path = folder / f"a_photo_of_{number:07}.{kind}"
        if number < DISTINCT:
            path.write_bytes(data)
        else:
            path.hardlink_to(folder / f"a_photo_of_{number % DISTINCT:07}.{kind}")


def texture(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Smooth structure and some noise, which compress about as photos do."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels: NDArray[np.uint8] = np.clip(smooth + random.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
    return pixels


def encoded(pixels: NDArray[np.uint8], kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def cpu_seconds(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
