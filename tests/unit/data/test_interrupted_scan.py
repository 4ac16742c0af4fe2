"""A scan that is killed, and started again: what it had finished is not opened again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image

from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import Catalog
from smalti.data.scan import parts
from smalti.data.scan.build import build_index
from smalti.data.scan.index import DatasetIndex
from smalti.data.storage.local import LocalStorage

DIES = """
    import os, signal, sys
    from pathlib import Path
    from tests.unit.data.test_interrupted_scan import Counting, scan
    from smalti.data.scan import parts

    class Dies(Counting):
        def read_range(self, key, start, length):
            if key >= "0050.png":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read_range(key, start, length)

    parts.PART_ROWS = 16
    scan(Path(sys.argv[1]), Dies)
"""


class Counting(LocalStorage):
    """A folder that counts what is opened."""

    opened = 0

    def read_range(self, key: str, start: int, length: int) -> bytes:
        Counting.opened += 1
        return super().read_range(key, start, length)


def scan(folder: Path, kind: type[Counting] = Counting) -> DatasetIndex:
    entry = {"id": "pets", "instance_data_dir": str(folder / "pets"), "caption_strategy": "filename"}
    (spec,), _ = parse_datasets([entry], where="", defaults=DataDefaults())
    storage = kind(folder / "pets")
    return build_index(spec, storage, Catalog().open_source(spec, storage), folder / "run/pets.arrow")


def test_a_killed_scan_continues_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pets").mkdir()
    for number in range(80):
        Image.new("RGB", (8 + number, 8)).save(tmp_path / f"pets/{number:04}.png")
    command = [sys.executable, "-c", textwrap.dedent(DIES), str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run/pets.arrow").exists()

    monkeypatch.setattr(parts, "PART_ROWS", 16)
    Counting.opened = 0
    index = scan(tmp_path)

    assert [index.size(row) for row in range(80)] == [(8 + number, 8) for number in range(80)]
    assert Counting.opened == 80 - 48  # three parts of 16 were complete
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["pets.arrow"]
