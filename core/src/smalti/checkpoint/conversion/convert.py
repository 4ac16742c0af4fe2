"""From any format of checkpoints that is known to smalti's own, or to plain safetensors for other tools.

Tensor by tensor, each in this process in blocks of a few megabytes only. The target is made in a hidden folder beside it, read
back, and becomes visible by one rename.

Importing this module imports no torch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Literal

from smalti.checkpoint.conversion.external import opened
from smalti.checkpoint.conversion.formats import Contents, Source, detect_format
from smalti.checkpoint.format.digests import matches, write_with_digest
from smalti.checkpoint.format.full_weights import write_weights
from smalti.checkpoint.format.manifest import GROUPS, MANIFEST, STATE, FileRecord, Manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, StoredTensor, encode_header, split
from smalti.checkpoint.format.statefile import State
from smalti.checkpoint.format.verification import named_step, verify
from smalti.errors import CheckpointError, ExitCode, UserError
from smalti.system import Block, files
from smalti.types import CheckpointFormat

Target = Literal["smalti", "safetensors"]
Progress = Callable[[int, int], None]
"""Told of bytes that are done, and of how many there are."""

_LARGEST_FILE = 512 * 2**20


class ConversionError(UserError):
    """The system would not write what was converted or exported. Nothing is left of it."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What came of it. `size` is in bytes; `notices` are sentences for the user: what was left out, what was guessed."""

    path: Path
    source_format: str
    format: Target
    step: int
    tensors: int
    size: int
    files: tuple[str, ...]
    notices: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    formats: Sequence[CheckpointFormat],
    *,
    to: Target = "smalti",
    averaged: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Make `target`, a folder that must not exist yet, from the checkpoint in the folder `source`.

    "smalti" makes a checkpoint that a run resumes from, "safetensors" a folder with the weights alone, which diffusers or
    transformers load; with `averaged`, the averaged ones (EMA). `formats` are those that plugins register. Raises UserError for
    a format that is not known, a checkpoint that is damaged or holds no weights, a target that is there already, a full disk.
    """
    kind = detect_format(source, formats)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists, and nothing is overwritten", fix="choose a new folder")
    with opened(source, kind) as opened_source:
        contents = opened_source.contents
        tensors = _chosen(source, contents, to, averaged)
        if to == "smalti" and named_step(target) not in (None, contents.step):
            message = f"a checkpoint of step {contents.step} cannot have the name {target.name}"
            raise UserError(message, fix=f"--to={target.with_name(f'step-{contents.step:08d}')}, or a name without a step")
        read = _counted(opened_source, tensors, progress)
        try:
            records = make_folder(target, lambda folder: _written(folder, contents, tensors, read, to))
        except OSError as error:
            raise ConversionError(f"cannot write {target}: {error}", fix="make room there, or name another place") from error
    return Converted(
        path=target,
        source_format=kind.name,
        format=to,
        step=contents.step,
        tensors=len(tensors),
        size=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        notices=contents.notices,
    )


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A tensor of the target: its name in the source, and what it is."""

    source: str
    tensor: StoredTensor


def _chosen(path: Path, contents: Contents, to: Target, averaged: bool) -> dict[str, _Choice]:
    """What the target gets, under its names there: "GROUP/NAME" in a checkpoint, NAME in plain safetensors."""
    found = {name: _Choice(source=name, tensor=tensor) for name, tensor in contents.tensors.items()}
    weights = {name: each for name, each in found.items() if name.startswith("model/")}
    if not weights:
        raise CheckpointError(f"{path} holds no weights")
    if to == "smalti":
        return found
    if averaged:
        averages = {f"model/{name.removeprefix('ema/')}": each for name, each in found.items() if name.startswith("ema/")}
        if not averages:
            raise UserError(f"{path} holds no averaged weights", fix="leave out --ema")
        weights |= averages
    return {name.removeprefix("model/"): each for name, each in weights.items()}


def _counted(source: Source, tensors: Mapping[str, _Choice], progress: Progress) -> Callable[[str], Iterator[Block]]:
    """Read by the target's names, and tell how far it has come."""
    total, done = sum(each.tensor.size for each in tensors.values()), 0

    def read(name: str) -> Iterator[Block]:
        nonlocal done
        for block in source.read(tensors[name].source):
            yield block
            done += len(block)
            progress(done, total)

    return read


def make_folder(target: Path, write: Callable[[Path], dict[str, FileRecord]]) -> dict[str, FileRecord]:
    """Let `write` fill a hidden folder and give it the name of the target; nothing is left of it when that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".partial-{target.name}-{secrets.token_hex(4)}"
    files.make_directory(partial)
    try:
        records = write(partial)
        files.fsync_directory(partial)
        if target.exists():
            raise UserError(f"{target} was created by another process in the meantime, and nothing is overwritten")
        files.rename(partial, target)
    finally:
        if partial.exists():
            files.remove_tree(partial)
    files.fsync_directory(target.parent)
    return records


def _written(
    folder: Path, contents: Contents, tensors: Mapping[str, _Choice], read: Callable[[str], Iterable[Block]], to: Target
) -> dict[str, FileRecord]:
    """The files of the target, written and read back."""
    stored = {name: each.tensor for name, each in tensors.items()}
    check_free_space(folder, stored.values())
    if to == "safetensors":
        records = write_weights(folder, stored, read, contents.model_config)
        problems = [f"{name} does not read back" for name, each in records.items() if not matches(folder / name, each)]
    else:
        records = _write_checkpoint(folder, contents, stored, read)
        problems = list(verify(folder).problems)
    if problems:
        raise ConversionError(f"what was written is damaged: {'; '.join(problems[:3])}", fix="look after the disk")
    return records


def check_free_space(folder: Path, tensors: Iterable[StoredTensor]) -> None:
    """Raises ConversionError before anything is written when the file system says that it cannot hold these tensors."""
    room, needed = files.free_bytes(folder), sum(tensor.size for tensor in tensors)
    if room is not None and needed > room:
        raise ConversionError(f"{needed / 2**30:.2f} GiB are needed, {room / 2**30:.2f} GiB are free", fix="make room there")


def _write_checkpoint(
    folder: Path, contents: Contents, tensors: Mapping[str, StoredTensor], read: Callable[[str], Iterable[Block]]
) -> dict[str, FileRecord]:
    """A checkpoint as one rank would have saved it, manifest and all."""
    records: dict[str, FileRecord] = {}
    for group in GROUPS:
        chunks = {
            name: Chunk(dtype=each.dtype, shape=each.shape, offsets=(0,) * len(each.shape))
            for name, each in tensors.items()
            if name.startswith(f"{group}/")
        }
        if chunks:
            files.make_directory(folder / group)
        for number, names in enumerate(split(chunks, _LARGEST_FILE)):
            file = f"{group}/rank-00000-part-{number:05d}.safetensors"
            header = encode_header([(name.partition("/")[2], chunks[name]) for name in names])
            blocks = (block for name in names for block in read(name))
            records[file] = write_with_digest(folder / file, chain([header], blocks))
        if chunks:
            files.fsync_directory(folder / group)
    state = State(
        step=contents.step,
        optimizer=contents.optimizer,
        settings=contents.settings,
        trainer={"step": contents.step, **contents.trainer},
        model_config=contents.model_config,
    )
    records[STATE] = write_with_digest(folder / STATE, [state.encode()])
    manifest = Manifest(
        step=contents.step,
        world_size=1,
        files=records,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plugins=contents.plugins,
        config_digest=contents.config_digest,
        flags=contents.flags,
    )
    files.atomic_write(folder / MANIFEST, manifest.encode())
    return records
