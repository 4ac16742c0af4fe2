"""The contract of a checkpoint format: what `smalti checkpoint convert` expects of its reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from smalti import CheckpointError
from smalti.checkpoint import GROUPS, ITEM_SIZES, Source
from smalti_testing.contract import BrokenContract, Contract, expect


@dataclass(frozen=True, kw_only=True)
class FormatSubject:
    """What the checks are given: how a checkpoint is opened, one that is sound, and an empty folder to work in."""

    open: Callable[[Path], Source]
    checkpoint: Path
    folder: Path


CHECKPOINT_FORMAT: Contract[FormatSubject] = Contract("checkpoint format")


def check_checkpoint_format(open: Callable[[Path], Source], checkpoint: Path, folder: Path) -> None:
    """Every check of the contract. `open` is the factory, `checkpoint` a sound checkpoint, `folder` is new and empty."""
    CHECKPOINT_FORMAT.run_all(FormatSubject(open=open, checkpoint=checkpoint, folder=folder))


@CHECKPOINT_FORMAT.check
def its_tensors_have_names_and_types_of_smalti(subject: FormatSubject) -> None:
    """Names are "model/PARAMETER", "optimizer/PARAMETER.MOMENT", "ema/PARAMETER"; types those of safetensors, as "F32"."""
    tensors = subject.open(subject.checkpoint).contents.tensors
    expect(any(name.startswith("model/") for name in tensors), "no tensor is below model/: there is nothing to train")
    for name, tensor in tensors.items():
        expect(name.partition("/")[0] in GROUPS, f"{name!r} is in none of the groups {', '.join(GROUPS)}")
        expect(tensor.dtype in ITEM_SIZES, f"{name} has the type {tensor.dtype!r}; the types are {', '.join(ITEM_SIZES)}")


@CHECKPOINT_FORMAT.check
def its_contents_can_be_sent(subject: FormatSubject) -> None:
    """It is read in a process of its own, which sends the contents as JSON. Use plain values, and no NaN."""
    json.dumps(asdict(subject.open(subject.checkpoint).contents), allow_nan=False)


@CHECKPOINT_FORMAT.check
def each_tensor_is_read_completely(subject: FormatSubject) -> None:
    """The blocks of a tensor have as many bytes together as its shape and type say, and the same ones each time."""
    source = subject.open(subject.checkpoint)
    for name, tensor in source.contents.tensors.items():
        first, second = (b"".join(map(bytes, source.read(name))) for _ in range(2))
        expect(len(first) == tensor.size, f"{name} has {len(first)} bytes; shape and type say {tensor.size}")
        expect(first == second, f"{name} is another one when it is read again")


@CHECKPOINT_FORMAT.check
def a_damaged_checkpoint_is_refused(subject: FormatSubject) -> None:
    """Files that end early must raise a CheckpointError that says so, when they are opened or read; nothing else."""
    damaged = subject.folder / "damaged"
    shutil.copytree(subject.checkpoint, damaged)
    for path in damaged.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    try:
        source = subject.open(damaged)
        for name, tensor in source.contents.tensors.items():
            if sum(map(len, source.read(name))) != tensor.size:
                return  # smalti says so
    except CheckpointError:
        return
    raise BrokenContract("half of each file is missing, and nothing says so")
