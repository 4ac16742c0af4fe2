"""A bucket, or a part of one, as a storage."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from hashlib import md5
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from smalti.data import Storage, StoredFile, Traffic, checked_key, file_columns
from smalti_storage_s3.client.attempts import Attempts, Counter, Timeouts
from smalti_storage_s3.client.boto import BotoTransport
from smalti_storage_s3.client.errors import Fault, Kind, error_of
from smalti_storage_s3.client.fast import open_fast
from smalti_storage_s3.client.listing import pages
from smalti_storage_s3.client.settings import S3Settings, settings_of, settings_of_url
from smalti_storage_s3.client.transfers import PART, Transfers
from smalti_storage_s3.client.transport import DIGEST, WRITER, Block, Head, Page, Transport

if TYPE_CHECKING:
    import pyarrow as pa

    from smalti.data import DatasetSpec

_ROWS = 1 << 16
_MD5_LENGTH = 32
_creates_once: dict[tuple[str | None, str], bool] = {}
"""What was found by trying, by endpoint and bucket."""


def open_dataset(spec: DatasetSpec) -> S3Storage:
    """The storage of a dataset of type "aws". Sends nothing."""
    return S3Storage(settings_of(spec.storage_options, f"dataset {spec.id!r}"))


def open_url(url: str) -> S3Storage:
    """The storage of s3://bucket/prefix, with the credentials and the endpoint of the environment. Sends nothing."""
    return S3Storage(settings_of_url(url))


class S3Storage(Storage):
    """Objects of a bucket below a prefix. What it writes has a digest in its metadata, which whole reads are checked with.

    `fast` false: boto3 also for small objects. `part`: bytes of a part of a large file. Safe for threads, and for use
    before and after a fork.
    """

    deletes = lists_ranges = True

    def __init__(self, settings: S3Settings, *, timeouts: Timeouts | None = None, fast: bool = True, part: int = PART) -> None:
        self._settings = settings
        self._timeouts = timeouts or Timeouts()
        self._wants_fast = fast
        self._part = part
        self._counter = Counter()
        self._attempts = Attempts(self._timeouts, self._counter)
        self._lock = threading.Lock()
        self._opened: tuple[int, BotoTransport, Transport] | None = None
        self._other_etags = False  # whether etags that look like MD5 are something else here

    @property
    def location(self) -> str:
        return self._settings.location

    @property
    def identity(self) -> str:
        return self._settings.identity

    @property
    def prefix(self) -> str:
        """The folder in the bucket: empty, or with "/" at its end."""
        return self._settings.prefix

    @property
    def transport(self) -> str:
        """The name of the library that small objects are read and written with."""
        return self._fast.name

    def traffic(self) -> dict[str, Traffic]:
        return self._counter.snapshot()

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[StoredFile]:
        for page in self._pages(prefix, after):
            for key, size, etag in zip(page.keys, page.sizes, page.etags, strict=True):
                yield StoredFile(key=key, size=size, etag=etag)

    def list_columns(self, prefix: str = "", *, after: str = "") -> Iterator[pa.RecordBatch]:
        keys: list[str] = []
        sizes: list[int] = []
        etags: list[str] = []
        for page in self._pages(prefix, after):
            keys += page.keys
            sizes += page.sizes
            etags += page.etags
            if len(keys) >= _ROWS:
                yield file_columns(keys, sizes, etags)
                keys, sizes, etags = [], [], []
        if keys:
            yield file_columns(keys, sizes, etags)

    def stat(self, key: str) -> StoredFile:
        full, place = self._full(key)
        head = self._attempts.run("stat", place, lambda: self._fast.head(full))
        return StoredFile(key=key, size=head.size, etag=head.etag)

    def read(self, key: str) -> bytes:
        full, place = self._full(key)
        reading = _Reading()

        def request() -> bytes:
            try:
                reading.go_on(self._fast, full, None)
            finally:
                self._counter.add("read", received=reading.take_count())
            return self._verified(reading)

        try:
            return self._attempts.run("read", place, request)
        except Fault as fault:  # a range that begins at the end of an object: nothing was left to read
            raise error_of(fault, place, "read") from None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        full, place = self._full(key)
        if length <= 0:
            return b""
        reading = _Reading(start=start)

        def request() -> bytes:
            try:
                reading.go_on(self._fast, full, start + length)
            finally:
                self._counter.add("read", received=reading.take_count())
            return reading.data()

        try:
            return self._attempts.run("read", place, request)
        except Fault as fault:
            if fault.kind is Kind.RANGE:
                return b""
            raise error_of(fault, place, "read") from None

    def write(self, key: str, data: bytes) -> None:
        full, place = self._full(key)
        if self._transfers.is_large(len(data)):
            self._transfers.send(data, full, place)
        else:
            self._put(full, place, data, {})

    def create(self, key: str, data: bytes) -> bool:
        full, place = self._full(key)
        if not self.creates_once:
            try:
                self._attempts.run("stat", place, lambda: self._one_try_head(full))
            except Fault:
                self._put(full, place, data, {})
                return True
            return False
        return self._create(full, place, data)

    @property
    def creates_once(self) -> bool:
        where = (self._boto.client.meta.endpoint_url, self._settings.bucket_name)
        if where not in _creates_once:
            full, place = self._full(f".smalti-probe-{secrets.token_hex(8)}")
            try:
                self._create(full, place, b"1")
                _creates_once[where] = not self._create(full, place, b"2")
            finally:
                self._attempts.run("delete", place, lambda: self._boto.delete(full))
        return _creates_once[where]

    def delete(self, key: str) -> None:
        full, place = self._full(key)
        # Not obstore, which deletes by a request for many keys that some stores refuse.
        self._attempts.run("delete", place, lambda: self._boto.delete(full))

    def upload(self, path: Path, key: str) -> None:
        full, place = self._full(key)
        self._transfers.upload(path, full, place)

    def download(self, key: str, path: Path) -> None:
        full, place = self._full(key)
        self._transfers.download(full, path, place)

    def abandoned_uploads(self, *, older_than: float = 86_400.0, prefix: str = "") -> Sequence[tuple[str, str]]:
        """Keys and ids of uploads in parts that nobody completed, begun more than `older_than` seconds ago."""
        return self._transfers.abandoned(self._settings.prefix + prefix, self.location, older_than)

    def abort_uploads(self, uploads: Sequence[tuple[str, str]]) -> None:
        """Remove the parts of abandoned uploads."""
        for key, upload in uploads:
            self._transfers.abort(key, upload, self.location)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _full(self, key: str) -> tuple[str, str]:
        """Returns the key in the bucket, and the address for messages."""
        checked_key(key)
        return self._settings.prefix + key, f"s3://{self._settings.bucket_name}/{self._settings.prefix}{key}"

    def _transports(self) -> tuple[BotoTransport, Transport]:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            with self._lock:
                opened = self._opened
                if opened is None or opened[0] != os.getpid():
                    try:
                        boto = BotoTransport(self._settings, self._timeouts)
                        fast = open_fast(boto, self._timeouts) if self._wants_fast else None
                    except Fault as fault:
                        raise error_of(fault, self.location, "open") from None
                    opened = self._opened = (os.getpid(), boto, fast or boto)
        return opened[1], opened[2]

    @property
    def _boto(self) -> BotoTransport:
        return self._transports()[0]

    @property
    def _fast(self) -> Transport:
        return self._transports()[1]

    @property
    def _transfers(self) -> Transfers:
        boto, fast = self._transports()
        return Transfers(boto, fast, self._attempts, self._counter, self._part)

    def _pages(self, prefix: str, after: str) -> Iterator[Page]:
        base = self._settings.prefix

        def list_page(below: str, start: str, delimiter: str, token: str) -> Page:
            page = self._attempts.run("list", self.location, lambda: self._boto.list_page(below, start, delimiter, token))
            self._counter.add("list", received=page.received)
            return page

        for page in pages(list_page, base + prefix, base + after if after else "", self.location):
            yield page.without(len(base)) if base else page

    def _put(self, full: str, place: str, data: Block, metadata: dict[str, str], *, new: bool = False) -> None:
        metadata = {**metadata, DIGEST: blake3(data).hexdigest()}
        self._attempts.run("write", place, lambda: self._fast.put(full, data, metadata, new=new), sent=len(data))

    def _create(self, full: str, place: str, data: bytes) -> bool:
        writer = secrets.token_hex(16)
        try:
            self._put(full, place, data, {WRITER: writer}, new=True)
        except Fault:
            # It may be ours: the reply to the first request was lost, and the second found its object.
            found = self._attempts.run("stat", place, lambda: self._fast.head(full))
            return found.metadata.get(WRITER) == writer
        return True

    def _one_try_head(self, full: str) -> Head:
        """The head of an object; a missing one is an answer here, so it is raised as it is."""
        try:
            return self._fast.head(full)
        except Fault as fault:
            if fault.kind is Kind.MISSING:
                raise Fault(Kind.EXISTS, fault.code, status=fault.status) from None
            raise

    def _verified(self, reading: _Reading) -> bytes:
        """The bytes of a whole object if they are those that were written."""
        data, head = reading.data(), reading.head
        if head is None or len(data) != head.size:
            reading.begin_again()
            raise Fault(Kind.TRANSIENT, "Incomplete", detail="the answer is shorter than the file")
        digest = head.metadata.get(DIGEST)
        if digest is not None:
            right = blake3(data).hexdigest() == digest
        elif self._other_etags or len(head.etag) != _MD5_LENGTH:
            return data
        else:
            right = md5(data, usedforsecurity=False).hexdigest() == head.etag
        if not right:
            if digest is None and reading.read_before(data):
                self._other_etags = True  # of an encrypted object, for instance
                return data
            reading.begin_again()
            raise Fault(Kind.DAMAGED, "WrongDigest")
        return data


class _Reading:
    """What has arrived of an object so far, so that a read that was cut off goes on where it was."""

    def __init__(self, *, start: int = 0) -> None:
        self.head: Head | None = None
        self._start = start
        self._blocks: list[bytes] = []
        self._length = 0
        self._count = 0
        self._former = ""

    def go_on(self, transport: Transport, key: str, end: int | None) -> None:
        """Reads the rest, up to `end`."""
        offset = self._start + self._length
        if self.head is not None and offset >= min(end if end is not None else self.head.size, self.head.size):
            return
        try:
            answer = transport.get(key, offset, end, self.head.etag if self.head else None)
        except Fault as fault:
            if fault.kind is Kind.CHANGED:
                self.begin_again()
                raise Fault(Kind.TRANSIENT, fault.code, status=fault.status, detail="the file has changed") from None
            if fault.kind is Kind.RANGE and self.head is not None:
                self.begin_again()  # the length in the first answer was wrong
                raise Fault(Kind.TRANSIENT, fault.code, status=fault.status, detail="the length was wrong") from None
            raise
        self.head = answer.head if self.head is None else self.head
        wanted = answer.head.size - offset if end is None else min(end, answer.head.size) - offset
        if answer.start != offset or answer.length != wanted:
            self.begin_again()
            raise Fault(Kind.TRANSIENT, "WrongRange", status=206, detail="the answer is another range")
        received = 0
        for block in answer.blocks:
            self._blocks.append(block)
            self._length += len(block)
            self._count += len(block)
            received += len(block)
        if received != wanted:
            raise Fault(Kind.TRANSIENT, "Incomplete", detail="the answer was cut off")

    def data(self) -> bytes:
        return self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)

    def begin_again(self) -> None:
        self.head, self._blocks, self._length = None, [], 0

    def take_count(self) -> int:
        """The bytes received since the last call."""
        count, self._count = self._count, 0
        return count

    def read_before(self, data: bytes) -> bool:
        """Whether an earlier read of the whole object gave the same bytes."""
        former, self._former = self._former, blake3(data).hexdigest()
        return former == self._former
