"""The folders that training writes to: free space, the file system, and whether saves are safe there, which is tried."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smalti import Finding
from smalti.system import format_bytes
from smalti_doctor.report import Section

_GIB = 1 << 30
_FEW_INODES = 10_000
_CLOCK_SECONDS = 5.0
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "fuse.glusterfs",
    "fuse.sshfs",
)
_OBJECT_STORES = ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.mount-s3", "fuse.blobfuse", "fuse.blobfuse2")
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that training writes to. `wanted` is the free space in bytes below which it is a warning."""

    name: str
    path: Path
    wanted: int


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The file system of a folder, as the kernel knows it."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Small saves, as checkpoints make them. Times are the longest of a few, in milliseconds.

    `problem` is what did not work. `clock` is how far the times of new files are ahead of this node's clock, in seconds.
    """

    problem: str = ""
    fsync_ms: float = 0.0
    rename_ms: float = 0.0
    clock: float = 0.0


def folders(output_dir: Path | None) -> list[Folder]:
    """Those of this user. Without an `output_dir`, the current folder stands for it."""
    from platformdirs import user_cache_path

    hub = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return [
        Folder(name="output_dir", path=output_dir or Path.cwd(), wanted=10 * _GIB),
        Folder(name="caches", path=user_cache_path("smalti"), wanted=_GIB),
        Folder(name="HF_HOME", path=Path(hub).expanduser(), wanted=10 * _GIB),
        Folder(name="temporary files", path=Path(tempfile.gettempdir()), wanted=_GIB),
    ]


def storage(places: list[Folder], root: Path = Path("/")) -> Section:
    """Tries saves in the first folder, or in the nearest existing one above it. `root` is where /proc is."""
    facts: dict[str, object] = {}
    findings: list[Finding] = []
    mounts = read_mounts(root)
    for number, folder in enumerate(places):
        path = existing(folder.path)
        mount = mount_of(path, mounts)
        usage, inodes = shutil.disk_usage(path), _free_inodes(path)
        described: dict[str, object] = {
            "path": str(folder.path),
            "total": usage.total,
            "free": usage.free,
            "free_inodes": inodes,
            "file_system": mount.kind if mount else None,
            "options": list(mount.options) if mount else [],
        }
        findings += _of_space(folder, usage.free, inodes, mount)
        if number == 0:
            trial = try_saves(path)
            described |= {"fsync_ms": trial.fsync_ms, "rename_ms": trial.rename_ms, "clock_ahead": trial.clock}
            findings += _of_trial(folder, path, trial)
            findings += _of_mount(folder, mount) if mount else ()
        facts[folder.name] = described
    return Section(name="storage", facts=facts, findings=findings)


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _mount(line)) is not None]


def _mount(line: str) -> Mount | None:
    """A line of /proc/self/mountinfo: proc(5)."""
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if len(fields) < 6 or len(rest) < 3:
        return None
    point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
    return Mount(point=point, kind=rest[0], source=rest[1], options=(*fields[5].split(","), *rest[2].split(",")))


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The last mounted of those with the longest path that contains this one."""
    real = path.resolve()
    fitting = [mount for mount in mounts if real.is_relative_to(mount.point)]
    return max(reversed(fitting), key=lambda mount: len(mount.point), default=None)


def try_saves(folder: Path) -> Trial:
    """Write, fsync, replace by rename and list in a new folder inside this one, which is removed again."""
    try:
        place = Path(tempfile.mkdtemp(prefix=".smalti-doctor-", dir=folder))
    except OSError as error:
        return Trial(problem=f"cannot be written to: {error.strerror or error}")
    fsyncs, renames, clock = [], [], 0.0
    try:
        for number in range(_ROUNDS):
            draft, target = place / f"draft-{number}", place / "target"
            begun = time.perf_counter()
            with draft.open("wb") as file:
                file.write(number.to_bytes(4096, "big"))
                file.flush()
                os.fsync(file.fileno())
            clock = draft.stat().st_mtime - time.time()
            fsyncs.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            draft.replace(target)
            names = sorted(path.name for path in place.iterdir())
            renames.append(time.perf_counter() - begun)
            if names != ["target"]:
                return Trial(problem=f"lists {', '.join(names) or 'nothing'} after a rename: saves are not seen as complete")
            if target.read_bytes() != number.to_bytes(4096, "big"):
                return Trial(problem="has the old content of a file after it was replaced")
        _sync_folder(place)
    except OSError as error:
        return Trial(problem=f"cannot save safely: {error.strerror or error}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Trial(
        fsync_ms=round(1000 * max(fsyncs), 2),
        rename_ms=round(1000 * max(renames), 2),
        clock=round(clock, 1) if abs(clock) > 1 else 0.0,
    )


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_inodes(path: Path) -> int | None:
    """None where the file system has no fixed number of them."""
    status = os.statvfs(path)
    return status.f_favail if status.f_files else None


def _of_space(folder: Folder, free: int, inodes: int | None, mount: Mount | None) -> Iterator[Finding]:
    where = f"{folder.name} {folder.path}{f' ({mount.kind})' if mount else ''}"
    if free < folder.wanted:
        move = {"HF_HOME": "set HF_HOME", "caches": "set XDG_CACHE_HOME", "temporary files": "set TMPDIR"}.get(folder.name)
        fix = f"free space there, or {move or 'choose another --output_dir'}"
        yield Finding(check="disk", level="warning", message=f"{where}: only {format_bytes(free)} are free", fix=fix)
    else:
        yield Finding(check="disk", level="ok", message=f"{where}: {format_bytes(free)} free")
    if inodes is not None and inodes < _FEW_INODES:
        message = f"{where}: only {inodes:,} more files can be created (inodes)"
        yield Finding(check="disk", level="warning", message=message, fix="remove folders of many small files there")


def _of_trial(folder: Folder, path: Path, trial: Trial) -> Iterator[Finding]:
    if trial.problem:
        fix = "choose another --output_dir, or check the owner and permissions of the folder"
        yield Finding(check=folder.name, level="error", message=f"{path} {trial.problem}", fix=fix)
        return
    message = f"saves work in {path}: fsync {trial.fsync_ms:g} ms, rename and listing {trial.rename_ms:g} ms"
    yield Finding(check=folder.name, level="ok", message=message)
    if abs(trial.clock) > _CLOCK_SECONDS:
        way = "ahead of" if trial.clock > 0 else "behind"
        message = f"the clock of the file server is {abs(trial.clock):g} s {way} that of this node"
        yield Finding(check="clock", level="warning", message=message, fix="synchronise both clocks with NTP (chrony)")


def _of_mount(folder: Folder, mount: Mount) -> Iterator[Finding]:
    where, options = f"{folder.path} is on {mount.kind}", dict(option.partition("=")[::2] for option in mount.options)
    if mount.kind in _OBJECT_STORES:
        message = f"{where}: an object store that is mounted has no atomic renames, so a checkpoint may be seen half written"
        fix = "choose a local or network file system as --output_dir; smalti-storage_s3 uploads checkpoints to S3"
        yield Finding(check=folder.name, level="warning", message=message, fix=fix)
    elif mount.kind.startswith("nfs"):
        yield from _of_nfs(folder, where, options)
    elif mount.kind in _NETWORK:
        yield Finding(check=folder.name, level="note", message=f"{where}, mounted with {','.join(mount.options)}")
    elif mount.kind in ("tmpfs", "ramfs"):
        message = f"{where}: checkpoints there take memory and are lost when the node restarts"
        yield Finding(check=folder.name, level="warning", message=message, fix="choose an --output_dir on a disk")
    elif mount.kind == "overlay":
        message = f"{where}: what is written there is lost with the container, unless it is committed"
        yield Finding(check=folder.name, level="note", message=message, fix="mount a volume for --output_dir")


def _of_nfs(folder: Folder, where: str, options: Mapping[str, str]) -> Iterator[Finding]:
    shown = ",".join(f"{name}={value}" if value else name for name, value in options.items())
    if "soft" in options or "softerr" in options:
        message = f"{where} with the option soft: a server that is slow becomes an error in the middle of a save"
        yield Finding(check=folder.name, level="warning", message=message, fix="mount it with hard")
    else:
        message = f"{where}, mounted with {shown}: other nodes see new files after up to {options.get('acdirmax', '60')} s"
        yield Finding(check=folder.name, level="note", message=message)
