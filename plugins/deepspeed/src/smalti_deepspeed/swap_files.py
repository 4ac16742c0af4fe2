"""Files that DeepSpeed swaps to a drive: with reserved space, and with errors that say what failed.

DeepSpeed 0.19 does not check the result of a transfer. On a full drive a rank would be aborted when it reads a truncated file,
or continue with old contents. So space is reserved for each file before it is first written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from smalti import ExitCode, UserError
from smalti_deepspeed.parsing import section
from smalti_deepspeed.startup import replaced


class SwapError(UserError):
    """A rank cannot write to its swap file, or can no longer read it."""

    exit_code = ExitCode.FAILED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"cannot swap to {path}: {reason}",
            fix="check the drive and its free space, then run the same command to resume",
        )


@contextmanager
def failures_explained(document: Mapping[str, object]) -> Iterator[None]:
    """Swapping that is set up in this block raises SwapError if it fails."""
    zero = section(document, "zero_optimization")
    if not any(section(zero, key).get("device") == "nvme" for key in ("offload_param", "offload_optimizer")):
        yield
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    operations = AsyncIOBuilder().load(verbose=False)
    with replaced(operations, "aio_handle", checked(operations.aio_handle)):
        yield


def checked(handle: Any) -> Any:
    """A subclass of DeepSpeed's I/O handle that reserves space before writing and raises SwapError on failures."""

    class Checked(handle):  # type: ignore[misc]
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)
            self._reserved: set[str] = set()

        def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
            if path not in self._reserved:
                _reserve(path, offset + buffer.nbytes)
                self._reserved.add(path)
            if (answer := super().async_pwrite(buffer, path, offset)) != 0:
                _reserve(path, offset + buffer.nbytes)  # raises with the reason, if there still is one
            return _check_answer(answer, path)

        def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
            _check_length(path, offset + buffer.nbytes)
            return _check_answer(super().async_pread(buffer, path, offset), path)

    return Checked


def _reserve(path: str, length: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, length)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SwapError(path, error.strerror or str(error)) from error


def _check_length(path: str, length: int) -> None:
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise SwapError(path, error.strerror or str(error)) from error
    if size < length:
        raise SwapError(path, f"it has {size} of the {length} bytes that were written")


def _check_answer(answer: int, path: str) -> int:
    if answer != 0:
        raise SwapError(path, "DeepSpeed cannot open it")
    return answer
