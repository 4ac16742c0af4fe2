"""Folders on a node's local drive into which DeepSpeed swaps. One run at a time locks them and removes what others left.

DeepSpeed creates `zero_stage_3` in such a folder and never removes it. Imports no torch, no DeepSpeed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import Cleared, Config, PreflightError, UserError
from smalti.cli import format_bytes
from smalti.config import LaunchOptions
from smalti.system import free_bytes, make_directory, remove_tree
from smalti_deepspeed.config import offload_folders, resolved
from smalti_deepspeed.options import DeepSpeedOptions, enabled
from smalti_deepspeed.parsing import place, section

if TYPE_CHECKING:
    from torch import nn

    from smalti.parallel import Communicator

LOCK = ".smalti-deepspeed.lock"
"""A file in the folder, locked by the run that swaps there. It is never removed, as another run may have locked it."""
_PREFIX = "zero_stage_"


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What finished runs have left in the folders: a `smalti.plugins.caches.Cache`."""

    folders: tuple[Path, ...]

    @property
    def place(self) -> str:
        return ", ".join(map(str, self.folders)) or "no folder: use --offload_param_path or a configuration file"

    def paths(self) -> list[Path]:
        """The directories that DeepSpeed created, without links and files of such names. Raises UserError."""
        found = []
        for folder in filter(Path.is_dir, self.folders):
            try:
                with os.scandir(folder) as entries:
                    names = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            except OSError as error:
                raise UserError(f"cannot read {folder}: {error.strerror}", fix="check its owner and permissions") from error
            found += [folder / name for name in sorted(names) if name.startswith(_PREFIX)]
        return found

    def entries(self) -> int:
        return len(self.paths())

    def size(self) -> int:
        return sum(map(_size, self.paths()))

    def clear(self) -> Cleared:
        """Raises UserError while a run swaps there, and if something cannot be removed."""
        with Claim.of(dict.fromkeys(path.parent for path in self.paths())) as claim:
            return claim.cleared


@dataclass(kw_only=True)
class Claim:
    """Exclusive use of the folders until `release`, or until this process ends. `cleared` counts what was removed."""

    cleared: Cleared
    locks: list[io.BufferedWriter] = field(repr=False)

    @classmethod
    def of(cls, folders: Iterable[Path], *, needed: Mapping[Path, int] | None = None) -> Claim:
        """Lock each folder, create it if its parent exists, and remove what earlier runs left in it.

        For one process of each node, before DeepSpeed starts on any of its ranks. `needed` are the bytes that this node's ranks
        will write, by folder. Raises UserError if another run swaps there, PreflightError if there is not enough free space.
        """
        claim = cls(cleared=Cleared(count=0, bytes=0), locks=[])
        try:
            for folder in sorted(folders):
                claim._add(folder)
            for folder, wanted in (needed or {}).items():
                _check_free_space(folder, wanted)
        except BaseException:
            claim.release()
            raise
        return claim

    def release(self) -> None:
        for lock in self.locks:
            lock.close()
        self.locks.clear()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _add(self, folder: Path) -> None:
        try:
            if not folder.is_dir():
                make_directory(folder)
            self.locks.append(_lock(folder))
            leftovers = Leftovers(folders=(folder,))
            paths, size = leftovers.paths(), leftovers.size()
            for path in paths:
                remove_tree(path)
        except OSError as error:
            raise UserError(
                f"cannot use the offload folder {folder}: {error}", fix="check its owner and permissions, or use another folder"
            ) from error
        self.cleared = Cleared(count=self.cleared.count + len(paths), bytes=self.cleared.bytes + size)


def claim_together(
    document: Mapping[str, object], communicator: Communicator, *, parameters: int, trained: int
) -> Claim | None:
    """One claim for each node, held by its first rank; None on the other ranks, and if nothing is swapped to a drive.

    Call it before DeepSpeed starts, and `release` at the end. *Collective*: if the folders of one node cannot be used, every
    rank raises UserError.
    """
    world = communicator.world
    wanted = swap_bytes(document, parameters, trained, share=world.local_size / world.size)
    if not wanted:
        return None
    claim, complaint = None, ""
    if world.local_rank == 0:
        try:
            claim = Claim.of(wanted, needed=wanted)
        except UserError as error:
            complaint = str(error)
    complaints = [each for each in communicator.all_gather_text(complaint) if each]
    if complaints:
        if claim is not None:
            claim.release()
        raise UserError(complaints[0])
    return claim


def check_free_space(config: Config, model: nn.Module) -> None:
    """Raises PreflightError if this node has not enough free space for what its ranks will swap of this model."""
    launch = config[LaunchOptions]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    document = resolved(config, world_size=launch.num_processes)
    for folder, wanted in swap_bytes(document, parameters, trained, share=1 / launch.num_machines).items():
        leftovers = Leftovers(folders=(folder,)).size() if folder.is_dir() else 0  # removed before the run starts
        _check_free_space(folder if folder.is_dir() else folder.parent, wanted, freed=leftovers)


def of_config(config: Config) -> Leftovers:
    """The folders that a configuration offloads to: the cache deepspeed-offload of `smalti cache`."""
    path = config[DeepSpeedOptions].offload_param_path
    named = [path] if path is not None else []
    if enabled(config):
        named += offload_folders(resolved(config, world_size=1))
    return Leftovers(folders=tuple(place(each) for each in dict.fromkeys(named)))


def swap_bytes(document: Mapping[str, object], parameters: int, trained: int, *, share: float = 1.0) -> dict[Path, int]:
    """What DeepSpeed will keep in each NVMe folder of a resolved document, in bytes.

    `parameters` counts the elements of the model, `trained` those that train. `share` is this node's share of
    the ranks. Parameters are kept in the compute dtype. Per trained element there are fp32 weight, gradient and two values of
    optimizer state.
    """
    zero = section(document, "zero_optimization")
    width = 2 if section(document, "bf16").get("enabled") is True else 4
    found: dict[Path, int] = {}
    for key, size in (("offload_param", parameters * width), ("offload_optimizer", trained * 16)):
        offload = section(zero, key)
        if offload.get("device") == "nvme" and offload.get("nvme_path"):
            folder = place(str(offload["nvme_path"]))
            found[folder] = found.get(folder, 0) + int(size * share)
    return found


def _check_free_space(folder: Path, wanted: int, *, freed: int = 0) -> None:
    free = free_bytes(folder)
    if free is not None and free + freed < wanted:
        raise PreflightError(
            f"the ranks of this node will swap about {format_bytes(wanted)} into {folder}, where {format_bytes(free)} are free",
            fix="free some space there, or use a folder on another drive with --offload_param_path",
        )


def _lock(folder: Path) -> io.BufferedWriter:
    import fcntl

    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        fix = "wait for it to end, or use another folder (--offload_param_path): each run and each node needs its own"
        raise UserError(f"another run swaps into {folder}", fix=fix) from None
    except BaseException:
        file.close()
        raise
    return file


def _size(path: Path) -> int:
    """Bytes in the files below a directory."""
    total = 0
    with os.scandir(path) as entries:
        for each in entries:
            if each.is_dir(follow_symlinks=False):
                total += _size(Path(each.path))
            else:
                total += each.stat(follow_symlinks=False).st_size
    return total
