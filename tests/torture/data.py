"""C1 to C5: the order of samples whatever happens: resumes, other numbers of ranks and threads, bad inputs, failing reads."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from smalti.data import Loader, PreparedData, build_datasets, catalog_of, parse_datasets
from smalti.data.batch_check import BatchShape
from smalti.data.datasets.parse import DataDefaults
from smalti.data.datasets.spec import Catalog
from smalti.data.prepared import DataRules, prepare
from smalti.data.storage.protocol import TransientStorageError
from smalti.errors import UserError
from smalti.plugins import load_plugins
from smalti.types import World

from .subject import Report

EFFECTIVE = 12
"""The batch of all ranks: divisible by 1, 2, 3 and 4."""
Sample = tuple[int, int, str, str, bytes]
"""Position, number, key, caption, and the first bytes of the pixels."""
SIZES = ((16, 16), (24, 16), (16, 24))
CATALOG = catalog_of(load_plugins())


def fill(chance: Random, folder: Path, count: int) -> Path:
    """Images of three sizes, each with its own colours and one to three captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.frombytes("RGB", (2, 2), chance.randbytes(12)).resize(chance.choice(SIZES)).save(folder / f"{number:04}.png")
        lines = [f"caption {number} {line}" for line in range(chance.randint(1, 3))]
        (folder / f"{number:04}.txt").write_text("\n".join(lines))
    return folder


def entries_of(folder: Path, **values: object) -> list[dict[str, object]]:
    return [{"id": folder.name, "instance_data_dir": str(folder), "minimum_image_size": 0, **values}]


def data_of(
    entries: list[dict[str, object]], *, seed: int, budget: float = 0.01, catalog: Catalog | None = None
) -> PreparedData:
    """The data as a run has it. Raises ConfigError and what the scan raises."""
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16), catalog=catalog or CATALOG)
    assert not problems, problems
    shape = BatchShape(train_batch_size=EFFECTIVE, ranks=1, accumulation=1)
    rules = DataRules(seed=seed, shape=shape, alignment=8, error_budget=budget, short_buckets="repeat")
    return prepare(build_datasets(specs, catalog or CATALOG), rules)


def sequence(
    data: PreparedData,
    start: int,
    count: int,
    *,
    ranks: int = 1,
    workers: int = 1,
    prefetch: int = 3,
    cache_bytes: int = 1 << 20,
) -> list[Sample]:
    """The samples of `count` batches from a position on, put together from all ranks in their order."""
    found: list[Sample] = []
    for rank in range(ranks):
        micro = EFFECTIVE // ranks
        world = World(rank=rank, size=ranks)
        options = {"workers": workers, "prefetch": prefetch, "cache_bytes": cache_bytes}
        with Loader(data, world=world, micro_batch=micro, position=start, **options) as loader:
            for batch in islice(loader, count):
                for one in batch.micro:
                    assert one.pixels is not None
                    pixels = one.pixels.numpy()
                    rows = zip(one.numbers, one.keys, one.captions, pixels, strict=True)
                    found += [(batch.position, *rest, image[:, 3, 3].tobytes()) for *rest, image in rows]
    return sorted(found, key=lambda sample: sample[:2])


def resumed_anywhere(chance: Random, place: Path, *, batches: int = 50, cases: int = 40) -> Report:
    """C1: resumed at every 7th batch, with 1 to 4 threads, on 1 to 4 ranks: the exact sequence of the undisturbed run."""
    report = Report()
    data = data_of(entries_of(fill(chance, place / "images", 40)), seed=chance.randrange(1000))
    whole = sequence(data, 0, batches)
    layouts = [(start, workers, ranks) for start in range(0, batches - 3, 7) for workers in (1, 2, 4) for ranks in (1, 2, 4)]
    for start, workers, ranks in chance.sample(layouts, min(cases, len(layouts))):
        count = min(5, batches - start)
        found = sequence(data, start, count, ranks=ranks, workers=workers, prefetch=chance.randint(1, 6))
        expected = whole[start * EFFECTIVE : (start + count) * EFFECTIVE]
        report.faults += 1
        report.expect(found == expected, f"resumed at {start} with {workers} threads on {ranks} ranks: other samples")
    return report


def changing_worlds(chance: Random, place: Path) -> Report:
    """C2: the number of ranks changes at random batches, 1, 2, 4, 3, with the same global batch: the same global order."""
    report = Report()
    data = data_of(entries_of(fill(chance, place / "images", 30)), seed=chance.randrange(1000))
    found: list[Sample] = []
    for ranks in (1, 2, 4, 3):
        found += sequence(data, len(found) // EFFECTIVE, chance.randint(1, 6), ranks=ranks)
        report.faults += 1
    report.expect(found == sequence(data, 0, len(found) // EFFECTIVE), "1, 2, 4 and 3 ranks in turn see another order")
    return report


def encoded(format: str, **options: object) -> Callable[[Random], bytes]:
    def make(chance: Random) -> bytes:
        mode = str(options.get("mode", "RGB"))
        image = Image.frombytes("RGB", (16, 16), chance.randbytes(768)).convert(mode)
        file, frames = io.BytesIO(), {"save_all": True, "append_images": [image.rotate(90)]} if "frames" in options else {}
        image.save(file, format, **frames)
        return file.getvalue()

    return make


def cut(make: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    def damaged(chance: Random) -> bytes:
        data = make(chance)
        return data[: chance.randrange(1, len(data) * 6 // 10)]

    return damaged


def bomb(chance: Random) -> bytes:
    """A PNG that says it has 100,000 x 100,000 pixels."""
    data = bytearray(encoded("PNG")(chance))
    data[16:24] = (100_000).to_bytes(4, "big") * 2
    return bytes(data)


def sixteen_bits(chance: Random) -> bytes:
    file = io.BytesIO()
    levels = np.frombuffer(chance.randbytes(512), np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(file, "PNG")
    return file.getvalue()


GOOD: dict[str, tuple[str, Callable[[Random], bytes]]] = {
    "CMYK": ("jpg", encoded("JPEG", mode="CMYK")),
    "16 bits": ("png", sixteen_bits),
    "palette": ("png", encoded("PNG", mode="P")),
    "grey with alpha": ("png", encoded("PNG", mode="LA")),
    "animated": ("gif", encoded("GIF", frames=2)),
    "animated WebP": ("webp", encoded("WEBP", frames=2)),
    "PNG called jpg": ("jpg", encoded("PNG")),
    "one bit": ("bmp", encoded("BMP", mode="1")),
}
"""Unusual, and images nevertheless."""
BAD: dict[str, tuple[str, Callable[[Random], bytes]]] = {
    "empty": ("png", lambda chance: b""),
    "random bytes": ("jpg", lambda chance: chance.randbytes(chance.randint(1, 2000))),
    "text": ("webp", lambda chance: b"<html>not found</html>"),
    "zeros": ("png", lambda chance: bytes(1000)),
    "a bomb": ("png", bomb),
    "a cut PNG": ("png", cut(encoded("PNG"))),
    "a cut JPEG": ("jpg", cut(encoded("JPEG"))),
    "a cut WebP": ("webp", cut(encoded("WEBP"))),
    "a cut BMP": ("bmp", cut(encoded("BMP"))),
    "a cut TIFF": ("tif", cut(encoded("TIFF"))),
    "zeros after the header": ("jpg", lambda chance: encoded("JPEG")(chance)[:160] + bytes(500)),
    "a flipped PNG": ("png", lambda chance: flipped(encoded("PNG")(chance))),
}


def flipped(data: bytes) -> bytes:
    """A PNG whose compressed pixels are damaged."""
    at = data.index(b"IDAT") + 4
    return data[:at] + bytes(8) + data[at + 8 :]


def bad_inputs(chance: Random, place: Path, *, bad: int = 60) -> Report:
    """C3: bad images among good ones: each listed with a reason, none deleted, the order the same with any threads.

    A smaller error budget ends the run with a message that names one of them.
    """
    report, folder = Report(), fill(chance, place / "images", 30)
    chosen = [chance.choice(list(BAD)) for _ in range(bad)]
    for number, name in enumerate(chosen):
        ending, make = BAD[name]
        write(folder / f"bad-{number:02}.{ending}", make(chance))
    for number, (ending, make) in enumerate(GOOD.values()):
        write(folder / f"good-{number:02}.{ending}", make(chance))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = data_of(entries_of(folder), seed=chance.randrange(1000), budget=bad + 1)
    played, listed = [], {}
    for workers in (1, 4):
        errors = data.error_budget()
        with Loader(data, world=World(), micro_batch=EFFECTIVE, errors=errors, workers=workers) as loader:
            played.append([one.keys for batch in islice(loader, data.order.epoch_start(2)) for one in batch.micro])
        listed = {item.key: item.reason for item in (*data.quarantined, *errors.items)}
    report.faults += bad
    wanted = {f"bad-{number:02}.{BAD[name][0]}" for number, name in enumerate(chosen)}
    report.expect(played[0] == played[1], "the order depends on the number of threads")
    report.expect(listed.keys() == wanted, f"listed as bad: {sorted(listed.keys() ^ wanted)}")
    report.expect(all(listed.values()), "an image is set aside without a reason")
    seen = {key.partition("/")[2] for keys in played[0] for key in keys}
    report.expect(seen == before.keys() - wanted - {name for name in before if name.endswith(".txt")}, "other images are seen")
    report.expect(before == {path.name: path.read_bytes() for path in folder.iterdir()}, "a file of the user was changed")
    report.expect(_ends(lambda: data_of(entries_of(folder), seed=1, budget=1)), "more bad images than the budget: no error")
    return report


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(path.stem)


def bad_tables(chance: Random, place: Path) -> Report:
    """C3: tables that are cut off, of another schema, or name what is not there: an error that says what to do, or a reason."""
    report, folder = Report(), fill(chance, place / "images", 20)
    rows = [{"filename": f"{number:04}.png", "caption": f"row {number}"} for number in range(20)]
    text = "\n".join(json.dumps(row) for row in rows)
    torn = {
        "cut off": text[: chance.randrange(10, len(text) - 20)].rstrip("}") + '"',
        "another schema": "\n".join(json.dumps({"picture": row["filename"]}) for row in rows),
        "not text": chance.randbytes(500).decode("latin-1") + "\0",
        "a list": json.dumps(rows),
        "keys that leave the folder": json.dumps({"filename": "../../etc/passwd", "caption": "x"}),
    }
    for name, content in torn.items():
        table = folder / "metadata.jsonl"
        table.write_text(content, encoding="utf-8", errors="surrogatepass")
        report.faults += 1
        entries = entries_of(folder, metadata_backend="json")
        report.expect(_ends(lambda entries=entries: data_of(entries, seed=1)), f"a table that is {name}: no error")
    return report


def bad_parquet(chance: Random, place: Path) -> Report:
    """C3: parquet tables that were torn while they were written or copied, are damaged, or have another schema: an error each.

    Where a damaged one is read all the same, its rows are those that were written.
    """
    report, folder = Report(), fill(chance, place / "images", 20)
    names = [f"{number:04}.png" for number in range(20)]
    file = io.BytesIO()
    parquet.write_table(
        pyarrow.table({"filename": names, "caption": [f"row {name}" for name in names]}), file, row_group_size=7
    )
    whole = file.getvalue()
    flip, start = chance.randrange(len(whole) - 300, len(whole)), chance.randrange(len(whole) // 2)
    other = io.BytesIO()
    parquet.write_table(pyarrow.table({"picture": names}), other)
    torn = {
        "that is whole": whole,
        "without a footer": whole[: chance.randrange(1, len(whole) - 8)],
        "cut in its footer": whole[: -chance.randrange(1, 8)],
        "with a flipped byte in its footer": whole[:flip] + bytes([whole[flip] ^ 0xFF]) + whole[flip + 1 :],
        "with zeros inside": whole[:start] + bytes(200) + whole[start + 200 :],
        "with a footer longer than the file": whole[:-8] + b"\xff\xff\xff\x7fPAR1",
        "empty": b"",
        "of another schema": other.getvalue(),
    }
    entries = entries_of(folder, metadata_backend="parquet", parquet={"path": "metadata.parquet"})
    for name, content in torn.items():
        (folder / "metadata.parquet").write_bytes(content)
        report.faults += 1
        found: list[str] = []

        def read(found: list[str] = found) -> None:
            index = data_of(entries, seed=1).datasets[0].index
            found += [caption for row in range(len(index)) for caption in index.captions(row)]

        ended, same = _ends(read), found == [f"row {each}" for each in names]
        report.expect(same if content == whole else ended or same, f"a parquet table {name}: {found[:2]}")
    return report


def _ends(function: Callable[[], object]) -> bool:
    """Whether it raises an error for the user. Everything else is raised, as a bug."""
    try:
        function()
    except UserError as error:
        return bool(error.fix) or "fix: " in error.message
    return False


class Failing:
    """Reads of a storage, of which one raises."""

    def __init__(self, read: Callable[[int], bytes], at: int, error: BaseException) -> None:
        self._read, self._at, self._error = read, at, error
        self._lock, self._count = threading.Lock(), 0

    def __call__(self, row: int) -> bytes:
        with self._lock:
            self._count += 1
            due = self._count == self._at
        if due:
            raise self._error
        return self._read(row)


ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: TransientStorageError("the storage does not answer", fix="wait"),
    lambda: RuntimeError("a bug"),
    lambda: MemoryError(),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt(),
)


def failing_threads(chance: Random, place: Path, *, rounds: int = 20) -> Report:
    """C5: a loader thread ends in the middle of its work: the next batch raises that error, and closing does not hang."""
    report = Report()
    entries = entries_of(fill(chance, place / "images", 30))
    for _ in range(rounds):
        data = data_of(entries, seed=chance.randrange(1000))
        error = chance.choice(ERRORS)()
        dataset = data.datasets[0]
        object.__setattr__(dataset, "read", Failing(dataset.read, chance.randint(1, 25), error))
        outcome: list[BaseException | None] = []

        def run(data: PreparedData = data, outcome: list[BaseException | None] = outcome) -> None:
            try:
                with Loader(data, world=World(), micro_batch=EFFECTIVE, workers=3, cache_bytes=0) as loader:
                    for _ in islice(loader, 10):
                        pass
                outcome.append(None)
            except BaseException as raised:  # noqa: BLE001 - it is what is asked about
                outcome.append(raised)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(20)
        report.faults += 1
        report.expect(bool(outcome), f"{type(error).__name__} in a thread: the loader hangs")
        report.expect(outcome[:1] == [error], f"{type(error).__name__} in a thread: the loader raises {outcome}")
    return report


def resumed_briefly(chance: Random, place: Path) -> Report:
    return resumed_anywhere(chance, place, batches=20, cases=6)


def bad_inputs_and_tables(chance: Random, place: Path) -> Report:
    images, tables, files = bad_inputs(chance, place / "a"), bad_tables(chance, place / "b"), bad_parquet(chance, place / "c")
    faults, broken = images.faults + tables.faults + files.faults, [*images.broken, *tables.broken, *files.broken]
    return Report(faults=faults, broken=broken)
