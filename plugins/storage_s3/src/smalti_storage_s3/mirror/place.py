"""The place of a mirror: "s3://BUCKET/PREFIX" or a folder. Imports neither torch nor boto3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import Config, UserError
from smalti.data import LocalStorage, Storage

if TYPE_CHECKING:
    from smalti.checkpoint import RunPlace

SCHEME = "s3://"


@dataclass(frozen=True, kw_only=True)
class Access:
    """How the object store is reached. None: from the environment and the files of the AWS tools. Never credentials."""

    endpoint_url: str | None = None
    profile_name: str | None = None
    region_name: str | None = None

    def flags(self) -> list[str]:
        """The options of `smalti mirror` that give this."""
        return [f"--{name}={value}" for name, value in vars(self).items() if value is not None]


def is_url(place: str) -> bool:
    """Whether a place is not a folder."""
    return "://" in place


def check_place(place: str) -> None:
    """Raises UserError for a URL of another kind, or without a bucket."""
    if is_url(place) and (not place.startswith(SCHEME) or not place.removeprefix(SCHEME).strip("/")):
        raise UserError(f"{place!r} is not the place of a mirror", fix="s3://BUCKET/PREFIX, or the path of a folder")


def open_run(url: str, config: Config | None) -> RunPlace:
    """The run at a URL, reached as the mirror of the run is, without a run as the environment says."""
    from smalti_data.remote.place import RemotePlace
    from smalti_storage_s3.mirror.options import MirrorOptions

    access = Access() if config is None else config[MirrorOptions].access
    return RemotePlace(url, lambda place: open_place(place, access))


def open_place(place: str, access: Access, *, create: bool = False) -> Storage:
    """The storage at a place. With `create`, a folder is created. Raises StorageError if it cannot be reached."""
    check_place(place)
    if is_url(place):
        from smalti_storage_s3.client.settings import settings_of_url
        from smalti_storage_s3.client.storage import S3Storage

        return S3Storage(settings_of_url(place, {f"aws_{name}": value for name, value in vars(access).items()}))
    path = Path(place).expanduser()
    if create:
        path.mkdir(parents=True, exist_ok=True)
    return LocalStorage(path)
