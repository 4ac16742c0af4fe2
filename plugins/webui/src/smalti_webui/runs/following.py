"""Following the events of a run by byte offsets: complete lines only, and those of other nodes in the order of time.

Lines are not parsed unless more than one node has written, so 50,000 waiting events cost little more than their bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from smalti.rundir import RunDirectory
from smalti.system import load_json, open_regular

CHUNK = 1 << 18
"""Bytes that are read of a file at a time."""
_LONGEST = 1 << 24
"""A longer line is not an event; it is skipped."""
STEP_LINES = (b'{"type":"step"', b'{"type": "step"')
"""How the line of a step begins: most lines are of steps, and need not be parsed to pass over them."""
_NODE_FILE = re.compile(r"events\.node-(\d+)\.jsonl")
_POSITION = re.compile(r"\d{1,18}(\+\d{1,6}=\d{1,18})*")


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far the events of a run have been read: a byte offset, and one for each other node that has written.

    As text it is "1234", or "1234+1=56+2=78" with nodes 1 and 2.
    """

    offset: int = 0
    nodes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """The position that a text stands for; None if it is not one."""
        if not _POSITION.fullmatch(text):
            return None
        first, *rest = text.split("+")
        pairs = (each.split("=") for each in rest)
        return cls(offset=int(first), nodes={int(node): int(offset) for node, offset in pairs})

    def __str__(self) -> str:
        return "+".join([str(self.offset), *(f"{node}={offset}" for node, offset in sorted(self.nodes.items()))])

    def of(self, node: int) -> int:
        return self.nodes.get(node, 0) if node else self.offset

    def with_node(self, node: int, offset: int) -> Position:
        if node:
            return Position(offset=self.offset, nodes={**self.nodes, node: offset})
        return Position(offset=offset, nodes=self.nodes)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some lines without their newlines, the position after them, and whether more are waiting.

    `replaced`: the file is shorter than what was read of it, so it is another file and has to be read from its beginning.
    """

    lines: list[bytes]
    position: Position
    more: bool = False
    replaced: bool = False


class Follower:
    """Reads what has been added to the events of a run since a position."""

    def __init__(self, directory: RunDirectory, position: Position | None = None) -> None:
        self.directory = directory
        self.position = position or Position()

    def read(self, chunk: int = CHUNK) -> Batch:
        """The next lines; none if there are none yet. About `chunk` bytes at most for each node."""
        pieces: dict[int, _Piece] = {}
        for node, path in _files(self.directory):
            found = _piece(path, self.position.of(node), chunk)
            if found is None:
                self.position = Position()
                return Batch(lines=[], position=self.position, replaced=True)
            if found.end > self.position.of(node) or found.more:
                pieces[node] = found
        if set(pieces) <= {0}:
            piece = pieces.get(0)
            if piece is None:
                return Batch(lines=[], position=self.position)
            self.position = self.position.with_node(0, piece.end)
            return Batch(lines=[line for line in piece.lines if line], position=self.position, more=piece.more)
        return self._merged(pieces)

    def _merged(self, pieces: dict[int, _Piece]) -> Batch:
        """The lines of several nodes by time, up to the time until which all of them are known."""
        timed = {node: list(_timed(piece, self.position.of(node))) for node, piece in pieces.items()}
        last = {node: lines[-1][0] for node, lines in timed.items() if lines}
        known = min((last[node] for node, piece in pieces.items() if piece.more and node in last), default=float("inf"))
        merged = sorted((time, node, end, line) for node, lines in timed.items() for time, end, line in lines if time <= known)
        for node, piece in pieces.items():
            kept = [end for _, each, end, _ in merged if each == node]
            complete = not timed[node] or len(kept) == len(timed[node])
            if kept or complete:
                self.position = self.position.with_node(node, piece.end if complete else kept[-1])
        lines = [_with_node(line, node) for _, node, _, line in merged if line]
        return Batch(lines=lines, position=self.position, more=any(piece.more for piece in pieces.values()))


@dataclass(frozen=True, kw_only=True)
class _Piece:
    lines: list[bytes]
    end: int
    more: bool


def _files(directory: RunDirectory) -> Iterator[tuple[int, Path]]:
    for path in directory.event_files():
        if path == directory.events_file:
            yield 0, path
        elif found := _NODE_FILE.fullmatch(path.name):
            yield int(found[1]), path


def _piece(path: Path, offset: int, chunk: int) -> _Piece | None:
    """The complete lines from an offset on; None if the file is shorter than that."""
    try:
        file = open_regular(path)
    except OSError:
        return _Piece(lines=[], end=offset, more=False)
    with file:
        size = os.fstat(file.fileno()).st_size
        if size < offset:
            return None
        file.seek(offset)
        data = _complete(file, chunk)
        if data is None:  # no newline in a very long piece
            end = _next_line(file, offset)
            return _Piece(lines=[], end=end, more=end > offset)
        more = bool(data) and size > offset + max(chunk, len(data))
        return _Piece(lines=data.split(b"\n")[:-1], end=offset + len(data), more=more)


def complete_lines(path: Path, offset: int) -> tuple[list[bytes], int, bool]:
    """The next complete lines of a file, the offset after them, and whether more are waiting. An empty line is left out."""
    piece = _piece(path, offset, CHUNK)
    if piece is None:
        return [], 0, False
    return [line for line in piece.lines if line], piece.end, piece.more


def _complete(file: BinaryIO, chunk: int) -> bytes | None:
    """The next bytes up to the last newline among them; empty if no line is complete yet. None if a line is too long."""
    data = file.read(chunk)
    while (newline := data.rfind(b"\n")) < 0 and len(data) >= chunk:
        if len(data) > _LONGEST:
            return None
        chunk *= 2
        data += file.read(chunk - len(data))
    return data[: newline + 1]


def _next_line(file: BinaryIO, offset: int) -> int:
    """The end of a line that is too long to be kept; `offset` if its end has not been written yet."""
    file.seek(offset)
    end = offset
    while data := file.read(CHUNK):
        if (newline := data.find(b"\n")) >= 0:
            return end + newline + 1
        end += len(data)
    return offset


def _timed(piece: _Piece, offset: int) -> Iterator[tuple[float, int, bytes]]:
    """The lines with their times and ends. A time before that of the line before it counts as the latter's."""
    latest = 0.0
    for line in piece.lines:
        offset += len(line) + 1
        latest = max(latest, time_of(line))
        yield latest, offset, line


def end_of(directory: RunDirectory) -> Position:
    """The position after all complete lines."""
    position = Position()
    for node, path in _files(directory):
        last = next(backwards(path), None)
        position = position.with_node(node, last[0] + len(last[1]) + 1 if last else 0)
    return position


def time_of(line: bytes) -> float:
    """The time of an event; 0 if the line is not one."""
    try:
        found = load_json(line)["t"]
        return float(found) if isinstance(found, int | float) else 0.0
    except (ValueError, TypeError, KeyError, OverflowError):
        return 0.0


def _with_node(line: bytes, node: int) -> bytes:
    if not node or b'"node":' in line or not line.endswith(b"}"):
        return line
    return line[:-1] + b',"node":%d}' % node


def backwards(path: Path, end: int | None = None, block: int = CHUNK) -> Iterator[tuple[int, bytes]]:
    """The complete lines before byte `end` with their offsets, last one first, without reading what is not asked for.

    Reads `block` bytes at a time, and more of a line that is longer.
    """
    try:
        file = open_regular(path)
    except OSError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        start = size if end is None else min(end, size)
        rest, terminated = b"", False  # the beginning of a line that continues behind it, and whether its end is there
        while start > 0:
            count = min(block, start)
            start -= count
            file.seek(start)
            rest = file.read(count) + rest
            parts = rest.split(b"\n")
            if len(parts) == 1:
                block *= 2  # a long line costs linear time
            place = start + len(rest)
            for line in reversed(parts[1:]):
                place -= len(line)
                if line and terminated:
                    yield place, line
                terminated = True
                place -= 1
            rest = parts[0]
        if rest and terminated:
            yield 0, rest
