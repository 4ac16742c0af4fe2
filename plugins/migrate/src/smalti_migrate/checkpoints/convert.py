"""Converts checkpoints of any known format to smalti's own, or to plain safetensors for other tools.

It works tensor by tensor, in blocks of a few megabytes. The target is written to a hidden folder beside it, verified, and
becomes visible by one rename.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Literal

from smalti import CheckpointError, CheckpointFormat, UserError
from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    STATE,
    Chunk,
    Contents,
    ConversionError,
    FileRecord,
    Manifest,
    Source,
    State,
    StoredTensor,
    check_free_space,
    check_new,
    encode_header,
    make_folder,
    matches,
    named_step,
    split,
    verify,
    write_weights,
    write_with_digest,
)
from smalti.config import PLUGINS
from smalti.system import Block, files
from smalti_migrate.checkpoints.external import opened

Target = Literal["smalti", "safetensors"]
Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""

_LARGEST_FILE = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result. `size` is in bytes; `notices` are messages for the user: what was skipped, what was guessed."""

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
    use_ema: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Make `target`, a folder that must not exist yet, from the checkpoint in the folder `source`.

    "smalti" makes a checkpoint that a run resumes from, "safetensors" a folder with the weights alone, which diffusers or
    transformers load; with `use_ema`, the EMA weights. `formats` are those that plugins register. Raises UserError for an
    unknown format, a checkpoint that is damaged or has no weights, a target that already exists, a full disk.
    """
    kind = detect_format(source, formats)
    check_new(target)
    with opened(source, kind) as opened_source:
        contents = opened_source.contents
        tensors = _select(source, contents, to, use_ema)
        if to == "smalti" and named_step(target) not in (None, contents.step):
            message = f"a checkpoint of step {contents.step} cannot have the name {target.name}"
            raise UserError(message, fix=f"--to={target.with_name(f'step-{contents.step:08d}')}, or a name without a step")
        read = _with_progress(opened_source, tensors, progress)
        try:
            records = make_folder(target, lambda folder: _write_target(folder, contents, tensors, read, to))
        except OSError as error:
            raise ConversionError(
                f"cannot write {target}: {error}", fix="free space there, or choose another folder"
            ) from error
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


def detect_format(folder: Path, formats: Sequence[CheckpointFormat]) -> CheckpointFormat:
    """Returns the format of a checkpoint, from the files in its folder. Raises UserError for none, or more than one."""
    found = [each for each in formats if any(path.is_file() for mark in each.marks for path in folder.glob(mark))]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(each.name for each in found)
        raise CheckpointError(
            f"{folder} looks like a checkpoint of {names} at once", fix="move the files of one of them elsewhere"
        )
    known = [each.name for each in formats]
    for package in PLUGINS.values():
        if any(name not in known and any(folder.glob(mark)) for mark, name in package.checkpoints):
            raise package.error(f"{package.distribution} reads the checkpoint in {folder}")
    looked_for = [f"    {each.name} ({each.title}): {' or '.join(each.marks)}" for each in formats]
    raise CheckpointError(
        "\n".join([f"{folder} is not a checkpoint of a known format. Expected files:", *looked_for]),
        fix="use the folder that contains them; smalti-fsdp2 reads what torch and Accelerate save, smalti-deepspeed DeepSpeed",
    )


@dataclass(frozen=True, kw_only=True)
class _Selected:
    """A tensor of the target, and its name in the source."""

    source: str
    tensor: StoredTensor


def _select(path: Path, contents: Contents, to: Target, use_ema: bool) -> dict[str, _Selected]:
    """Returns the tensors of the target by name: "GROUP/NAME" in a checkpoint, NAME in plain safetensors."""
    found = {name: _Selected(source=name, tensor=tensor) for name, tensor in contents.tensors.items()}
    weights = {name: each for name, each in found.items() if name.startswith("model/")}
    if not weights:
        raise CheckpointError(f"{path} has no weights")
    if to == "smalti":
        return found
    if use_ema:
        ema_weights = {f"model/{name.removeprefix('ema/')}": each for name, each in found.items() if name.startswith("ema/")}
        if not ema_weights:
            raise UserError(f"{path} has no EMA weights", fix="leave out --ema")
        weights |= ema_weights
    return {name.removeprefix("model/"): each for name, each in weights.items()}


def _with_progress(source: Source, tensors: Mapping[str, _Selected], progress: Progress) -> Callable[[str], Iterator[Block]]:
    """Returns a function that reads tensors by their names in the target, and reports progress."""
    total, done = sum(each.tensor.size for each in tensors.values()), 0

    def read(name: str) -> Iterator[Block]:
        nonlocal done
        for block in source.read(tensors[name].source):
            yield block
            done += len(block)
            progress(done, total)

    return read


def _write_target(
    folder: Path, contents: Contents, tensors: Mapping[str, _Selected], read: Callable[[str], Iterable[Block]], to: Target
) -> dict[str, FileRecord]:
    """Write and verify the files of the target."""
    stored = {name: each.tensor for name, each in tensors.items()}
    check_free_space(folder, stored.values())
    if to == "safetensors":
        records = write_weights(folder, stored, read, contents.model_config)
        problems = [f"{name} does not read back" for name, each in records.items() if not matches(folder / name, each)]
    else:
        records = _write_checkpoint(folder, contents, stored, read)
        problems = list(verify(folder).problems)
    if problems:
        raise ConversionError(f"what was written is damaged: {'; '.join(problems[:3])}", fix="check the disk")
    return records


def _write_checkpoint(
    folder: Path, contents: Contents, tensors: Mapping[str, StoredTensor], read: Callable[[str], Iterable[Block]]
) -> dict[str, FileRecord]:
    """Write a checkpoint as one rank would save it, with its manifest."""
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
        param_groups=contents.param_groups,
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
