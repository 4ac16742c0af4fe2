"""The files that DeepSpeed swaps to a drive: with room for what they are to hold, and with a word when they fail.

DeepSpeed 0.19 does not look at what became of a transfer. On a full drive a rank would be aborted when it reads what was cut
off, or go on with what was there before. So room is taken for each file before it is first written.
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
    """What a rank swaps to its drive cannot be written there, or is no longer there to be read."""

    exit_code = ExitCode.FAILED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"cannot swap to {path}: {reason}",
            fix="check that drive and its free space, then run the same command to resume",
        )


@contextmanager
def failures_explained(document: Mapping[str, object]) -> Iterator[None]:
    """Whatever DeepSpeed makes in this block to swap to a drive says why it cannot, with a SwapError."""
    zero = section(document, "zero_optimization")
    if not any(section(zero, key).get("device") == "nvme" for key in ("offload_param", "offload_optimizer")):
        yield
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    operations = AsyncIOBuilder().load(verbose=False)
    with replaced(operations, "aio_handle", careful(operations.aio_handle)):
        yield


def careful(handle: Any) -> Any:
    """A kind of DeepSpeed's handle whose writes find room, and whose failures are SwapErrors."""

    class Careful(handle):  # type: ignore[misc]
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)
            self._roomy: set[str] = set()

        def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
            if path not in self._roomy:
                _take_room(path, offset + buffer.nbytes)
                self._roomy.add(path)
            if (answer := super().async_pwrite(buffer, path, offset)) != 0:
                _take_room(path, offset + buffer.nbytes)  # finds the reason, if it still is one
            return _accepted(answer, path)

        def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
            _see(path, offset + buffer.nbytes)
            return _accepted(super().async_pread(buffer, path, offset), path)

    return Careful


def _take_room(path: str, length: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, length)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SwapError(path, error.strerror or str(error)) from error


def _see(path: str, length: int) -> None:
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise SwapError(path, error.strerror or str(error)) from error
    if size < length:
        raise SwapError(path, f"it has {size} bytes of the {length} that were written")


def _accepted(answer: int, path: str) -> int:
    if answer != 0:
        raise SwapError(path, "DeepSpeed cannot open it")
    return answer
