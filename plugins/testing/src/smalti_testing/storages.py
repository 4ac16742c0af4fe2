"""The contract of a storage. Imports no torch.

What the index relies on most: the order of `list`, because the order of samples follows from it, and etags, because only
files whose etag has changed are opened again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from smalti.data import (
    InvalidKeyError,
    MissingFileError,
    Storage,
    StorageError,
)
from smalti_testing.contract import BrokenContract, Contract, expect

Make = Callable[[Mapping[str, bytes], Path], Storage]
"""(the files that it shall hold, a new empty folder for storages that need one) -> a storage with exactly these files."""


@dataclass(kw_only=True)
class StorageSubject:
    """What the checks are given: storages with the files that each of them wants. `writes` false: a read-only storage."""

    make: Make
    root: Path
    writes: bool = True
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def holding(self, files: Mapping[str, bytes]) -> Storage:
        folder = self.root / f"storage-{next(self._count)}"
        folder.mkdir()
        made = self.make(files, folder)
        expect(isinstance(made, Storage), "the storage does not inherit from smalti.data.Storage")
        return made


def check_storage(make: Make, *, writes: bool = True) -> None:
    """Every check of the storage contract. `make` gives a storage that holds exactly the given files, a new one at each call.

    A storage that cannot be written to keeps its part with `writes=False`: its `write` must refuse with a `StorageError`.
    """
    with tempfile.TemporaryDirectory() as root:
        STORAGE.run_all(StorageSubject(make=make, root=Path(root), writes=writes))


STORAGE: Contract[StorageSubject] = Contract("storage")

KEYS = ["a/x.png", "a-b.png", "a.png", "a0.png", "B/y.png", "a/b/z.png", "ä/ö.png", "日本.png", "with blank.png", "%2F.txt"]


def _keys(storage: Storage, prefix: str = "") -> list[str]:
    return [file.key for file in storage.list(prefix)]


@STORAGE.check
def it_lists_all_files_sorted_by_whole_key(subject: StorageSubject) -> None:
    """The order of samples is the order of this list, on every machine.

    Sort by the whole key as text, as `sorted` does: "a-b" < "a/x" < "a0". Walking folder by folder gives another order.
    """
    found = _keys(subject.holding(dict.fromkeys(KEYS, b"x")))
    expect(found == sorted(KEYS), f"list() gave {found}, not {sorted(KEYS)}")


@STORAGE.check
def an_empty_storage_lists_nothing(subject: StorageSubject) -> None:
    """A dataset without files is no error here; the index says what is wrong. Give an empty list."""
    found = _keys(subject.holding({}))
    expect(not found, f"list() of an empty storage gave {found}")


@STORAGE.check
def a_prefix_is_text_and_no_folder(subject: StorageSubject) -> None:
    """`list("cats")` means every key that starts with these letters, in a folder or not.

    A prefix that nothing starts with gives nothing; it is no error.
    """
    storage = subject.holding(dict.fromkeys(("cats/1", "cats2", "cat", "dogs/cats", "cats/deep/2"), b"x"))
    expect(_keys(storage, "cats") == ["cats/1", "cats/deep/2", "cats2"], f'list("cats") gave {_keys(storage, "cats")}')
    expect(_keys(storage, "cats/d") == ["cats/deep/2"], f'list("cats/d") gave {_keys(storage, "cats/d")}')
    expect(not _keys(storage, "no/such"), "a prefix that nothing starts with gave files")


@STORAGE.check
def the_list_and_stat_agree_on_size_and_etag(subject: StorageSubject) -> None:
    """The index compares etags from one scan's list with the next one's, and with `stat`.

    Take key, size and etag from the same source in both, and let the etag not depend on when it is asked for.
    """
    storage = subject.holding({"a": b"12345", "b/c": b""})
    for file in storage.list():
        expect(storage.stat(file.key) == file, f"list() says {file}, stat() says {storage.stat(file.key)}")
        expect(bool(file.etag), f"{file.key} has no etag")
    expect([file.size for file in storage.list()] == [5, 0], "a size is not the number of bytes")


@STORAGE.check
def it_returns_the_bytes_of_every_key(subject: StorageSubject) -> None:
    """Keys are any relative path, with blanks, "%", accents, and contents are any bytes, empty ones too.

    If only some keys fail, something between you and the store quotes or normalises names.
    """
    files = {key: bytes(range(256)) * number for number, key in enumerate(KEYS)}
    storage = subject.holding(files)
    for key, data in files.items():
        expect(storage.read(key) == data, f"read({key!r}) gave other bytes than the file holds")


@STORAGE.check
def a_range_ends_at_the_end_of_the_file(subject: StorageSubject) -> None:
    """Sizes of images are read from the first kilobytes, and small files are shorter than that.

    Give what there is; nothing at or after the end. Object stores answer such a request with an error of their own: catch it.
    """
    storage = subject.holding({"a": b"0123456789", "empty": b""})
    wanted = {(0, 4): b"0123", (3, 4): b"3456", (7, 100): b"789", (10, 5): b"", (50, 5): b"", (2, 0): b""}
    for (start, length), data in wanted.items():
        found = storage.read_range("a", start, length)
        expect(found == data, f"read_range({start}, {length}) of 10 bytes gave {found!r}")
    expect(storage.read_range("empty", 0, 10) == b"", "a range of an empty file gave bytes")


@STORAGE.check
def a_missing_file_raises_missing_file_error(subject: StorageSubject) -> None:
    """A file that went away is set aside; an error of any other kind ends the scan.

    Raise `smalti.data.MissingFileError` from `stat`, `read` and `read_range`; for a folder's name too, which is no file.
    """
    storage = subject.holding({"folder/file": b"x"})
    for key in ("nothing.png", "no/such/folder.png", "folder"):
        for name, call in (
            ("stat", lambda key: storage.stat(key)),
            ("read", lambda key: storage.read(key)),
            ("read_range", lambda key: storage.read_range(key, 0, 10)),
        ):
            _raises(MissingFileError, call, key, f"{name}({key!r})")


@STORAGE.check
def keys_that_could_leave_the_root_are_refused(subject: StorageSubject) -> None:
    """A key comes out of tables that somebody else wrote; "../../etc/passwd" must not get anywhere.

    Pass every key through `smalti.data.checked_key`, which raises `InvalidKeyError`.
    """
    storage = subject.holding({"a": b"x"})
    for key in ("/etc/passwd", "../a", "b/../a", "a//b", "", ".", "a/.", "b\\a", "a\0"):
        _raises(InvalidKeyError, storage.read, key, f"read({key!r})")
        _raises(InvalidKeyError, storage.stat, key, f"stat({key!r})")
        if subject.writes:
            _raises(InvalidKeyError, lambda key: storage.write(key, b""), key, f"write({key!r})")


@STORAGE.check
def an_etag_changes_with_the_content(subject: StorageSubject) -> None:
    """An image that was replaced must be read again; the index knows it by its etag.

    Size and time of change will do for files, a checksum for anything else; the size alone will not.
    """
    one, other = (subject.holding({"a": data}).stat("a").etag for data in (b"one", b"two"))
    expect(one != other, f"two files of the same length and other bytes have the same etag {one!r}")


@STORAGE.check
def it_serves_several_threads_at_once(subject: StorageSubject) -> None:
    """The loader reads with many threads through one storage object.

    Keep no position or connection that two calls share: open per call, or keep one per thread, or use a lock.
    """
    files = {f"{number:03d}": bytes([number]) * 10_000 for number in range(64)}
    storage = subject.holding(files)
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(storage.read, files))
        parts = list(pool.map(lambda key: storage.read_range(key, 9_990, 100), files))
    expect(whole == list(files.values()), "files that are read at once by several threads come out wrong")
    expect(parts == [data[-10:] for data in files.values()], "ranges that are read at once by several threads come out wrong")


@STORAGE.check
def its_location_is_a_text_for_people(subject: StorageSubject) -> None:
    """Every message about a dataset says where it is. Give a path or an address, without secrets in it."""
    location = subject.holding({}).location
    expect(isinstance(location, str) and bool(location), f"location is {location!r}")


@STORAGE.check
def what_was_written_is_there_at_once(subject: StorageSubject) -> None:
    """A reader sees the old content or the new one, in the list, in `stat` and in `read`, and nothing left over beside it.

    Write elsewhere and move into place (`smalti.system.atomic_write`), or use the store's own atomic put. A storage that cannot
    be written to raises `StorageError` and changes nothing; say so to the kit with `writes = False`.
    """
    storage = subject.holding({"a": b"old"})
    if not subject.writes:
        _raises(StorageError, lambda key: storage.write(key, b"new"), "a", "write('a')")
        expect(storage.read("a") == b"old" and _keys(storage) == ["a"], "a write that was refused has changed something")
        return
    before = storage.stat("a")
    storage.write("a", b"longer than it was")
    storage.write("new/deep/b", b"")
    expect(_keys(storage) == ["a", "new/deep/b"], f"after two writes the list is {_keys(storage)}")
    expect(storage.read("a") == b"longer than it was", "read() gave the old bytes after a write")
    expect(storage.stat("a").etag != before.etag, "the etag is the old one after a write")


@STORAGE.check
def a_reader_never_sees_half_a_write(subject: StorageSubject) -> None:
    """While one thread writes a file over and over, another finds one of the contents, whole.

    Writing into the file itself is what usually breaks this.
    """
    if not subject.writes:
        return
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]
    storage = subject.holding({"a": contents[0]})

    def write() -> None:
        for number in range(20):
            storage.write("a", contents[number % 2])

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            expect(storage.read("a") in contents, "a reader saw a part of a write")
        writing.result()


@STORAGE.check
def a_list_can_start_after_a_key(subject: StorageSubject) -> None:
    """Several processes list one folder by parts, and an interrupted list goes on where it was: `list(after=KEY)`.

    The key itself is left out, and it need not be there. Compare whole keys as text.
    """
    storage = subject.holding(dict.fromkeys(KEYS, b"x"))
    for after in ("", "a-b.png", "a/b", "a/x.png", "b", "zzzz", "日本.png"):
        found = [file.key for file in storage.list(after=after)]
        expect(found == [key for key in sorted(KEYS) if key > after], f"list(after={after!r}) gave {found}")
    found = [file.key for file in storage.list("a/", after="a/b/z.png")]
    expect(found == ["a/x.png"], f'list("a/", after="a/b/z.png") gave {found}')


@STORAGE.check
def columns_are_the_same_list(subject: StorageSubject) -> None:
    """`list_columns` gives the files of `list` in its order, as columns key, size and etag."""
    storage = subject.holding({key: key.encode() for key in KEYS})
    for prefix, after in (("", ""), ("a", ""), ("", "a.png"), ("no/such", "")):
        rows = [row for batch in storage.list_columns(prefix, after=after) for row in batch.to_pylist()]
        listed = [{"key": each.key, "size": each.size, "etag": each.etag} for each in storage.list(prefix, after=after)]
        expect(rows == listed, f"list_columns({prefix!r}, after={after!r}) gave {rows}, list() {listed}")


@STORAGE.check
def a_deleted_file_is_gone(subject: StorageSubject) -> None:
    """`delete`, with `deletes`, removes one file and is repeated without an error. Caches and checkpoints need it."""
    storage = subject.holding({"a/b": b"x", "a/c": b"y"})
    if not storage.deletes or not subject.writes:
        return
    for _ in range(2):
        storage.delete("a/b")
    expect(_keys(storage) == ["a/c"], f"after delete('a/b') the list is {_keys(storage)}")
    _raises(MissingFileError, storage.read, "a/b", "read() of a deleted file")
    _raises(InvalidKeyError, storage.delete, "../a", "delete('../a')")


@STORAGE.check
def whole_files_are_transferred(subject: StorageSubject) -> None:
    """`upload` and `download` move files of any size, and leave nothing beside them.

    Write elsewhere and move into place in both directions.
    """
    storage = subject.holding({"small": b"x"})
    if not subject.writes:
        return
    folder = subject.root / f"transfers-{id(subject)}"
    folder.mkdir(exist_ok=True)
    for size in (0, 5, 20_000_000):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        (folder / "from").write_bytes(data)
        storage.upload(folder / "from", "new/big")
        storage.download("new/big", folder / "to")
        expect((folder / "to").read_bytes() == data, f"a file of {size} bytes came back with other bytes")
        expect(storage.stat("new/big").size == size, f"stat() of an uploaded file of {size} bytes has another size")
    expect(_keys(storage) == ["new/big", "small"], f"after uploads the list is {_keys(storage)}")
    _raises(MissingFileError, lambda key: storage.download(key, folder / "none"), "none", "download() of a missing file")
    left = sorted(path.name for path in folder.iterdir())
    expect(left == ["from", "to"], f"after downloads the folder has {left}")


@STORAGE.check
def a_file_is_created_only_once(subject: StorageSubject) -> None:
    """`create` writes a file only if there is none: of eight writers at once, one gets True.

    Where the store does not refuse to replace a file, `creates_once` is False.
    """
    storage = subject.holding({"there": b"old"})
    if not subject.writes:
        return
    expect(not storage.create("there", b"new"), "create() of a file that exists gave True")
    expect(storage.read("there") == b"old", "create() replaced a file")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: storage.create("one/new", bytes([number]) * 1000), range(8)))
    expect(any(won), "none of eight writers created the file")
    if storage.creates_once:
        expect(won.count(True) == 1, f"{won.count(True)} of eight writers created the same file")
        expect(storage.read("one/new") == bytes([won.index(True)]) * 1000, "the file is not that of the writer who created it")
    expect(_keys(storage) == ["one/new", "there"], f"after create() the list is {_keys(storage)}")


def _raises(kind: type[Exception], call: Callable[[str], object], key: str, context: str) -> None:
    try:
        answer = call(key)
    except kind:
        return
    raise BrokenContract(f"{context} did not raise {kind.__name__}, but gave {answer!r}")
