"""An allocator of torch's that counts, compiled when it is first needed, in a second."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")


class Allocations:
    """Bytes that torch has allocated on the CPU in this process since `counting`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("allocations_held", "allocations_most"):
            getattr(library, name).restype = ctypes.c_longlong
        library.allocations_install()

    @property
    def held(self) -> int:
        return int(self._library.allocations_held())

    def most(self) -> int:
        """The most that was held since the last call."""
        found = int(self._library.allocations_most())
        self._library.allocations_reset()
        return found


@cache
def counting() -> Allocations:
    """From now on torch allocates what it needs on the CPU from an allocator that counts."""
    return Allocations(ctypes.CDLL(str(_compiled())))


def _compiled() -> Path:
    place = Path(torch.__file__).parent
    digest = hashlib.sha256(_SOURCE.read_bytes() + f"{version('torch')} {place}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(tempfile.gettempdir()) / "smalti-tests"))
    built = folder / f"allocations-{digest}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / built.name
            options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{place / 'include'}"]
            libraries = [f"-L{place / 'lib'}", "-lc10", f"-Wl,-rpath,{place / 'lib'}"]
            subprocess.run(["c++", *options, str(_SOURCE), "-o", str(made), *libraries], check=True)
            made.rename(built)
    return built
