"""New folders, which are complete or absent: filled under a hidden name, and renamed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from smalti.checkpoint.format.manifest import FileRecord
from smalti.checkpoint.format.safetensors_layout import StoredTensor
from smalti.errors import ExitCode, UserError
from smalti.system import files


class ConversionError(UserError):
    """A conversion or export could not be written. No file of it remains."""

    exit_code = ExitCode.FAILED


def check_new(target: Path) -> None:
    """Raises UserError if there is something at `target`: before work whose result could not be written."""
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists, and nothing is overwritten", fix="choose a new folder")


def make_folder(target: Path, write: Callable[[Path], dict[str, FileRecord]]) -> dict[str, FileRecord]:
    """Let `write` fill a hidden folder, and rename it to the target; removes it if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".partial-{target.name}-{secrets.token_hex(4)}"
    files.make_directory(partial)
    try:
        records = write(partial)
        files.fsync_directory(partial)
        if target.exists():
            raise UserError(f"{target} was created by another process in the meantime, and nothing is overwritten")
        files.rename(partial, target)
    finally:
        if partial.exists():
            files.remove_tree(partial)
    files.fsync_directory(target.parent)
    return records


def check_free_space(folder: Path, tensors: Iterable[StoredTensor]) -> None:
    """Raises ConversionError, before anything is written, if there is not enough free space for these tensors."""
    free, needed = files.free_bytes(folder), sum(tensor.size for tensor in tensors)
    if free is not None and needed > free:
        raise ConversionError(f"{needed / 2**30:.2f} GiB needed, but only {free / 2**30:.2f} GiB free", fix="free space there")
