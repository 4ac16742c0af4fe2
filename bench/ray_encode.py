"""Encoding for a run on a Ray cluster of two nodes: CPU seconds an image of all its processes, against one process without Ray,
and the peak memory of Ray's object store for ten times as many images.

Latents and captions of a tiny SDXL. What a start costs is left out: each side encodes two datasets, both of enough images
for two workers, and the difference counts. Most of the CPU time of an image is its file and its entry in the cache, since the
model is small; with a real one it is less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from PIL import Image
from sdxl import tiny_pipeline
from sizes import sized
from step import ROOT

if TYPE_CHECKING:
    from run import Result

    from support.raylets import Raylets

SIZES = (sized(500, short=8), sized(5000, short=80), sized(15_000, short=120))
"""Of the datasets: memory is compared between the first two, time between the last two."""
EDGE = 64
NODES = 2
_EVERY = 0.1


class Processes:
    """The CPU time of a session of processes, those that have ended included, but for their last tenth of a second."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._seconds: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        for each in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(each.pid) == self._session:
                    times = each.cpu_times()
                    self._seconds[each.pid] = times.user + times.system

    @property
    def seconds(self) -> float:
        self._look()
        return sum(self._seconds.values())

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def encode(model: Path, data: Path, cache: Path, *more: str) -> float:
    """CPU seconds of the command and of the processes that it has waited for."""
    command = [sys.executable, "-m", "smalti", "cache", "encode", "--model_family=sdxl", "--use_cpu", "--train_batch_size=8"]
    command += [f"--pretrained_model_name_or_path={model}", f"--instance_data_dir={data}", f"--resolution={EDGE}"]
    command += ["--resolution_type=pixel", f"--cache_dir={cache}", *more]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(errors.decode())
    return usage.ru_utime + usage.ru_stime


def object_stores(cluster: Raylets) -> float:
    """MiB that the object stores of all nodes have written so far: a store keeps the pages of its file in memory."""
    found = 0
    for _, raylet in cluster.nodes:
        sizes = []
        for each in Path(f"/proc/{raylet}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if "/plasma" in f"{each.readlink()}":
                    sizes.append(each.stat().st_blocks * 512)
        if not sizes:
            raise RuntimeError("a raylet without the file of an object store")
        found += sum(sizes)
    return found / 2**20


def draw(folder: Path, number: int) -> Path:
    """Images, all of them different, with captions."""
    folder.mkdir()
    for each in range(number):
        Image.new("RGB", (EDGE, EDGE), (each % 256, each // 256, 99)).save(folder / f"{each:05}.png")
        (folder / f"{each:05}.txt").write_text(f"colour {each}")
    return folder


def measure() -> list[Result]:
    sys.path.insert(0, str(ROOT / "tests"))
    from run import paired

    from support.raylets import Raylets

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny_pipeline(folder / "model")
        data = [draw(folder / f"images-{number}", number) for number in SIZES]
        plain = [encode(model, each, folder / f"plain-{each.name}") for each in data]
        cluster = Raylets(folder)
        try:
            for _ in range(NODES):
                cluster.add()
            processes = Processes(cluster.session)
            found, stores = [], []
            for each in data:
                before = processes.seconds
                flags = ["--engine=ray", f"--address={cluster.address}", f"--engine_workers={NODES}"]
                own = encode(model, each, folder / f"ray-{each.name}", *flags)
                found.append(own + processes.seconds - before)
                stores.append(object_stores(cluster))
            processes.close()
        finally:
            cluster.close()
    ours, peer = ((many - few) / (SIZES[2] - SIZES[1]) for _, few, many in (found, plain))
    return [
        paired("Ray: CPU time of an encoded image", [ours], [peer], unit="s", goal=1.15),
        paired("Ray: object stores, ten times the images", [stores[1]], [stores[0]], unit="MiB", goal=1.1),
    ]
