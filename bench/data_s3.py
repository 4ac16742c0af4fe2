"""S3 with digests against the fastest raw client, obstore, on a local SeaweedFS: wall time, and CPU time of the client.

- small: 200 objects of 200 kB written and read by 16 threads.
- ranges: the first 16 KiB of each.
- large: a file of 64 MiB up and down, synced to the disk.

Both use the same server and the same processor, in turn. Ours compares a BLAKE3 digest of every whole object.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store
from sizes import sized

from smalti_storage_s3.client.settings import S3Settings
from smalti_storage_s3.client.storage import S3Storage
from smalti_testing import ObjectStore, seaweed

if TYPE_CHECKING:
    from run import Result

OBJECTS, SIZE, HEADER, LARGE = sized(200, short=16), 200_000, 16_384, sized(64, short=1) << 20
THREADS, PAIRS = 16, sized(5, short=1)
GOAL = 1 / 0.9


class Sides:
    """The storage and the raw client, on one server."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        key, secret = store.access_key, store.secret_key
        settings = S3Settings(
            bucket_name=store.bucket,
            endpoint_url=store.endpoint,
            data_prefix="ours",
            access_key_id=key,
            secret_access_key=secret,
        )
        self.ours = S3Storage(settings)
        self.raw = S3Store(
            store.bucket,
            endpoint=store.endpoint,
            region=store.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            access_key_id=key,
            secret_access_key=secret,
        )
        self.pool = ThreadPoolExecutor(THREADS)
        self.data = os.urandom(SIZE)
        self.file, self.copy = folder / "large", folder / "copy"
        self.file.write_bytes(os.urandom(LARGE))

    def each(self, call: Callable[[int], object]) -> None:
        for _ in self.pool.map(call, range(OBJECTS)):
            pass

    def raw_upload(self) -> None:
        with self.file.open("rb") as file:
            obstore.put(self.raw, "raw/large", file, chunk_size=16 << 20)

    def raw_download(self) -> None:
        with self.copy.open("wb") as file:
            for block in obstore.get(self.raw, "raw/large").stream(min_chunk_size=16 << 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # as ours does

    def cases(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """What both do, by name; writes come before the reads of what they wrote."""
        ours, raw, each = self.ours, self.raw, self.each
        return {
            "small objects written": (
                lambda: each(lambda number: ours.write(f"{number}", self.data)),
                lambda: each(lambda number: obstore.put(raw, f"raw/{number}", self.data, use_multipart=False)),
            ),
            "small objects read": (
                lambda: each(lambda number: ours.read(f"{number}")),
                lambda: each(lambda number: bytes(obstore.get(raw, f"raw/{number}").bytes())),
            ),
            "ranges read": (
                lambda: each(lambda number: ours.read_range(f"{number}", 0, HEADER)),
                lambda: each(lambda number: bytes(obstore.get_range(raw, f"raw/{number}", start=0, end=HEADER))),
            ),
            "large file up": (lambda: ours.upload(self.file, "large"), self.raw_upload),
            "large file down": (lambda: ours.download("large", self.copy), self.raw_download),
        }


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of this process, without those of the server."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure() -> list[Result]:
    from run import paired

    results = []
    with tempfile.TemporaryDirectory() as place, seaweed(Path(place) / "store", memory="1GiB") as store:
        sides = Sides(store, Path(place))
        for name, (ours, raw) in sides.cases().items():
            ours(), raw()  # connections, and the server's first allocation
            series = [(timed(ours), timed(raw)) for _ in range(PAIRS)]
            size = LARGE if "large" in name else OBJECTS * (HEADER if "ranges" in name else SIZE)
            gib = size / 2**30
            walls = [[pair[side][0] for pair in series] for side in (0, 1)]
            cpus = [[pair[side][1] / gib for pair in series] for side in (0, 1)]
            results.append(paired(f"S3: {name}", *walls, unit="s", goal=GOAL))
            results.append(paired(f"S3: {name}, CPU of the client per GiB", *cpus, unit="s/GiB", goal=2.5))
    return results
