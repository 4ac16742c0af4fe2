"""Resuming from a mirror: what is newer there than in the run directory is downloaded before the launch."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from smalti import CheckpointError, UserError
from smalti.checkpoint import STATE, CheckpointStore, decode_state, parse_checkpoint_name
from smalti.config import RunOptions
from smalti.rundir import RunDirectory
from smalti_data.remote.checkpoints import UNUSABLE, RemoteRun
from smalti_storage_s3.mirror.ownership import check_owner, owner_of
from smalti_storage_s3.mirror.place import Access, open_place
from smalti_storage_s3.mirror.pulling import pull


def restore(place: str, access: Access, options: RunOptions) -> str | None:
    """Download the checkpoint to resume from if the run directory lacks it; returns a sentence that says so, or None.

    Raises InUseError if the mirror belongs to another run, CheckpointError if its checkpoint is of another one than the options
    describe, and StorageError if it cannot be reached: a run that trains without its mirror could lose what the mirror is for.
    """
    mirror = RemoteRun(open_place(place, access, create=True))
    run = RunDirectory(cast(Path, options.output_dir))
    record = run.record()
    if record is not None:
        check_owner(mirror.storage, record.id)
    elif (owner := owner_of(mirror.storage)) is not None and options.resume_from_checkpoint == "none":
        raise UserError(
            f"{mirror.location} has the checkpoints of the run {owner.run}, which is to start again",
            fix="choose another --checkpoint_mirror; or resume that run with --resume_from_checkpoint=latest",
        )
    choice = options.resume_from_checkpoint
    if choice == "none" or not _is_newer(mirror, run, choice):
        return None
    if record is None:
        _check_seed(mirror, options)
    path = pull(mirror, run, choice, lambda sentence: click.echo(f"smalti: {sentence}", err=True))
    return f"restored {path} from {mirror.location}"


def _check_seed(mirror: RemoteRun, options: RunOptions) -> None:
    """Raises CheckpointError for the checkpoint of a run with another seed, before anything of that run is downloaded."""
    checkpoint = next(mirror.find(options.resume_from_checkpoint), None)
    if checkpoint is None:
        return
    try:
        was = decode_state(mirror.storage.read(checkpoint.prefix + STATE), STATE).trainer.get("seed", options.seed)
    except UNUSABLE:
        return  # `pull` says what is wrong with it, and takes another one
    if was != options.seed:
        raise CheckpointError(
            f"{mirror.location} has the checkpoints of another run: its seed is {was}, and this one has {options.seed}",
            fix=f"choose another --checkpoint_mirror; or continue that run with --seed={was}",
        )


def _is_newer(mirror: RemoteRun, run: RunDirectory, choice: str) -> bool:
    """Whether the mirror has the checkpoint that `choice` means and the run directory has not."""
    entries = [entry for entry in CheckpointStore(run.checkpoints).all() if entry.manifest is not None]
    if choice == "latest":
        newest = next(mirror.find(choice), None)
        best = max(((not entry.suspect, entry.step) for entry in entries), default=(False, -1))
        return newest is not None and (not mirror.is_suspect(newest), newest.step) > best
    here, there = {entry.step for entry in entries}, {each.step for each in mirror.published()}
    word = choice.removeprefix("step-")
    place = parse_checkpoint_name(choice)
    step = place[0] if place else int(word) if word.isdecimal() else None
    return step in there - here
