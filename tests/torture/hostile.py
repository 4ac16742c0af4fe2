"""A10: checkpoints made by somebody who means harm, with manifests that fit: refused, nothing run, little memory taken."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path
from random import Random

from blake3 import blake3

from smalti.checkpoint.format.manifest import FileRecord, Manifest
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.reader import load
from smalti.checkpoint.writer import save
from smalti.errors import CheckpointError

from .saves import in_child
from .subject import ALONE, Report, snapshot

TENSORS = "model/rank-00000-part-00000.safetensors"
MEMORY = 64 * 2**20


class Payload:
    """Whoever unpickles this makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mknod, (str(self.canary),)


def header(fields: object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


LIES = {
    "longer than the file": header(entry(), length=10**6),
    "a header without end": header(entry(), length=2**63),
    "beyond the data": header(entry(shape=[2**40], data_offsets=[0, 2**42])),
    "less than the shape": header(entry(shape=[2**31])),
    "negative": header(entry(shape=[-2, -1])),
    "overlapping": header({**entry(), "b": entry()["a"]}),
    "a gap": header(entry(data_offsets=[8, 16]), bytes(16)),
    "more data": header(entry(), bytes(64)),
    "another type": header(entry(dtype="OBJECT")),
    "a type that is a list": header(entry(dtype=["F32"])),
    "no shape": header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "a shape of text": header(entry(shape="22")),
    "NaN": header(b'{"a": NaN}'),
    "deep": header(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "twice": header(b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a": {}}'),
    "offsets that lie": header(
        {"__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [2**60]}})}, **entry()}
    ),
    "sharding that is no JSON": header({"__metadata__": {"DCP_SHARDING_INFO": "{"}, **entry()}),
    "empty": b"",
    "short": b"1234",
    "not Unicode": header(b'{"\xff": 1}'),
}
STATES = {
    "NaN": b'{"step": 2, "optimizer": {"name": "AdamW", "settings": []}, "trainer": {"step": NaN}}',
    "deep": b"[" * 200_000,
    "twice": b'{"step": 2, "step": 3}',
    "a list": b"[]",
    "too large a number": b'{"step": 1e999}',
}
NAMES = ("../../outside.safetensors", "/etc/passwd", "model/../state.json", "model/x.pt", "model/a/b.safetensors", "pickle.pkl")


def hostile(chance: Random, place: Path) -> Report:
    report, master = Report(), place / "master"
    for step in (1, 2):
        save(master, snapshot(step, 2), ALONE)
    canary = place / "canary"
    pickled = pickle.dumps(Payload(canary), protocol=2)
    cases: dict[str, dict[str, bytes]] = {f"tensors: {name}": {TENSORS: data} for name, data in LIES.items()}
    cases |= {f"state: {name}": {"state.json": data} for name, data in STATES.items()}
    cases |= {f"a pickle as {name}": {name: pickled} for name in (TENSORS, "state.json", "model/x.safetensors")}
    for name, files in cases.items():
        root = _forged(master, place, files)
        _must_refuse(report, root, name, place)
    for name in ("manifest.json", ".metadata", "model/.metadata", "model/x.pt", "pytorch_model.bin", "optimizer/optim.pt"):
        root = shutil.copytree(master, place / "root")
        (root / "step-00000002" / name).write_bytes(pickled)
        _must_refuse(report, root, f"a pickle beside the rest as {name}", place, ignored="metadata" in name)
    for name in NAMES:
        root = shutil.copytree(master, place / "root")
        _rewrite_manifest(root / "step-00000002", {name: FileRecord(size=1, digest="0" * 64)})
        _must_refuse(report, root, f"a manifest that lists {name}", place)
    for name, size in (("manifest.json", 2**34), (TENSORS, 2**34)):
        root = shutil.copytree(master, place / "root")
        os.truncate(root / "step-00000002" / name, size)
        _must_refuse(report, root, f"{name} of 16 GiB of nothing", place)
    report.expect(not canary.exists(), "a pickle was opened")
    return report


def _forged(master: Path, place: Path, contents: dict[str, bytes]) -> Path:
    """The second checkpoint with these files in it, and a manifest in which all digests are right."""
    root = shutil.copytree(master, place / "root")
    for name, data in contents.items():
        (root / "step-00000002" / name).write_bytes(data)
    records = {name: FileRecord(size=len(data), digest=blake3(data).hexdigest()) for name, data in contents.items()}
    _rewrite_manifest(root / "step-00000002", records)
    return root


def _rewrite_manifest(path: Path, records: dict[str, FileRecord]) -> None:
    from smalti.checkpoint.format.manifest import read_manifest

    old = read_manifest(path)
    (path / "manifest.json").write_bytes(Manifest(step=2, world_size=1, files={**old.files, **records}).encode())


def _must_refuse(report: Report, root: Path, name: str, place: Path, *, ignored: bool = False) -> None:
    """In a process of its own, so that its memory can be limited. `ignored` is for files that are no part of a checkpoint."""

    def look() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        threads = 2**30  # each thread reserves room for its stack
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY + threads, used + MEMORY + threads))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        taken = CheckpointStore(root).latest()
        if taken is None:
            os._exit(10)
        try:
            load(root / "step-00000002", snapshot(0, 2), ALONE)
        except CheckpointError:
            if ignored:
                os._exit(13)
        else:
            if not ignored:
                os._exit(11)
        os._exit(12 if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before > MEMORY else 0)

    told = {
        3: "raises something else",
        10: "takes the sound one with it",
        11: "is loaded",
        12: f"takes more than {MEMORY} bytes",
        13: "is refused",
    }
    code = os.waitstatus_to_exitcode(in_child(look))
    report.faults += 1
    report.expect(code == 0, f"{name}: {told.get(code, f'ends the process with {code}')}")
    shutil.rmtree(root)
