"""S3 for `smalti doctor`: whether each bucket of a run answers to its credentials, and the clock of its server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from smalti import Config, Finding, UserError
from smalti.data import catalog_of, dataset_specs
from smalti.plugins import Selection, load_plugins
from smalti_storage_s3.client.settings import S3Settings, settings_of, settings_of_url
from smalti_storage_s3.mirror.options import MirrorOptions
from smalti_storage_s3.mirror.place import is_url

_CHECK = "S3"
_SECONDS = 12.0
_REFUSED_SECONDS = 900.0
"""S3 refuses requests whose time differs by more."""
_NOTICED_SECONDS = 60.0


def s3_findings(config: Config) -> list[Finding]:
    """One or two for each place of the datasets and the mirror. Nothing is written there."""
    places = {each.location: each for each in _places(config)}
    if not places:
        return []
    clocks = {each.endpoint_url or "https://s3.amazonaws.com": None for each in places.values()}
    with ThreadPoolExecutor(16, thread_name_prefix="smalti-s3-check") as pool:
        found = [finding for findings in pool.map(_reached, places.values()) for finding in findings]
        return found + [finding for findings in pool.map(clock, clocks) for finding in findings]


def _places(config: Config) -> Iterator[S3Settings]:
    """What is wrong with the configuration itself is reported by its own checks."""
    options = config[MirrorOptions]
    try:
        for spec in dataset_specs(config, catalog_of(load_plugins(Selection(), strict=False))):
            if spec.type == "aws":
                yield settings_of(spec.storage_options, f"dataset {spec.id!r}")
        if options.checkpoint_mirror is not None and is_url(options.checkpoint_mirror):
            access = {f"aws_{name}": value for name, value in vars(options.access).items()}
            yield settings_of_url(options.checkpoint_mirror, access)
    except UserError:
        return


def _reached(settings: S3Settings) -> list[Finding]:
    from smalti_storage_s3.check import check
    from smalti_storage_s3.client.attempts import Timeouts
    from smalti_storage_s3.client.storage import S3Storage

    try:
        storage = S3Storage(settings, timeouts=Timeouts(deadline=_SECONDS, first_deadline=_SECONDS / 2))
        results = check(storage, write=False)
    except UserError as error:
        return [Finding(check=_CHECK, level="error", message=f"{settings.location}: {error.message}", fix=error.fix)]
    failed = [each for each in results if each.ok is False and each.name in ("list", "read")]
    if failed:
        fix = "smalti s3 check tries each step, with --write also writing"
        return [
            Finding(check=_CHECK, level="error", message=f"{settings.location}: {each.detail}", fix=each.fix or fix)
            for each in failed
        ]
    details = "; ".join(each.detail for each in results if each.name in ("list", "read"))
    return [Finding(check=_CHECK, level="ok", message=f"{settings.location}: {details}")]


def clock(endpoint: str) -> list[Finding]:
    """The difference between the clock of a server and that of this node, if the server says its time."""
    parts = urlsplit(endpoint)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_SECONDS / 2)
    try:
        connection.request("HEAD", "/")
        server = connection.getresponse().getheader("Date")
        ahead = time.time() - parsedate_to_datetime(server).timestamp() if server else 0.0
    except (OSError, HTTPException, ValueError, TypeError):
        return []  # that it cannot be reached is another finding, and a proxy may be needed
    finally:
        connection.close()
    if abs(ahead) < _NOTICED_SECONDS:
        return []
    way = "ahead of" if ahead > 0 else "behind"
    refused = abs(ahead) >= _REFUSED_SECONDS
    message = f"the clock of this node is {abs(ahead):.0f} s {way} that of {endpoint}; S3 refuses requests from 15 minutes on"
    fix = "synchronise the clock with NTP (chrony, timedatectl set-ntp true)"
    return [Finding(check=_CHECK, level="error" if refused else "warning", message=message, fix=fix)]
