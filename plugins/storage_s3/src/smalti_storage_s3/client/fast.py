"""Small objects with obstore, where it is installed: a third of boto3's CPU time. Credentials and all else are boto3's.

obstore checks lengths and ranges, and no digest; that is done above it, for both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.boto import BotoTransport
from smalti_storage_s3.client.errors import Fault, Kind, fault_of
from smalti_storage_s3.client.transport import Answer, Block, Head

if TYPE_CHECKING:
    from obstore.store import S3Store

_BLOCK = 1 << 20
_STATUS = re.compile(r"status code: (\d+)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_BROKEN = re.compile(r"HttpError|HTTP error|reqwest|error decoding|Got invalid|timed out", re.IGNORECASE)
_process: int | None = None
"""The process whose threads obstore runs in; it does not survive a fork."""


def open_fast(boto: BotoTransport, timeouts: Timeouts) -> FastTransport | None:
    """Returns the faster transport; None if obstore is not installed, or was used before this process was forked."""
    global _process
    try:
        import obstore  # noqa: F401 - whether it is there
    except ImportError:
        return None
    if _process not in (None, os.getpid()):
        return None
    _process = os.getpid()
    return FastTransport(boto, timeouts)


class FastTransport:
    """One client, which all threads share."""

    name = "obstore"

    def __init__(self, boto: BotoTransport, timeouts: Timeouts) -> None:
        self._credentials = boto.session.get_credentials()
        if self._credentials is None:
            raise Fault(Kind.DENIED, "NoCredentials")
        self._boto = boto
        self._store = self._open(boto, timeouts)

    def get(self, key: str, start: int, end: int | None, etag: str | None) -> Answer:
        import obstore

        options: dict[str, Any] = {}
        if start > 0 or end is not None:
            options["range"] = {"offset": start} if end is None else (start, end)
        if etag:
            options["if_match"] = f'"{etag}"'
        with _faults(changed=etag is not None):
            found = obstore.get(self._store, key, options=cast(Any, options))
        first, last = found.range
        head = _head(found)
        return Answer(head=head, start=first, length=last - first, blocks=_blocks(found))

    def put(self, key: str, data: Block, metadata: Mapping[str, str], *, new: bool = False) -> None:
        import obstore

        with _faults():
            obstore.put(
                self._store,
                key,
                data,
                attributes=cast(Any, dict(metadata)),
                mode="create" if new else "overwrite",
                use_multipart=False,
            )

    def head(self, key: str) -> Head:
        import obstore

        with _faults():
            # Unlike obstore.head, this has the metadata too.
            found = obstore.get(self._store, key, options={"head": True})
        return _head(found)

    def delete(self, key: str) -> None:
        self._boto.delete(key)  # obstore asks for many at once, which not all stores understand

    def _open(self, boto: BotoTransport, timeouts: Timeouts) -> S3Store:
        from obstore.store import S3Store

        settings = boto.settings
        endpoint = settings.endpoint_url
        if endpoint is None and "amazonaws.com" not in boto.client.meta.endpoint_url:
            endpoint = boto.client.meta.endpoint_url  # from AWS_ENDPOINT_URL, or the profile
        return S3Store(
            settings.bucket_name,
            endpoint=endpoint,
            region=boto.region if endpoint else boto.bucket_region(),
            virtual_hosted_style_request=endpoint is None,
            credential_provider=self._credential,
            checksum_algorithm="SHA256",  # SeaweedFS does not compare the digest in the signature
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=timeouts.connect_timeout),
                "timeout": timedelta(seconds=timeouts.read_timeout),
                "pool_max_idle_per_host": str(settings.max_pool_connections),
            },
            retry_config={
                "max_retries": 0,
                "retry_timeout": timedelta(seconds=1),
                "backoff": {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=1), "base": 2},
            },
        )

    def _credential(self) -> Any:
        """What obstore signs with; asked again when it expires. boto3 renews it where it can."""
        frozen = self._credentials.get_frozen_credentials()
        renewed = self._credentials.method not in ("explicit", "env", "shared-credentials-file", "config-file")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=6) if renewed else None,
        }


def _head(found: Any) -> Head:
    meta = found.meta
    if not meta["e_tag"]:
        raise Fault(Kind.STRANGE, "NoETag", status=200, detail="the answer has no etag")
    return Head(size=meta["size"], etag=meta["e_tag"].strip('"'), metadata=found.attributes)


def _blocks(found: Any) -> Iterator[bytes]:
    with _faults():
        yield from found.stream(min_chunk_size=_BLOCK)


@contextmanager
def _faults(*, changed: bool = False) -> Iterator[None]:
    """Turns what obstore raises into Faults. Its texts have the answer of the store in them."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.BaseError, FileNotFoundError) as error:
        text = str(error)
        status, word = _STATUS.search(text), _CODE.search(text)
        fault = fault_of(int(status[1]) if status else 0, word[1] if word else "")
        if changed and fault.kind is Kind.EXISTS:
            fault = Fault(Kind.CHANGED, fault.code, status=fault.status)
        elif isinstance(error, exceptions.AlreadyExistsError):
            fault = Fault(Kind.EXISTS, fault.code, status=fault.status)
        elif "NotPartial" in text or "UnexpectedRange" in text:
            fault = Fault(Kind.STRANGE, "RangeIgnored", status=200, detail="the store does not answer ranges as asked")
        elif status is None:
            # The connection, or an answer that it could not read.
            broken = _BROKEN.search(text) is not None
            code = "Unreachable" if "kind: Connect" in text else type(error).__name__
            fault = Fault(Kind.TRANSIENT if broken else Kind.STRANGE, code)
        raise fault from None
