"""Which accelerators of this node are free, as the driver's own program says. Imports no torch and loads no driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_SECONDS = 20.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The GPUs of this node that the server may use: all of them, and those with a process on them, by index.

    `error` says why the driver could not be asked; then all count as busy. A node without GPUs trains on its processors.
    """

    gpus: tuple[int, ...] = ()
    busy: frozenset[int] = frozenset()
    error: str = ""

    def free(self, reserved: Collection[int] = ()) -> tuple[int, ...]:
        """Those without a process, but the `reserved` ones."""
        return tuple(gpu for gpu in self.gpus if gpu not in self.busy and gpu not in reserved) if not self.error else ()


def local_devices() -> Devices:
    """The GPUs of this node, asked with nvidia-smi. CUDA_VISIBLE_DEVICES of the server limits them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Devices()
    try:
        listed = _rows(program, "--query-gpu=index,uuid")
        used = _rows(program, "--query-compute-apps=gpu_uuid,pid")
    except (OSError, subprocess.SubprocessError) as error:
        return Devices(error=f"nvidia-smi does not answer: {error}")
    by_uuid = {row[1]: int(row[0]) for row in listed if len(row) == 2 and row[0].isdigit()}
    allowed = _visible(by_uuid)
    busy = {by_uuid[row[0]] for row in used if row[0] in by_uuid}
    return Devices(gpus=allowed, busy=frozenset(busy & set(allowed)))


def _visible(by_uuid: dict[str, int]) -> tuple[int, ...]:
    """The devices that CUDA_VISIBLE_DEVICES names, by index or by UUID; all without it."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return tuple(sorted(by_uuid.values()))
    found = []
    for word in filter(None, (each.strip() for each in given.split(","))):
        index = int(word) if word.isdigit() else next((gpu for uuid, gpu in by_uuid.items() if uuid.startswith(word)), -1)
        if index not in by_uuid.values():
            break  # as CUDA does, which ignores what follows
        found.append(index)
    return tuple(found)


def _rows(program: str, query: str) -> Sequence[list[str]]:
    done = subprocess.run(
        [program, query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
