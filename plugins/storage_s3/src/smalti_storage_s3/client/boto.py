"""Requests with boto3, which knows every way to find credentials. Retries are in `attempts`."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from hashlib import md5
from typing import Any

from smalti_storage_s3.client.attempts import Timeouts
from smalti_storage_s3.client.errors import Fault, Kind, fault_of
from smalti_storage_s3.client.listing import parse_page
from smalti_storage_s3.client.settings import S3Settings
from smalti_storage_s3.client.transport import Answer, Block, Head, Page

_BLOCK = 1 << 20


@cache
def _loader() -> Any:
    """The descriptions of the services, which take a tenth of a second to read, once for all clients of the process."""
    from botocore.loaders import Loader

    return Loader()


def open_session(settings: S3Settings) -> Any:
    """Returns a session of boto3. Raises a Fault for a profile that does not exist."""
    from boto3 import Session
    from botocore.exceptions import ProfileNotFound
    from botocore.session import get_session

    core = get_session()
    try:
        session = Session(
            settings.access_key_id,
            settings.secret_access_key,
            settings.session_token,
            botocore_session=core,
            profile_name=settings.profile_name,
        )
        session.region_name  # noqa: B018 - reads the profile
    except ProfileNotFound:
        raise Fault(Kind.DENIED, "ProfileNotFound") from None
    core.register_component("data_loader", _loader())  # afterwards: each session of boto3 adds a folder to its loader
    return session


def region_of(settings: S3Settings, session: Any) -> str:
    """The region that requests are signed for. Without one, boto3 asks where a bucket of AWS is; R2 has one called auto."""
    found = settings.region_name or session.region_name or os.environ.get("AWS_REGION")
    if found:
        return str(found)
    return "auto" if "cloudflarestorage.com" in (settings.endpoint_url or "") else "us-east-1"


class BotoTransport:
    """One client, which all threads share. Also what only boto3 has: listings, and uploads in parts."""

    name = "boto3"

    def __init__(self, settings: S3Settings, timeouts: Timeouts) -> None:
        from botocore.config import Config

        self.settings = settings
        self.bucket = settings.bucket_name
        self.session = open_session(settings)
        self.region = region_of(settings, self.session)
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=timeouts.connect_timeout,
            read_timeout=timeouts.read_timeout,
            max_pool_connections=settings.max_pool_connections,
            tcp_keepalive=True,
            parameter_validation=False,
            # Stores that are merely compatible refuse the checksums that boto3 adds by itself. They know Content-MD5.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if settings.endpoint_url else "auto"},
        )
        with _faults():
            self.client = self.session.client("s3", endpoint_url=settings.endpoint_url, region_name=self.region, config=config)
        self.client.meta.events.register("before-parse.s3.ListObjectsV2", _take_listing)

    def bucket_region(self) -> str:
        """The region of a bucket of AWS, which the store reports when it asks in another one."""
        if self.settings.region_name:
            return self.region
        with _faults():
            return str(self.client.head_bucket(Bucket=self.bucket).get("BucketRegion") or self.region)

    def get(self, key: str, start: int, end: int | None, etag: str | None) -> Answer:
        given: dict[str, Any] = {"Bucket": self.bucket, "Key": key}
        ranged = start > 0 or end is not None
        if ranged:
            given["Range"] = f"bytes={start}-" if end is None else f"bytes={start}-{end - 1}"
        if etag:
            given["IfMatch"] = f'"{etag}"'
        with _faults(changed=etag is not None):
            found = self.client.get_object(**given)
        headers = found["ResponseMetadata"]["HTTPHeaders"]
        first, size = _place(found, start if ranged else 0, ranged=ranged)
        head = Head(size=size, etag=_etag(found), metadata=found.get("Metadata", {}))
        return Answer(head=head, start=first, length=int(headers["content-length"]), blocks=_blocks(found["Body"]))

    def put(self, key: str, data: Block, metadata: Mapping[str, str], *, new: bool = False) -> None:
        given: dict[str, Any] = {"IfNoneMatch": "*"} if new else {}
        with _faults():
            body, digest = _sent(data)
            found = self.client.put_object(
                Bucket=self.bucket, Key=key, Body=body, ContentMD5=digest, Metadata=dict(metadata), **given
            )
            _etag(found)

    def head(self, key: str) -> Head:
        with _faults():
            found = self.client.head_object(Bucket=self.bucket, Key=key)
        return Head(size=found["ContentLength"], etag=_etag(found), metadata=found.get("Metadata", {}))

    def delete(self, key: str) -> None:
        with _faults():
            self.client.delete_object(Bucket=self.bucket, Key=key)

    def list_page(self, prefix: str, after: str, delimiter: str = "", token: str = "") -> Page:
        """Up to 1,000 objects after a key. With a delimiter, common prefixes are keys that end with it."""
        given = {"Bucket": self.bucket, "Prefix": prefix, "EncodingType": "url"}
        if after:
            given["StartAfter"] = after
        if delimiter:
            given["Delimiter"] = delimiter
        if token:
            given["ContinuationToken"] = token
        with _faults():
            found = self.client.list_objects_v2(**given)
        page: Page | None = found.get("smalti")
        if page is None:
            raise Fault(Kind.STRANGE, "NoListing", status=200, detail="the answer is not a listing")
        return page

    # --- uploads in parts ------------------------------------------------------------------------------------------

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        with _faults():
            found = self.client.create_multipart_upload(Bucket=self.bucket, Key=key, Metadata=dict(metadata))
        return str(found["UploadId"])

    def part(self, key: str, upload: str, number: int, data: Block) -> str:
        """Sends one part; returns its etag."""
        with _faults():
            body, digest = _sent(data)
            found = self.client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=number, Body=body, ContentMD5=digest
            )
            return _etag(found)

    def complete(self, key: str, upload: str, etags: list[str]) -> None:
        parts = [{"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in enumerate(etags, start=1)]
        with _faults():
            _etag(
                self.client.complete_multipart_upload(
                    Bucket=self.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
                )
            )

    def abort(self, key: str, upload: str) -> None:
        with _faults():
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)

    def uploads(self, prefix: str) -> list[tuple[str, str, datetime]]:
        """Uploads that were begun and neither completed nor aborted: key, id, time of begin."""
        found = []
        with _faults():
            for page in self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix):
                found += [(each["Key"], each["UploadId"], each["Initiated"]) for each in page.get("Uploads", ())]
        return found


def _sent(data: Block) -> tuple[bytes | bytearray, str]:
    """What boto3 can send, with the digest that stores refuse other bytes by."""
    body = data if isinstance(data, bytes) else bytearray(data)
    return body, b64encode(md5(body, usedforsecurity=False).digest()).decode()


def _place(found: Mapping[str, Any], start: int, *, ranged: bool) -> tuple[int, int]:
    """Returns where the answer begins and the size of the whole object. Some stores answer ranges with the whole object."""
    status = found["ResponseMetadata"]["HTTPStatusCode"]
    if not ranged:
        return 0, int(found["ContentLength"])
    span = found.get("ContentRange", "")
    if status != 206 or not span.startswith(f"bytes {start}-") or not span.rpartition("/")[2].isdigit():
        raise Fault(Kind.STRANGE, "RangeIgnored", status=status, detail="the store does not answer ranges as asked")
    return start, int(span.rpartition("/")[2])


def _etag(found: Mapping[str, Any]) -> str:
    etag = found.get("ETag")
    if not etag:
        # Every real answer has one; a page of a proxy, or an error with status 200, has none.
        status = found["ResponseMetadata"]["HTTPStatusCode"]
        raise Fault(Kind.STRANGE, "NoETag", status=status, detail="the answer has no etag")
    return str(etag).strip('"')


def _take_listing(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object) -> None:
    """Parse a listing here, in a tenth of boto3's time, and leave boto3 an empty one."""
    if response_dict["status_code"] == 200:
        page = parse_page(response_dict["body"], response_dict["headers"].get("server", ""))
        if page is not None:
            customized_response_dict["smalti"] = page
            response_dict["body"] = b"<ListBucketResult></ListBucketResult>"


def _blocks(body: Any) -> Iterator[bytes]:
    with _faults():
        try:
            yield from body.iter_chunks(_BLOCK)
        finally:
            body.close()


@contextmanager
def _faults(*, changed: bool = False) -> Iterator[None]:
    """Turns what boto3 raises into Faults. `changed`: a failed precondition means that the object is another one."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except HTTPError as error:  # the body of an error is cut off, and boto3 read it for an answer that it would have streamed
        raise Fault(Kind.TRANSIENT, type(error).__name__) from None
    except ResponseParserError:
        raise Fault(Kind.STRANGE, "NoS3", detail="the answer is not one of S3") from None
    except boto.ClientError as error:
        fault = _fault(error.response)
        if changed and fault.kind is Kind.EXISTS:
            fault = Fault(Kind.CHANGED, fault.code, status=fault.status)
        raise fault from None
    except boto.NoCredentialsError:
        raise Fault(Kind.DENIED, "NoCredentials") from None
    except boto.PartialCredentialsError:
        raise Fault(Kind.DENIED, "PartialCredentials") from None
    except (boto.TokenRetrievalError, boto.SSOError):
        raise Fault(Kind.DENIED, "ExpiredToken") from None
    except boto.CredentialRetrievalError as error:
        raise Fault(Kind.TRANSIENT, type(error).__name__) from None
    except boto.SSLError:
        raise Fault(Kind.REFUSED, "Certificate") from None
    except (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError):
        raise Fault(Kind.TRANSIENT, "Unreachable") from None
    except boto.BotoCoreError as error:
        transient = isinstance(error, boto.HTTPClientError | boto.IncompleteReadError)
        raise Fault(Kind.TRANSIENT if transient else Kind.REFUSED, type(error).__name__) from None


def _fault(response: Mapping[str, Any]) -> Fault:
    about = response.get("ResponseMetadata", {})
    code = str(response.get("Error", {}).get("Code", ""))
    after = str(about.get("HTTPHeaders", {}).get("retry-after", ""))
    return fault_of(
        int(about.get("HTTPStatusCode", 0)),
        "" if code.isdigit() else code,
        after=min(float(after), 60.0) if after.isdigit() else 0.0,
    )
