"""Entries on their way into a store, and what the user sees of the encoding."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta

from smalti.data import Threads
from smalti_cache.entries import Entry
from smalti_cache.keys import Key
from smalti_cache.pack import PackBuilder
from smalti_cache.store import PackStore

PACK_BYTES = 128 * 2**20
PACK_SECONDS = 60.0
"""A pack is written when it is this large, or this old: at most that much work is lost if the process dies."""
_LINE_SECONDS = 10.0


class Pending:
    """Entries that are collected until they make up a pack. `thread` then writes it, while the next ones are encoded.

    At most one pack of a store is being written, so memory is bounded.
    """

    def __init__(self, store: PackStore, thread: Threads) -> None:
        self._store = store
        self._thread = thread
        self._entries: list[tuple[Key, Entry]] = []
        self._bytes = 0
        self._since = time.monotonic()
        self._writing: Future[str] | None = None

    def add(self, entries: Mapping[Key, Entry]) -> None:
        if not self._entries:
            self._since = time.monotonic()
        # Rows of a batch are views of it, which would keep all of it in memory.
        self._entries += [(key, {name: tensor.clone() for name, tensor in entry.items()}) for key, entry in entries.items()]
        self._bytes += sum(tensor.nbytes for entry in entries.values() for tensor in entry.values())

    def flush(self, *, everything: bool) -> None:
        """Begin to write a pack, if it is large or old enough; with `everything`, write all there is and wait for it.

        Raises UserError if this or the pack before cannot be written.
        """
        if self._entries and (everything or self._bytes >= PACK_BYTES or time.monotonic() - self._since >= PACK_SECONDS):
            self._wait()
            entries, self._entries, self._bytes = self._entries, [], 0
            self._writing = self._thread.submit(self._write, entries)
        if everything:
            self._wait()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, entries: list[tuple[Key, Entry]]) -> str:
        pack = PackBuilder(compress=self._store.compress)
        # Latents of a bucket, which a batch wants together, are beside each other, in the order in which they were encoded.
        for key, entry in sorted(entries, key=lambda one: sorted(tuple(tensor.shape) for tensor in one[1].values())):
            pack.add(key, entry)
        return self._store.put(pack)


class ProgressLine:
    """Prints the progress of all ranks to standard error, every few seconds and at the end."""

    def __init__(self, *, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._begun = self._shown = time.monotonic()

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now - self._shown < _LINE_SECONDS and done < self._total:
            return
        self._shown = now
        rate = done / max(now - self._begun, 1e-9)
        remaining = timedelta(seconds=round((self._total - done) / rate)) if rate else "-"
        self.say(f"{self._what} {done:,}/{self._total:,}  {rate:.1f}/s  {remaining} remaining")

    @staticmethod
    def say(text: str) -> None:
        print(f"smalti: {text}", file=sys.stderr, flush=True)
