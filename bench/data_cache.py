"""The cache of latents: batches from packs against a file of `torch.save` per image, and what is missing of 10^6 keys.

- batches: 768 latents of 16 x 64 x 64 in bf16 (128 KB), in a random order in batches of 16, from pages in memory. Ours compares
  a checksum of each.
- keys: hashing 10^6 names of images and finding which of them a cache of 10^6 entries has. Ours finds them in the merged index,
  a mapped file; the peer looks for the SHA-256 of each name in a set.

Wall and CPU time of one process with one thread of torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from smalti.data.cache.entries import Form
from smalti.data.cache.keys import Hasher, single_key
from smalti.data.cache.pack import COLUMNS, PackBuilder, encode_columns
from smalti.data.cache.store import PackStore
from smalti.data.storage.local import LocalStorage

if TYPE_CHECKING:
    from run import Result

IMAGES, BATCH, SHAPE = 768, 16, (16, 64, 64)
KEYS, PACKS = 1_000_000, 10
PAIRS = 5


def batches(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Write the latents in both ways; returns functions that read all of them."""
    ours, files = folder / "ours", folder / "files"
    ours.mkdir()
    files.mkdir()
    store, pack = PackStore(LocalStorage(ours), ""), PackBuilder()
    for number in range(IMAGES):
        latents = torch.randn(SHAPE).to(torch.bfloat16)
        pack.add(single_key(("bench",), number), {"latents": latents})
        torch.save(latents, files / f"{number}.pt")
    store.put(pack)
    store.refresh()
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(1)).split(BATCH)

    def read_packs() -> None:
        for some in order:
            torch.stack([entry["latents"] for entry in store.get_many([single_key(("bench",), int(each)) for each in some])])

    def read_files() -> None:
        for some in order:
            torch.stack([torch.load(files / f"{each}.pt", weights_only=True) for each in some])

    return read_packs, read_files


def keys(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """A cache of 10^6 entries without bytes; returns functions that look for as many names, of which half are in it."""
    names = [f"shard-{number >> 10:05}/{number:09}.jpg" for number in range(2 * KEYS)]
    everything = Hasher(KEYS, "bench").texts(pa.array(names[:KEYS])).keys()
    packs = folder / "packs"
    packs.mkdir()
    store = PackStore(LocalStorage(packs), "", folder=folder / "indexes")
    for place in range(PACKS):
        some = everything[slice(place, None, PACKS)]
        some = some[some.order()]
        columns = {name: np.zeros(len(some), dtype=np.uint64) for name in COLUMNS} | {"high": some.high, "low": some.low}
        (packs / f"{place:016x}.safetensors").write_bytes(encode_columns(columns, [Form(())], data=0))
    store.refresh()
    [merged] = store.columns
    assert isinstance(merged["high"].base, np.memmap), "the index was not merged"
    wanted = pa.array(names[KEYS // 2 : KEYS // 2 + KEYS])
    there = {sha256(name.encode()).hexdigest() for name in names[:KEYS]}

    def find_columns() -> None:
        assert int(store.has(Hasher(KEYS, "bench").texts(wanted).keys()).sum()) == KEYS // 2

    def find_names() -> None:
        found = [sha256(name.encode()).hexdigest() in there for name in names[KEYS // 2 : KEYS // 2 + KEYS]]
        assert sum(found) == KEYS // 2

    return find_columns, find_names


def timed(call: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure() -> list[Result]:
    from run import paired

    results = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for name, (ours, peer) in {"batches": batches(Path(place)), "10^6 keys": keys(Path(place))}.items():
            ours(), peer()
            series = [(timed(ours), timed(peer)) for _ in range(PAIRS)]
            walls, cpus = ([[pair[side][kind] for pair in series] for side in (0, 1)] for kind in (0, 1))
            results.append(paired(f"cache: {name}", *walls, unit="s", goal=1.0))
            results.append(paired(f"cache: {name}, CPU", *cpus, unit="s", goal=1.0))
    return results
