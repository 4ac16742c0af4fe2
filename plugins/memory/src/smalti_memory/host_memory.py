"""Host memory for weights that are streamed: pinned up to a limit, beyond it pages of files, which the system may drop."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import psutil
import torch
from torch import Tensor

from smalti import UserError
from smalti.checkpoint import Arena
from smalti.models import is_dry_run
from smalti.system import format_bytes

_SHARE = 0.75
"""Of the host memory that is free, what a node's ranks pin by default."""


class HostMemory:
    """Gives out ranges of memory for copies to a kind of device.

    `limit` is how many bytes may be pinned, `pinned` how many are. Files for the rest are in `folder` and have no names.
    """

    def __init__(self, kind: str, *, limit: int, folder: Path) -> None:
        self._kind, self._limit, self._folder = kind, limit, folder
        self.pinned = 0

    def take(self, size: int) -> tuple[Tensor, bool]:
        """A range, (bytes,), and whether it is pages of a file."""
        if self.pinned + size > self._limit:
            return self._mapped(size), True
        return self.pin(size), False

    def pin(self, size: int) -> Tensor:
        """A pinned range, whatever the limit."""
        self.pinned += size
        return Arena([size], self._kind).take(torch.Size([size]), torch.uint8)

    def _mapped(self, size: int) -> Tensor:
        if is_dry_run():
            return torch.empty(size, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # or else writing to the pages would kill the process
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            raise UserError(
                f"{format_bytes(size)} of streamed weights cannot be written to {self._folder}: {error.strerror}",
                fix="an --output_dir with more space, or a larger --pinned_gib",
            ) from error


def free_share(ranks: int) -> int:
    """Bytes that each of a node's ranks may pin where no option says it."""
    return int(_SHARE * psutil.virtual_memory().available / ranks)
