"""Who may write to a mirror: one run, and of that run the last launch.

A store that creates files once (`If-None-Match` on S3) decides between two writers. On others the file is read back, which
leaves a short time in which two launches may both believe that they own the mirror. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from smalti import InUseError, UserError
from smalti.data import MissingFileError, Storage
from smalti.system import load_json

OWNER = "mirror.json"
LAUNCHES = "launches/"
_KIND = "smalti-mirror"


class SupersededError(InUseError):
    """A later launch of the same run writes to this mirror."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The content of mirror.json: the id of the run, the time in UTC, the host on which it began."""

    run: str
    created: str = ""
    host: str = ""


def owner_of(storage: Storage) -> Owner | None:
    """The run that a mirror belongs to; None for a new mirror. Raises UserError for a file of something else."""
    try:
        content: object = load_json(storage.read(OWNER))
    except MissingFileError:
        return None
    except ValueError:
        content = None
    match content:
        case {"kind": str(kind), "run": str(run), "created": str(created), "host": str(host)} if kind == _KIND:
            return Owner(run=run, created=created, host=host)
    raise UserError(f"{storage.location}/{OWNER} is not the file of a mirror", fix="choose another --checkpoint_mirror")


def check_owner(storage: Storage, run: str | None) -> Owner | None:
    """The owner. Raises InUseError if that is another run than `run`; None is a run that has no id yet."""
    owner = owner_of(storage)
    if owner is not None and owner.run != run:
        raise InUseError(
            f"{storage.location} is the mirror of another run: {owner.run}, begun {owner.created} on {owner.host}",
            fix="choose another --checkpoint_mirror; or continue that run with its --output_dir, or with an empty one",
        )
    return owner


@dataclass(frozen=True)
class Lease:
    """The right of one launch to write to a mirror. `number` counts the launches of the run."""

    storage: Storage
    number: int

    @classmethod
    def take(cls, storage: Storage, run: str) -> Lease:
        """Become the launch that writes. Raises InUseError if the mirror belongs to another run."""
        here = {"created": _now(), "host": socket.gethostname()}
        if check_owner(storage, run) is None:
            storage.create(OWNER, _encode({"kind": _KIND, "version": 1, "run": run, **here}))
            check_owner(storage, run)
        while True:
            known = [stored.key for stored in storage.list(LAUNCHES)]
            number = max((_number(key) for key in known), default=0) + 1
            if storage.create(_key(number), _encode(here)):
                break
        if storage.deletes:
            for key in known:  # a launch before the last one finds the newest all the same
                if 0 < _number(key) < number - 1:
                    storage.delete(key)
        return cls(storage, number)

    def check(self) -> None:
        """Raises SupersededError if a later launch of the run has begun to write."""
        later = [stored.key for stored in self.storage.list(LAUNCHES) if _number(stored.key) > self.number]
        if later:
            content = load_json(self.storage.read(later[-1]))
            raise SupersededError(
                f"another launch of this run, begun {content['created']} on {content['host']}, writes to "
                f"{self.storage.location}, so this one does not any more",
                fix="end one of the two launches; this one needs another --checkpoint_mirror",
            )


def _number(key: str) -> int:
    stem = key.removeprefix(LAUNCHES).removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0


def _key(number: int) -> str:
    return f"{LAUNCHES}{number:08d}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _encode(content: object) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
