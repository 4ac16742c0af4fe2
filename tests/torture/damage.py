"""A5, A6: checkpoints that were damaged after they were made, and what rotation may take away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

from smalti.checkpoint.format.manifest import SUSPECT
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.writer import SaveError, save

from .saves import _refusing
from .seam import through
from .subject import ALONE, Report, found, snapshot


def any_file(chance: Random, path: Path) -> Path:
    return chance.choice(sorted(each for each in path.rglob("*") if each.is_file()))


def flip(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def truncate(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    os.truncate(file, chance.randrange(file.stat().st_size))


def extend(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    file.write_bytes(file.read_bytes() + bytes(chance.randrange(1, 5000)))


def zero_fill(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    file.write_bytes(bytes(file.stat().st_size))


def swap(chance: Random, path: Path) -> None:
    one, other = chance.sample(sorted(path.rglob("*.safetensors")), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def lose(chance: Random, path: Path) -> None:
    any_file(chance, path).unlink()


def add(chance: Random, path: Path) -> None:
    shutil.copy(path / "model/rank-00000-part-00000.safetensors", path / "model" / chance.choice(("x.safetensors", "y.bin")))


def edit(chance: Random, path: Path) -> None:
    manifest = path / "manifest.json"
    old, new = chance.choice((('"step": 2', '"step": 7'), ('"world_size": 1', '"world_size": 2'), ("AdamW", "Muon")))
    target = manifest if old in manifest.read_text() else path / "state.json"
    target.write_text(target.read_text().replace(old, new))


def exchange_manifest(chance: Random, path: Path) -> None:
    shutil.copy(path.with_name("step-00000001") / "manifest.json", path / "manifest.json")


def link(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    moved = path.parent.parent / "elsewhere"
    file.rename(moved)
    file.symlink_to(moved)


def link_directory(chance: Random, path: Path) -> None:
    folder = chance.choice((path, path / "model"))
    moved = path.parent.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)


def pipe(chance: Random, path: Path) -> None:
    file = any_file(chance, path)
    file.unlink()
    os.mkfifo(file)


DAMAGES = (flip, truncate, extend, zero_fill, swap, lose, add, edit, exchange_manifest, link, link_directory, pipe)


def damaged(chance: Random, place: Path) -> Report:
    """A5: the newest of two checkpoints is damaged: it is refused with a reason, and the other one taken."""
    report, master = Report(), place / "master"
    for step in (1, 2):
        save(master, snapshot(step), ALONE)
    report.expect(found(master) == 2, "a sound checkpoint is refused")
    for number, damage in enumerate((*DAMAGES, *(flip,) * 10)):
        case = place / f"{number}"
        root = shutil.copytree(master, case / "checkpoints", symlinks=True)
        damage(chance, root / "step-00000002")
        said: list[str] = []
        taken = CheckpointStore(root, report=said.append).resolve("latest")
        report.faults += 1
        report.expect(taken is not None and taken.name == "step-00000001", f"after {damage.__name__}, {taken} is taken")
        report.expect(any("skipped step-00000002: " in each for each in said), f"after {damage.__name__}, no reason is told")
        report.expect(not verify(root / "step-00000002").ok or damage is link_directory, f"{damage.__name__} passes")
        shutil.rmtree(case)
    return report


def rotated(chance: Random, place: Path) -> Report:
    """A6: saves that work, fail, are suspect or are made again, damage, clocks that jump, and rotation between all of them."""
    report, root = Report(), place / "checkpoints"
    step, store = 0, CheckpointStore(root)
    for _ in range(60):
        act = chance.choice(("save", "save", "save", "again", "suspect", "fail", "damage", "clock", "rotate", "rotate"))
        before = _whole(root)
        if act in ("save", "suspect") or step == 0:
            step += 1
            save(root, snapshot(step, flags=(SUSPECT,) if act == "suspect" else ()), ALONE)
        elif act == "again":
            save(root, snapshot(step, chance.randrange(1, 50)), ALONE)
        elif act == "fail":
            try:
                with through(_refusing(chance.randrange(20), 28, True)):
                    save(root, snapshot(step + 1), ALONE)
                step += 1
            except SaveError:
                report.expect(before.keys() <= _whole(root).keys(), "a save that failed took another one with it")
        elif act == "damage" and len(before) > 1:
            flip(chance, chance.choice(sorted(before)))
        elif act == "clock":
            for path in root.glob("step-*"):
                when = chance.uniform(0, 2e9)
                os.utime(path, (when, when))
        elif act == "rotate":
            _rotate(store, chance.randrange(1, 4), before, report)
        report.faults += 1
        report.expect(not before or bool(_whole(root)), f"after {act} there is no whole checkpoint left")
    return report


def _rotate(store: CheckpointStore, keep: int, before: dict[Path, bool], report: Report) -> None:
    there = set(store.root.glob("step-*"))
    removed = set(store.rotate(keep))
    after = _whole(store.root)
    good = {_step(path) for path, suspect in before.items() if not suspect}
    kept = {_step(path) for path, suspect in after.items() if not suspect}
    report.expect(
        kept == set(sorted(good)[-keep:]), f"of the good steps {sorted(good)}, {sorted(kept)} are kept with a limit of {keep}"
    )
    report.expect(removed <= before.keys(), "a checkpoint that is not whole was removed")
    report.expect(there - removed == set(store.root.glob("step-*")), "what was removed is not what was told")
    if before:
        report.expect(max(before, key=_order) in after or before[max(before, key=_order)], "the newest one was removed")


def _whole(root: Path) -> dict[Path, bool]:
    """The whole checkpoints, and whether they are suspect."""
    results = {entry.path: verify(entry.path) for entry in CheckpointStore(root).all()}
    return {path: SUSPECT in result.manifest.flags for path, result in results.items() if result.ok and result.manifest}


def _step(path: Path) -> int:
    return _order(path)[0]


def _order(path: Path) -> tuple[int, int]:
    step, _, revision = path.name.removeprefix("step-").partition(".")
    return int(step), int(revision or 1)
