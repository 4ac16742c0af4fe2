"""Whole files of any size: parts in parallel, each repeated by itself, in bounded memory."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path

from blake3 import blake3

from smalti.data import MissingFileError, StorageError
from smalti.system import fsync_directory, rename
from smalti_storage_s3.client.attempts import Attempts, Counter
from smalti_storage_s3.client.boto import BotoTransport
from smalti_storage_s3.client.errors import Fault, Kind, error_of
from smalti_storage_s3.client.transport import DIGEST, Block, Head, Transport

PART = 16 << 20
"""Bytes of a part. Files up to this size are one request."""
_MOST_PARTS = 9_000  # the stores' limit is 10,000
_AT_ONCE = 4
"""Parts in flight, and in memory."""


class Transfers:
    """Uploads and downloads of one storage. Keys are those of the bucket; `place` is the address for messages."""

    def __init__(self, boto: BotoTransport, fast: Transport, attempts: Attempts, counter: Counter, part: int = PART) -> None:
        self._boto = boto
        self._fast = fast
        self._attempts = attempts
        self._counter = counter
        self._part_size = part

    def is_large(self, size: int) -> bool:
        """Whether a write of this many bytes is sent in parts."""
        return size > self._part_size

    def upload(self, path: Path, key: str, place: str) -> None:
        """Sends a file, which must not change meanwhile."""
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()

            def part(start: int, length: int) -> bytes:
                return os.pread(file.fileno(), length, start)

            self._send(part, before.st_size, digest, key, place)
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StorageError(f"{path} changed while it was uploaded to {place}", fix="upload it again")

    def send(self, data: bytes, key: str, place: str) -> None:
        """Sends bytes from memory."""
        view = memoryview(data)
        digest = blake3(data, max_threads=blake3.AUTO).hexdigest()
        self._send(lambda start, length: view[start : start + length], len(data), digest, key, place)

    def download(self, key: str, path: Path, place: str) -> None:
        """Writes an object to a file, with the name of the file last. Parts are compared with its digest as they arrive."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with draft.open("xb") as file, ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3") as pool:
                parts = _Parts(pool)

                def fetch(start: int, head: Head) -> list[bytes]:
                    blocks = self._part(key, start, min(start + self._part_size, head.size), head.etag, place)
                    _write(file.fileno(), blocks, start)
                    return blocks

                def begin(head: Head) -> None:
                    parts.begin(partial(fetch, start, head) for start in range(self._part_size, head.size, self._part_size))

                with parts:
                    head, first = self._first_part(key, place, begin)
                    _write(file.fileno(), first, 0)
                    wanted, hasher = head.metadata.get(DIGEST), blake3()
                    for blocks in chain([first], parts.results()):
                        for block in blocks if wanted is not None else ():
                            hasher.update(block)
                if wanted is not None and hasher.hexdigest() != wanted:
                    raise error_of(Fault(Kind.DAMAGED, "WrongDigest"), place, "read")
                os.fsync(file.fileno())
            rename(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)

    def abandoned(self, prefix: str, place: str, older_than: float) -> list[tuple[str, str]]:
        """Uploads in parts below a prefix that were begun longer ago than this, in seconds."""
        found = self._attempts.run("uploads", place, lambda: self._boto.uploads(prefix))
        now = datetime.now(UTC)
        return [(key, upload) for key, upload, begun in found if (now - begun).total_seconds() > older_than]

    def abort(self, key: str, upload: str, place: str) -> None:
        with suppress(MissingFileError):
            self._attempts.run("uploads", place, lambda: self._boto.abort(key, upload))

    # --- up --------------------------------------------------------------------------------------------------------

    def _send(self, part: Callable[[int, int], Block], size: int, digest: str, key: str, place: str) -> None:
        metadata = {DIGEST: digest}
        if not self.is_large(size):
            data = part(0, size)
            self._attempts.run("write", place, lambda: self._fast.put(key, data, metadata), sent=size)
            return
        upload = self._attempts.run("write", place, lambda: self._boto.begin(key, metadata))
        length = max(self._part_size, -(-size // _MOST_PARTS))
        starts = range(0, size, length)
        etags = [""] * len(starts)

        def send(number: int) -> None:
            start = starts[number]
            data = part(start, min(length, size - start))

            def request() -> str:
                return self._boto.part(key, upload, number + 1, data)

            etags[number] = self._attempts.run("write", place, request, sent=len(data))

        try:
            _in_parallel(send, range(len(starts)))
            self._complete(key, upload, etags, Head(size=size, etag="", metadata=metadata), place)
        except BaseException:
            with suppress(StorageError):
                self.abort(key, upload, place)
            raise

    def _complete(self, key: str, upload: str, etags: list[str], wanted: Head, place: str) -> None:
        """Completes an upload, and looks whether the store has it. A lost reply looks like an upload that is not there."""
        lost: MissingFileError | None = None
        try:
            self._attempts.run("write", place, lambda: self._boto.complete(key, upload, etags))
        except MissingFileError as error:
            lost = error
        found = self._attempts.run("stat", place, lambda: self._fast.head(key))
        if (found.size, found.metadata.get(DIGEST)) != (wanted.size, wanted.metadata[DIGEST]):
            raise lost or StorageError(f"{place}: the store has another file than was sent", fix="upload it again")

    # --- down ------------------------------------------------------------------------------------------------------

    def _first_part(self, key: str, place: str, begin: Callable[[Head], None]) -> tuple[Head, list[bytes]]:
        """The first part, with what the store says about the whole object: with this, `begin` is called before it is read."""
        heads: list[Head] = []

        def request() -> list[bytes]:
            try:
                answer = self._fast.get(key, 0, self._part_size, heads[0].etag if heads else None)
            except Fault as fault:
                if fault.kind is not Kind.RANGE:
                    raise
                answer = self._fast.get(key, 0, None, None)  # an empty object has no ranges
            if not heads:
                heads.append(answer.head)
                begin(answer.head)
            return self._received(answer.blocks, min(self._part_size, heads[0].size))

        blocks = self._attempts.run("read", place, request)
        return heads[0], blocks

    def _part(self, key: str, start: int, end: int, etag: str, place: str) -> list[bytes]:
        def request() -> list[bytes]:
            answer = self._fast.get(key, start, end, etag)
            if answer.start != start:
                raise Fault(Kind.TRANSIENT, "WrongRange", status=206, detail="the answer is another range")
            return self._received(answer.blocks, end - start)

        try:
            return self._attempts.run("read", place, request)
        except Fault as fault:
            raise error_of(fault, place, "read") from None

    def _received(self, blocks: Iterable[bytes], wanted: int) -> list[bytes]:
        found = list(blocks)
        length = sum(map(len, found))
        self._counter.add("read", received=length)
        if length != wanted:
            raise Fault(Kind.TRANSIENT, "Incomplete", detail="the answer was cut off")
        return found


class _Parts:
    """Parts that threads read ahead, in order. An error, also one of who uses them, ends what has not begun."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._rest: Iterator[Callable[[], list[bytes]]] = iter(())
        self._waiting: deque[Future[list[bytes]]] = deque()

    def begin(self, calls: Iterable[Callable[[], list[bytes]]]) -> None:
        self._rest = iter(calls)
        self._waiting.extend(self._pool.submit(call) for call in islice(self._rest, _AT_ONCE))

    def results(self) -> Iterator[list[bytes]]:
        while self._waiting:
            found = self._waiting.popleft().result()
            self._waiting.extend(self._pool.submit(call) for call in islice(self._rest, 1))
            yield found

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_error: object) -> None:
        for future in self._waiting:
            future.cancel()


def _write(file: int, blocks: Iterable[bytes], start: int) -> None:
    for block in blocks:
        view = memoryview(block)
        while view:
            count = os.pwrite(file, view, start)
            view, start = view[count:], start + count


def _in_parallel(work: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Calls `work` for each number, a few at once. After an error no further call begins."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3") as pool:
        futures = [pool.submit(work, number) for number in numbers]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
