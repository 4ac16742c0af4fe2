"""Reads a checkpoint of another maker in a process of its own.

Such files may hold pickles. Whatever reads them admits tensors and plain values only, and what goes wrong in it, a crash
included, stays there: this process gets names, JSON and bytes. Run as `python -m smalti.checkpoint.conversion.external`, this
module is the other process.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, cast

from smalti.checkpoint.conversion.formats import Contents, Source
from smalti.errors import CheckpointError, UserError
from smalti.system import Block
from smalti.types import CheckpointFormat

_BLOCK = 4 * 2**20
_CONTENTS, _DATA, _END, _ERROR = b"contents", b"data", b"end", b"error"
"""What the next message of the other process is. From here there are names of tensors only; an empty one says good-bye."""


# --- on this side ---------------------------------------------------------------------------------------------------


class ExternalSource:
    """A `Source` in another process."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], line: Connection, output: IO[bytes]) -> None:
        self._path = path
        self._process = process
        self._line = line
        self._output = output
        self.contents = Contents.decode(self._receive(_CONTENTS)[1])

    def read(self, name: str) -> Iterator[Block]:
        with suppress(OSError):  # if it has ended, there is no answer either
            self._line.send_bytes(name.encode())
        left = self.contents.tensors[name].size
        while (message := self._receive(_DATA, _END))[0] == _DATA:
            left -= len(message[1])
            yield message[1]
        if left:
            raise CheckpointError(f"{self._path}: {name} does not have the bytes that its shape asks for")

    def _receive(self, *expected: bytes) -> tuple[bytes, bytes]:
        try:
            kind, data = self._line.recv_bytes(), self._line.recv_bytes()
        except (EOFError, OSError):
            self._process.wait()
            raise CheckpointError(f"{self._path} cannot be read: {self._last_words()}") from None
        if kind == _ERROR:
            told = json.loads(data)
            raise CheckpointError(told["message"], fix=told["fix"])
        assert kind in expected, f"{kind!r} came out of turn"
        return kind, data

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"the process that reads it ended with status {self._process.returncode}"


@contextmanager
def opened(path: Path, kind: CheckpointFormat) -> Iterator[Source]:
    """The checkpoint at `path`, read by the factory of its format in another process; that ends with the block."""
    ours, theirs = Pipe()
    words = [sys.executable, "-P", "-m", "smalti.checkpoint.conversion.external", str(theirs.fileno()), kind.factory, str(path)]
    with ours, tempfile.TemporaryFile() as output:
        with theirs:
            process = subprocess.Popen(
                words, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            yield ExternalSource(path, process, ours, output)
        finally:
            with suppress(OSError):  # it has ended by itself
                ours.send_bytes(b"")
            ours.close()
            process.terminate()
            process.wait()


# --- on the other side ----------------------------------------------------------------------------------------------


def main(descriptor: int, factory: str, path: Path) -> None:
    """Read tensors as they are asked for, until there is nobody to ask."""
    line = Connection(descriptor)
    try:
        source = cast(Callable[[Path], Source], resolve_name(factory))(path)
        _send(line, _CONTENTS, source.contents.encode())
        while name := _asked_for(line):
            for data in source.read(name):
                for start in range(0, len(data), _BLOCK):
                    _send(line, _DATA, data[start : start + _BLOCK])
            _send(line, _END, b"")
    except UserError as error:
        _send(line, _ERROR, json.dumps({"message": error.message, "fix": error.fix}).encode())


def _asked_for(line: Connection) -> str:
    try:
        return line.recv_bytes().decode()
    except EOFError:
        return ""


def _send(line: Connection, kind: bytes, data: Block) -> None:
    line.send_bytes(kind)
    line.send_bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
