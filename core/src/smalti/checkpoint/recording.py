"""Writing one file of a checkpoint; its digest is taken on the way, so that nothing has to be read again.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from smalti import files
from smalti.checkpoint.manifest import FileRecord

_BLOCK = 4 * 2**20


def write_recorded(path: Path, contents: Iterable[files.Block]) -> FileRecord:
    """A new file with these contents, synced; what the manifest says about it. Takes blocks of any size."""
    digest = hashlib.sha256()
    with files.create(path) as file:
        for data in contents:
            for start in range(0, len(data), _BLOCK):  # what was hashed is still in the processor's cache when written
                block = data[start : start + _BLOCK]
                digest.update(block)
                files.write(file, block)
        files.sync(file)
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())
