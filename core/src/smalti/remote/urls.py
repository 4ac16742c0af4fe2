"""URLs such as s3://BUCKET/PREFIX in place of paths: the storage behind them. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from smalti.checkpoint import parse_checkpoint_name
from smalti.config import Config, package_of_scheme
from smalti.errors import UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, create
from smalti.remote.checkpoints import CHECKPOINTS, RemoteRun

if TYPE_CHECKING:
    from smalti.data import Storage


def is_url(place: str) -> bool:
    """Whether a place is not a path."""
    return "://" in place


def open_url(url: str, plugins: Plugins, config: Config | None = None) -> Storage:
    """The storage of a URL, from the plugin that registered its scheme. Sends nothing.

    Raises MissingPlugin if that plugin is not installed, and UserError for a scheme that no plugin knows.
    """
    scheme = url.partition("://")[0]
    entries = plugins.gather(HookSpecs.register_storage)
    for entry in entries:
        if scheme in entry.schemes:
            return cast("Storage", create(entry, entry.open_url, url, config))
    if package := package_of_scheme(scheme):
        raise package.error(f"{url} needs a plugin")
    known = ", ".join(f"{each}://" for entry in entries for each in entry.schemes)
    raise UserError(f"no plugin opens {url}", fix=f"give a path, or a URL of {known}" if known else "give a path")


def open_run(url: str, plugins: Plugins, config: Config | None = None) -> RemoteRun:
    """The run at a URL: that of the run, or of its folder `checkpoints`, or of one checkpoint, which the result has `only`."""
    parts, only = url.rstrip("/").split("/"), ""
    if len(parts) > 4 and parse_checkpoint_name(parts[-1]) is not None:
        only = parts.pop()
    if len(parts) > 4 and parts[-1] == CHECKPOINTS:
        return RemoteRun(open_url("/".join(parts[:-1]), plugins, config), only=only)
    return RemoteRun(open_url("/".join(parts), plugins, config), folder="" if only else f"{CHECKPOINTS}/", only=only)
