"""`smalti cache encode --engine=ray`: ranges of texts and images, which workers read, encode and write into the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, cast

from smalti import Config, PreflightError
from smalti.config import DataOptions, RunOptions
from smalti.data import PreparedData, catalog_of, scan_data
from smalti.plugins import Plugins, find_family
from smalti.system import preemption_as_exception, remove_tree
from smalti_cache.encode_part import EncodedPart, check
from smalti_cache.options import CacheOptions
from smalti_cache.pending import ProgressLine
from smalti_cache.places import cache_folders
from smalti_data.all_ranks.wanted import ranks_scan
from smalti_ray.cluster import connected
from smalti_ray.data.job import say, workers_for
from smalti_ray.data.options import EngineOptions
from smalti_ray.data.scan import scan_on_cluster
from smalti_ray.data.worker import Range

IMAGES = 4096
"""Images of a range, about a pack of latents: what a lost worker has not written of it is encoded again."""
MOST_RANGES = 2048
"""Each range lists the packs of the cache once, so those of large datasets have more images."""
_TEXT_RANGES = 32
"""At most: for each, a worker looks at the keys of all texts."""


def encode_datasets(config: Config, plugins: Plugins, notice: Callable[[str], object]) -> EncodedPart:
    """Encode on a Ray cluster what is not in the caches of a configuration; returns what all workers have encoded.

    What is there is skipped, so the same command continues after an interruption. Raises UserError, or PreflightError for more
    unusable images than the error budget allows.
    """
    check(config, plugins)
    with connected(config[EngineOptions].address), preemption_as_exception(), _indexes(config) as folder:
        alignment = find_family(config, plugins).alignment
        scan = partial(scan_data, config, plugins, alignment, folder)
        if ranks_scan(config, plugins, folder):
            say("scanning the datasets")
            data = scan_on_cluster(config, plugins, folder, scan)
        else:
            data = scan()
        for each in data.notices:
            notice(each)
        places = cache_folders(config, catalog_of(plugins))
        every = (places.texts, *places.own_texts.values(), *places.latents.values())
        others = list(dict.fromkeys(place.folder for place in every if place.folder is not None))
        with workers_for("encode", config, plugins, folder, others) as workers:
            found = EncodedPart()
            for tasks in _ranges(config, data):
                workers.run(tasks, last=tasks.kind == "latents")
                found += tasks.found
    return found


@contextmanager
def _indexes(config: Config) -> Iterator[Path]:
    """A folder for the indexes that all nodes see: that of the run, or one in the cache until all is encoded."""
    if (output := config[RunOptions].output_dir) is not None:
        yield output / "data"
        return
    folder = cast(Path, config[CacheOptions].cache_dir) / f".encode-{config.digest[:16]}"
    yield folder
    remove_tree(folder)


def _ranges(config: Config, data: PreparedData) -> Iterator[_Ranges]:
    """The ranges of texts, then those of images: workers release the encoders of texts in between."""
    every = [data] if data.held_out is None else [data, data.held_out]
    images = sum(
        len(part.rows) * len(one.datasets[part.dataset].flips)
        for one in every
        for content in one.order.buckets
        for part in content.parts
    )
    count = min(MOST_RANGES, -(-images // IMAGES))
    if not config[DataOptions].text_cache_disable:
        yield _Ranges("texts", min(_TEXT_RANGES, count), None, every)
    if not config[DataOptions].vae_cache_disable:
        yield _Ranges("latents", count, images, every)


class _Ranges:
    """Ranges of one kind, each done once; `total` is how many images they have, None if unknown."""

    def __init__(self, kind: Literal["texts", "latents"], count: int, total: int | None, data: list[PreparedData]) -> None:
        self._waiting = deque(Range(kind=kind, number=number, count=count) for number in range(count))
        self._open = self._count = count
        self.kind = kind
        self._data = data
        self._total = total
        self._line = ProgressLine(what="texts, ranges" if total is None else "images", total=total or count)
        self.found = EncodedPart()

    def waiting(self) -> int:
        return len(self._waiting)

    def next(self) -> Range:
        return self._waiting.popleft()

    def lost(self, task: Range) -> None:
        self._waiting.append(task)  # last: a process whose node was given up has then ended, and writes nothing more

    def done(self, task: Range, result: EncodedPart) -> None:
        self.found += result
        self._open -= 1
        self._check_budget()
        self._line.update(self._done(0))

    def ended(self) -> bool:
        return self._open == 0

    def show(self, doing: int) -> None:
        self._line.update(self._done(doing))

    def _done(self, doing: int) -> int:
        return self._count - self._open if self._total is None else min(self._total, self.found.images + doing)

    def _check_budget(self) -> None:
        """Raises PreflightError if all ranges together have more unusable images than the datasets may have."""
        allowed = sum(one.allowed_errors for one in self._data)
        count = len(self.found.unusable) + sum(one.unusable for one in self._data)
        if self.found.unusable and count > allowed:
            message = f"{count} samples cannot be used, more than the error budget of {allowed}; for example: "
            fix = "fix or remove such files, or raise --data_error_budget"
            raise PreflightError(message + self.found.unusable[0], fix=fix)
