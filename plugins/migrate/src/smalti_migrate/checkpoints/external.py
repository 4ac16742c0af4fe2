"""Reads a checkpoint of another trainer in a separate process.

Such files may contain pickles. Their readers load only tensors and plain values, and errors, including crashes, stay in that
process: this one receives names, JSON and bytes. Run as `python -m smalti_migrate.checkpoints.external`, this
module is the other process.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, cast

from smalti import CheckpointError, CheckpointFormat, UserError
from smalti.checkpoint import ITEM_SIZES, Contents, Source, StoredTensor
from smalti.system import Block, load_json

_BLOCK = 4 * 2**20
_CONTENTS, _DATA, _END, _ERROR = b"contents", b"data", b"end", b"error"
"""Kinds of messages from the other process. It receives names of tensors only; an empty one ends it."""
_LETTERS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U"}
"""Types of torch and numpy, and the same ones in safetensors."""


# --- this process ---------------------------------------------------------------------------------------------------


class ExternalSource:
    """A `Source` in another process."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], connection: Connection, output: IO[bytes]) -> None:
        self._path = path
        self._process = process
        self._line = connection
        self._output = output
        self.contents = decoded(self._receive(_CONTENTS)[1])

    def read(self, name: str) -> Iterator[Block]:
        with suppress(OSError):  # if it has ended, receiving reports it
            self._line.send_bytes(name.encode())
        remaining = self.contents.tensors[name].size
        while (message := self._receive(_DATA, _END))[0] == _DATA:
            remaining -= len(message[1])
            yield message[1]
        if remaining:
            raise CheckpointError(f"{self._path}: {name} does not have the size of its shape")

    def _receive(self, *expected: bytes) -> tuple[bytes, bytes]:
        try:
            kind, data = self._line.recv_bytes(), self._line.recv_bytes()
        except (EOFError, OSError):
            self._process.wait()
            raise CheckpointError(f"{self._path} cannot be read: {self._last_output_line()}") from None
        if kind == _ERROR:
            error_message = load_json(data)
            raise CheckpointError(error_message["message"], fix=error_message["fix"])
        assert kind in expected, f"{kind!r} is unexpected"
        return kind, data

    def _last_output_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"the process that reads it ended with status {self._process.returncode}"


@contextmanager
def opened(path: Path, kind: CheckpointFormat) -> Iterator[Source]:
    """Open the checkpoint at `path` with the factory of its format, in another process, which ends with the block."""
    local, remote = Pipe()
    command = [
        sys.executable,
        "-P",
        "-m",
        "smalti_migrate.checkpoints.external",
        str(remote.fileno()),
        kind.factory,
        str(path),
    ]
    with local, tempfile.TemporaryFile() as output:
        with remote:
            process = subprocess.Popen(
                command, pass_fds=(remote.fileno(),), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            source = ExternalSource(path, process, local, output)
            _check_types(source.contents, kind)
            yield source
        finally:
            with suppress(OSError):  # it has ended already
                local.send_bytes(b"")
            local.close()
            process.terminate()
            process.wait()


def _check_types(contents: Contents, kind: CheckpointFormat) -> None:
    """Raises CheckpointError if the reader of the format gives a tensor a type that there is not, such as torch's "float32"."""
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in ITEM_SIZES:
            meant = re.sub(r"^(?:torch\.)?([a-z]*)", lambda word: _LETTERS.get(word[1], word[1]), tensor.dtype).upper()
            message = f"{kind.kind} {kind.name!r} of {kind.origin} gives {name} the type {tensor.dtype!r}, which is unknown"
            known = repr(meant) if meant in ITEM_SIZES else f"one of {', '.join(ITEM_SIZES)}"
            raise CheckpointError(
                message, fix=f"its StoredTensor needs dtype={known}, as in safetensors; {kind.origin.workaround}"
            )


def decoded(data: bytes) -> Contents:
    """The contents that the other process has encoded."""
    body = load_json(data)
    body["tensors"] = {
        name: StoredTensor(dtype=t["dtype"], shape=tuple(t["shape"]), chunks=t["chunks"]) for name, t in body["tensors"].items()
    }
    return Contents(**body | {key: tuple(body[key]) for key in ("plugins", "flags", "notices")})


# --- the other process ----------------------------------------------------------------------------------------------


def encoded(contents: Contents) -> bytes:
    """The contents for the other process."""
    return json.dumps(asdict(contents), allow_nan=False).encode()


def main(descriptor: int, factory: str, path: Path) -> None:
    """Send tensors on request, until the connection ends."""
    connection = Connection(descriptor)
    try:
        source = cast(Callable[[Path], Source], resolve_name(factory))(path)
        _send(connection, _CONTENTS, encoded(source.contents))
        while name := _requested_name(connection):
            for data in source.read(name):
                for start in range(0, len(data), _BLOCK):
                    _send(connection, _DATA, data[start : start + _BLOCK])
            _send(connection, _END, b"")
    except UserError as error:
        _send(connection, _ERROR, json.dumps({"message": error.message, "fix": error.fix}).encode())


def _requested_name(connection: Connection) -> str:
    try:
        return connection.recv_bytes().decode()
    except EOFError:
        return ""


def _send(connection: Connection, kind: bytes, data: Block) -> None:
    connection.send_bytes(kind)
    connection.send_bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
