"""The cache of latents: batches from packs against a file or object per image, and what is missing of 10^6 keys.

- batches: 768 latents of 16 x 64 x 64 in bf16 (128 KB), in a random order in batches of 16, from pages in memory. Ours compares
  a checksum of each.
- keys: hashing 10^6 names of images and finding which of them a cache of 10^6 entries has. Ours finds them in the merged index,
  a mapped file; the peer looks for the SHA-256 of each name in a set.
- opening: a cache of 2,000 packs behind 20 ms for each request. Ours reads the index beside the packs, the peer their headers,
  64 at once.
- S3: 256 of them from a pack on a local SeaweedFS against an object of `torch.save` per image, which 8 threads get. `near`:
  neighbours in the pack make up a batch. `copies`: ours with copies on the node.
- waiting: training a tiny SDXL with latents and captions on that server: the share of a step that waits for its batch.

Wall and CPU time of one process with one thread of torch; the server has the same processor.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from sizes import sized

from smalti.data.storage.local import LocalStorage
from smalti_cache.directory import IN_MEMORY
from smalti_cache.entries import Form
from smalti_cache.index_files import LEAST, SUFFIX
from smalti_cache.keys import Hasher, Keys, single_key
from smalti_cache.pack import COLUMNS, PackBuilder, encode_columns
from smalti_cache.reads.local_copies import LocalCopies
from smalti_cache.reads.ranges import AT_ONCE
from smalti_cache.store import PackStore
from smalti_storage_s3.client.settings import S3Settings
from smalti_storage_s3.client.storage import S3Storage
from smalti_testing import ObjectStore, seaweed

if TYPE_CHECKING:
    from run import Result

IMAGES, BATCH, SHAPE = sized(768, short=32), 16, (16, 64, 64)
REMOTE = sized(256, short=32)
KEYS, PACKS = sized(1_000_000, short=IN_MEMORY + 20_000), 10
PAIRS = sized(5, short=1)
STEPS = sized(60, short=3)
OPENED = sized(2 * LEAST, short=LEAST)
DELAY = 0.02


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
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(1)).split(BATCH)  # type: ignore[no-untyped-call]

    def read_packs() -> None:
        for some in order:
            torch.stack([entry["latents"] for entry in store.get_many([single_key(("bench",), int(each)) for each in some])])

    def read_files() -> None:
        for some in order:
            torch.stack([torch.load(files / f"{each}.pt", weights_only=True) for each in some])

    return read_packs, read_files


def remote_batches(folder: Path, server: ObjectStore) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Put the latents on a server in both ways; returns functions that read all of them, by the order of the batches."""
    keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    storage = S3Storage(S3Settings(bucket_name=server.bucket, endpoint_url=server.endpoint, data_prefix="latents", **keys))
    pack = PackBuilder()
    for number in range(REMOTE):
        latents, file = torch.randn(SHAPE).to(torch.bfloat16), io.BytesIO()
        pack.add(single_key(("bench",), number), {"latents": latents})
        torch.save(latents, file)
        storage.write(f"files/{number}.pt", file.getvalue())
    PackStore(storage, "packs").put(pack)
    pool = ThreadPoolExecutor(AT_ONCE)
    copies = LocalCopies(folder / "copies", 10**9)
    stores = {name: PackStore(storage, "packs", copies=copies if name == "copies" else None) for name in ("", "copies")}
    rows = np.random.default_rng(1).permutation(REMOTE)
    # A pack has its entries in the order in which they were encoded.
    orders = {"shuffled": rows.reshape(-1, BATCH), "near": np.arange(REMOTE).reshape(-1, BATCH)}
    for store in stores.values():
        store.refresh()

    def reader(store: PackStore, order: NDArray[np.int64]) -> Callable[[], None]:
        def read() -> None:
            for some in order.tolist():
                torch.stack([entry["latents"] for entry in store.get_many([single_key(("bench",), each) for each in some])])

        return read

    def load(number: int) -> torch.Tensor:
        latents: torch.Tensor = torch.load(io.BytesIO(storage.read(f"files/{number}.pt")), weights_only=True)
        return latents

    def peer(order: NDArray[np.int64]) -> Callable[[], None]:
        def read() -> None:
            for some in order.tolist():
                torch.stack(list(pool.map(load, some)))

        return read

    found = {f"S3, {name}": (reader(stores[""], order), peer(order)) for name, order in orders.items()}
    return found | {"S3, copies": (reader(stores["copies"], orders["shuffled"]), peer(orders["shuffled"]))}


def waiting(folder: Path, server: ObjectStore) -> Result:
    """The seconds for which a step of a tiny SDXL waits for its batch, against those of the whole step."""
    from run import paired, precision_of
    from sdxl import images, tiny_pipeline
    from step import opened

    from smalti import HookSpecs, RunState, StepResult, hookimpl
    from smalti.plugins.registry import PluginInfo
    from smalti.training.trainer import loop

    class Waits:
        def __init__(self) -> None:
            self.waits: list[float] = []
            self.steps: list[float] = []

        @hookimpl
        def on_step_end(self, state: RunState, result: StepResult) -> None:
            self.waits.append(result.data_seconds)
            self.steps.append(result.seconds + result.data_seconds)

    bucket = {
        "type": "aws",
        "aws_bucket_name": server.bucket,
        "aws_endpoint_url": server.endpoint,
        "aws_access_key_id": server.access_key,
        "aws_secret_access_key": server.secret_key,
    }
    entries = [
        {"id": "pictures", "instance_data_dir": str(images(folder / "images")), "image_embeds": "latents"},
        {"id": "latents", "dataset_type": "image_embeds", "aws_data_prefix": "run", **bucket},
        {"id": "texts", "dataset_type": "text_embeds", "default": True, "aws_data_prefix": "run", **bucket},
    ]
    (folder / "data.json").write_text(json.dumps(entries))
    arguments = [f"--data_backend_config={folder}/data.json", f"--output_dir={folder}/run", "--model_family=sdxl"]
    arguments += [f"--pretrained_model_name_or_path={tiny_pipeline(folder / 'model')}", "--resolution=64"]
    arguments += ["--resolution_type=pixel", "--train_batch_size=8", "--mixed_precision=auto", "--use_cpu"]
    arguments += [f"--max_train_steps={STEPS}", "--checkpoint_step_interval=0"]
    with ExitStack() as closing:
        run, waits = opened(arguments, closing), Waits()
        run.plugins.register(PluginInfo(name="waits", distribution="bench", version="0"), waits)
        run.plugins.notify(HookSpecs.on_train_start, state=run.state, info=run.info)
        loop(run)
        run.plugins.notify(HookSpecs.on_train_end, state=run.state, outcome=None)
        precision = precision_of(run.config)
    name = "cache: share of a step that waits for its batch from S3"
    return paired(name, waits.waits[2:], waits.steps[2:], unit="s", goal=0.01, precision=precision)


def write_without_bytes(folder: Path, everything: Keys, packs: int) -> None:
    """Write `packs` files, in which the entries of these keys have no bytes."""
    for place in range(packs):
        some = everything[slice(place, None, packs)]
        some = some[some.order()]
        columns = {name: np.zeros(len(some), dtype=np.uint64) for name in COLUMNS} | {"high": some.high, "low": some.low}
        (folder / f"{place:016x}.safetensors").write_bytes(encode_columns(columns, [Form(())], data=0))


def keys(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """A cache of 10^6 entries without bytes; returns functions that look for as many names, of which half are in it."""
    names = [f"shard-{number >> 10:05}/{number:09}.jpg" for number in range(2 * KEYS)]
    everything = Hasher(KEYS, "bench").texts(pa.array(names[:KEYS])).keys()
    packs = folder / "packs"
    packs.mkdir()
    store = PackStore(LocalStorage(packs), "", folder=folder / "indexes")
    write_without_bytes(packs, everything, PACKS)
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


class Slow(LocalStorage):
    """A folder with the delay of a network."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        time.sleep(DELAY)
        return super().read_range(key, start, length)


def opening(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """A cache of many small packs; returns functions that open it by an index, and by the headers of the packs."""
    packs = folder / "opened"
    packs.mkdir()
    everything = Hasher(10 * OPENED, "bench").texts(pa.array([f"{number}" for number in range(10 * OPENED)])).keys()
    write_without_bytes(packs, everything, OPENED)
    store = PackStore(LocalStorage(packs), "")
    every = store.add_indexes(store.files())
    headers = {name: size for name, size in every.items() if not name.endswith(SUFFIX)}
    assert len(headers) < len(every), "no index was written"

    def open_with(files: dict[str, int]) -> None:
        store = PackStore(Slow(packs), "")
        store.refresh(files)
        assert len(store) == 10 * OPENED

    return partial(open_with, every), partial(open_with, headers)


def timed(call: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure() -> list[Result]:
    from run import paired

    results = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, seaweed(Path(place, "server")) as server:
        cases = {
            "batches": batches(Path(place)),
            "10^6 keys": keys(Path(place)),
            "opening": opening(Path(place)),
            **remote_batches(Path(place), server),
        }
        for name, (ours, peer) in cases.items():
            ours(), peer()
            series = [(timed(ours), timed(peer)) for _ in range(PAIRS)]
            walls, cpus = ([[pair[side][kind] for pair in series] for side in (0, 1)] for kind in (0, 1))
            results.append(paired(f"cache: {name}", *walls, unit="s", goal=1.0))
            results.append(paired(f"cache: {name}, CPU", *cpus, unit="s", goal=1.0))
        results.append(waiting(Path(place), server))
    return results
