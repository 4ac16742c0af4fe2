"""`type: csv`: the images of a list of URLs, with captions. They are downloaded once, into a folder that stays.

A file is named by the digest of its URL. What cannot be downloaded is left out: for good, with a line in `failed.jsonl`, or
until the next scan if the reason may pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from smalti import ConfigError, UserError
from smalti.data import (
    EXTENSIONS,
    FILES,
    LISTED,
    BadSampleError,
    DatasetSpec,
    ListedOnce,
    ListedState,
    ListingDigest,
    LocalStorage,
    MetadataSource,
    Storage,
    Threads,
    TransientStorageError,
    listed_columns,
    read_header,
    rebatched,
    visible,
    wrong_values,
)
from smalti.system import atomic_write, load_json
from smalti_data.file_names import extension_of, with_extension
from smalti_data.keys import UrlListKeys
from smalti_data.tables.columns import Projection, TableColumns, column, leaf, leaves
from smalti_data.tables.csv_table import CsvSource, CsvTable
from smalti_data.urls.http import Client, FailedError, RefusedError

_log = logging.getLogger(__name__)

FAILED = "failed.jsonl"
"""The list of what cannot be downloaded, in the folder of the images."""
_GIVE_UP = 64
"""So many failures in a row that may pass mean that this machine has no connection."""
_REPORT_SECONDS = 10.0
_WINDOW = 1 << 16
_DIGESTS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
_ROWS = pa.schema([("name", pa.string()), ("url", pa.string()), ("digest", pa.string()), ("captions", pa.list_(pa.string()))])


class UrlList(UrlListKeys):
    """The keys of an entry of `type: csv`, checked."""

    @classmethod
    def of(cls, spec: DatasetSpec) -> UrlList:
        """Raises ConfigError with every wrong key."""
        given = {key: value for key, value in spec.storage_options.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(list(wrong_values(error, given, f"dataset {spec.id!r}"))) from error


def open_folder(spec: DatasetSpec) -> Storage:
    """The folder of the downloaded images, which may still be empty."""
    folder = UrlList.of(spec).csv_cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"csv_cache_dir: {folder} cannot be created: {error.strerror}", fix="set it to another path") from error
    return LocalStorage(folder)


def open_csv(spec: DatasetSpec, storage: Storage) -> MetadataSource:
    """The source of `metadata_backend: csv`: a list of URLs, or a table of files in the dataset's storage."""
    return Urls(spec, storage) if spec.type == "csv" else CsvSource(spec, storage)


class Urls(MetadataSource):
    """Downloads what is missing when it is listed."""

    def __init__(self, spec: DatasetSpec, storage: Storage) -> None:
        self._spec = spec
        self._listing = ListedOnce(storage)
        self._list = UrlList.of(spec)
        self._columns = TableColumns.of(self._block(), f"dataset {spec.id!r}: csv")
        self.client = Client(
            most_bytes=int(self._list.csv_max_megabytes * (1 << 20)),
            seconds=self._list.csv_timeout,
            private_addresses=self._list.csv_allow_private_addresses,
        )

    def check_table(self) -> None:
        self._projection(self._table())

    def is_unchanged(self, before: ListedState) -> bool:
        if not self._listing.is_same(before.digest, *self._determining(self._table().identity)):
            return False
        self.notices = before.notices
        return True

    def list_columns(self) -> Iterator[pa.RecordBatch]:
        self.listed_state = None
        table = self._table()
        rows, notices = self._rows(table)
        failures = _Failures(self._list.csv_cache_dir / FAILED)
        transient = self._download(rows, failures)
        digest, found = ListingDigest(), 0
        for batch in self._joined(rows, transient, digest):
            found += len(batch)
            yield batch
        lost = failures.of(rows)
        if not found:
            raise self._nothing(rows, lost)
        if lost:
            some = ", ".join(f"{url} ({reason})" for url, reason in lost[:3])
            notices += (
                f"{len(lost)} images cannot be downloaded and are left out, first: {some}; all in {failures.path}; remove that"
                " file to try them again",
            )
        self.notices = tuple(f"dataset {self._spec.id}: {table.location}: {notice}" for notice in notices)
        if not transient:
            self.listed_state = ListedState(digest=digest.result(*self._determining(table.identity)), notices=self.notices)

    def _block(self) -> Mapping[str, object]:
        given = self._list.csv_caption_column
        return {**self._spec.metadata_options, **({"caption_column": given} if given is not None else {})}

    def _determining(self, identity: str) -> tuple[str, ...]:
        return self._spec.id, identity, self._list.model_dump_json(), self._columns.model_dump_json()

    def _table(self) -> CsvTable:
        path = self._list.csv_file
        try:
            return CsvTable(path)
        except OSError as error:
            raise UserError(
                f"dataset {self._spec.id!r}: the list {path} cannot be read: {error.strerror}", fix="check csv_file"
            ) from error

    def _projection(self, table: CsvTable) -> tuple[Sequence[str], Projection]:
        """Returns the columns of URLs and digests, and what reads the captions."""
        captions = self._spec.caption_strategy == self._spec.metadata_backend and not self._spec.only_instance_prompt
        weighted = bool(self._spec.caption_weights)
        projection = Projection(
            self._columns, table.schema, table.location, captions=captions, weighted=weighted, only_captions=True
        )
        wanted = [name for name in (self._list.csv_url_column, self._list.csv_digest_column) if name is not None]
        for key, name in zip(("csv_url_column", "csv_digest_column"), wanted, strict=False):
            if leaf(table.schema, name) is None:
                fix = f"set {key} to one of its columns: {', '.join(leaves(table.schema))}"
                raise UserError(f"the table {table.location} has no column {name!r}", fix=fix)
        return wanted, projection

    def _rows(self, table: CsvTable) -> tuple[pa.RecordBatch, tuple[str, ...]]:
        """Returns the rows (`_ROWS`), in order of their names, each URL once, and messages about the others."""
        wanted, projection = self._projection(table)
        batches, empty = [], 0
        for batch in table.batches(list(dict.fromkeys([*wanted, *projection.names]))):
            urls = pc.utf8_trim_whitespace(column(batch, wanted[0]).cast(pa.string()))
            digests = column(batch, wanted[1]).cast(pa.string()) if len(wanted) > 1 else pa.nulls(len(batch), pa.string())
            names = pa.array([_name(url) for url in urls.to_pylist()], pa.string())
            rows = pa.RecordBatch.from_arrays([names, urls, digests, projection.captions(batch)], schema=_ROWS)
            given = pc.fill_null(pc.not_equal(urls, ""), False)
            empty += len(rows) - int(pc.sum(given).as_py() or 0)
            batches.append(rows.filter(given))
        every = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=_ROWS)
        if not len(every):
            raise UserError(f"the table {table.location} has no row with a URL", fix=f"fill {wanted[0]!r}")
        every = every.take(pc.array_sort_indices(every.column("name")))
        names = every.column("name")
        first = np.ones(len(every), dtype=bool)
        first[1:] = pc.not_equal(names.slice(1), names.slice(0, len(names) - 1)).to_numpy(zero_copy_only=False)
        notices: tuple[str, ...] = ()
        if repeated := len(every) - int(first.sum()):
            notices += (f"{repeated} rows have the URL of an earlier row, which is used",)
        if empty:
            notices += (f"{empty} rows have no URL",)
        return every.filter(pa.array(first)), notices

    def _download(self, rows: pa.RecordBatch, failures: _Failures) -> dict[str, str]:
        """Download what is missing. Returns the reasons of failures that may pass, by name."""
        there = [_names(batch) for batch in visible(self._listing.list_columns())]
        known = pa.concat_arrays([*there, failures.names, pa.array([], pa.string())])
        missing = rows.filter(pc.invert(pc.is_in(rows.column("name"), value_set=known))).select(["name", "url", "digest"])
        transient: dict[str, str] = {}
        progress, in_a_row = _Progress(self._spec.id, len(missing)), 0
        left, running = _each(missing), deque[tuple[_Wanted, Future[int]]]()
        with Threads(self._list.csv_downloads, "smalti-download") as pool:
            while True:
                while len(running) < 4 * self._list.csv_downloads and (one := next(left, None)) is not None:
                    running.append((one, pool.submit(self._fetched, one)))
                if not running:
                    return transient
                wanted, future = running.popleft()
                try:
                    progress.add(future.result())
                    in_a_row = 0
                except RefusedError as error:
                    failures.add(wanted, str(error))
                    progress.add(None)
                    in_a_row = 0
                except FailedError as error:
                    transient[wanted.name] = f"{_shown(wanted.url)} cannot be downloaded: {error}"
                    progress.add(None)
                    in_a_row += 1
                if in_a_row >= _GIVE_UP:
                    message = f"dataset {self._spec.id!r}: {in_a_row} downloads in a row failed, last: {transient[wanted.name]}"
                    raise TransientStorageError(
                        message, fix="check the connection; the same command continues where it stopped"
                    )

    def _fetched(self, wanted: _Wanted) -> int:
        """Downloads an image, and returns its size in bytes."""
        data = self.client.get(wanted.url)
        if wanted.digest:
            kind = _DIGESTS.get(len(wanted.digest))
            if kind is None or hashlib.new(kind, data, usedforsecurity=False).hexdigest() != wanted.digest.lower():
                raise RefusedError(f"the {kind or 'digest'} is not that of the list")
        try:
            read_header(lambda start, length: data[start : start + length], len(data))
        except BadSampleError as error:
            raise RefusedError(str(error)) from error
        extension = _extension(wanted.url) or extension_of(data)
        if not extension:
            raise RefusedError("an image of an unknown format")
        path = self._list.csv_cache_dir / wanted.name[:2] / f"{wanted.name}{extension}"
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write(path, data)
        except OSError as error:
            fix = "make room, or set csv_cache_dir to another drive; the same command continues where it stopped"
            raise UserError(f"cannot write {path}: {error.strerror}", fix=fix) from error
        return len(data)

    def _joined(self, rows: pa.RecordBatch, transient: Mapping[str, str], digest: ListingDigest) -> Iterator[pa.RecordBatch]:
        """The samples of all rows that are in the folder, and those that may be there after the next scan."""
        listing = map(with_extension, digest.passed(visible(self._listing.list_columns())))
        there = pa.concat_batches([*rebatched(listing, FILES), pa.RecordBatch.from_pylist([], schema=FILES)])
        stems = _names(there)
        for start in range(0, len(rows), _WINDOW):
            some = rows.slice(start, _WINDOW)
            at = pc.index_in(some.column("name"), value_set=stems)
            have = at.is_valid()
            images, which = some.filter(have), at.drop_null()
            columns = [there.column(field.name).take(which) for field in FILES]
            names = [*FILES.names, "captions"]
            batch = listed_columns(pa.RecordBatch.from_arrays([*columns, images.column("captions")], names=names))
            later = [row for row in some.filter(pc.invert(have)).to_pylist() if row["name"] in transient] if transient else []
            if later:
                failed = [
                    {"key": f"{row['name'][:2]}/{row['name']}", "size": 0, "etag": "", "problem": transient[row["name"]]}
                    | dict.fromkeys(("caption_etag", "place"), "")
                    for row in later
                ]
                batch = pa.concat_batches([batch, pa.RecordBatch.from_pylist(failed, schema=LISTED)])
                batch = batch.take(pc.array_sort_indices(batch.column("key")))
            yield batch

    def _nothing(self, rows: pa.RecordBatch, lost: Sequence[tuple[str, str]]) -> UserError:
        message = f"dataset {self._spec.id!r}: none of the {len(rows)} images of {self._list.csv_file} can be downloaded"
        some = ", ".join(f"{url} ({reason})" for url, reason in lost[:3])
        return UserError(
            f"{message}, first: {some}", fix=f"check {self._list.csv_url_column!r}, and remove {FAILED} to try again"
        )


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """An image to download. `digest` is "" where the list has none."""

    name: str
    url: str
    digest: str


class _Failures:
    """Images that cannot be downloaded, in a file of one JSON object per line. An incomplete last line is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reasons: dict[str, tuple[str, str]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                one = load_json(line)
                self._reasons[str(one["name"])] = str(one["url"]), str(one["reason"])
            except (ValueError, KeyError, TypeError):
                continue

    @property
    def names(self) -> pa.Array:
        return pa.array(list(self._reasons), pa.string())

    def add(self, wanted: _Wanted, reason: str) -> None:
        url = _shown(wanted.url)
        self._reasons[wanted.name] = url, reason
        with self.path.open("ab") as file:
            file.write(json.dumps({"name": wanted.name, "url": url, "reason": reason}).encode() + b"\n")

    def of(self, rows: pa.RecordBatch) -> list[tuple[str, str]]:
        """URL and reason of those that are in the list."""
        if not self._reasons:
            return []
        found = rows.column("name").filter(pc.is_in(rows.column("name"), value_set=self.names)).to_pylist()
        return [self._reasons[name] for name in found]


class _Progress:
    """Logs how far the downloads are, every few seconds."""

    def __init__(self, dataset: str, total: int) -> None:
        self._dataset = dataset
        self._total = total
        self._done = self._failed = self._bytes = 0
        self._started = self._reported = time.monotonic()

    def add(self, size: int | None) -> None:
        """Count an image of this size in bytes; None failed."""
        self._done += 1
        self._failed += size is None
        self._bytes += size or 0
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            left = (now - self._started) / self._done * (self._total - self._done)
            _log.warning(
                "dataset %s: %d of %d images downloaded (%d failed, %.2f GB), about %d minutes left", self._dataset, self._done,
                self._total, self._failed, self._bytes / 1e9, round(left / 60),
            )  # fmt: skip


def _each(rows: pa.RecordBatch) -> Iterator[_Wanted]:
    for start in range(0, len(rows), 1024):
        for row in rows.slice(start, 1024).to_pylist():
            yield _Wanted(name=row["name"], url=row["url"], digest=(row["digest"] or "").strip())


def _name(url: str | None) -> str:
    return hashlib.sha256((url or "").encode()).hexdigest()[:32]


def _names(listed: pa.RecordBatch) -> pa.Array:
    """The names of files, without folder and extension."""
    return pc.replace_substring_regex(listed.column("key"), r"^.*/|\.[^./]*$", "")


def _extension(url: str) -> str:
    """That of the path of a URL, if it is one of images, else ""."""
    extension = posixpath.splitext(urlsplit(url).path)[1].lower()
    return extension if extension in EXTENSIONS else ""


def _shown(url: str) -> str:
    """A URL without what may be secret: user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("?")[0]
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
