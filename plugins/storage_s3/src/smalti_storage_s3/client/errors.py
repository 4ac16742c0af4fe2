"""What goes wrong with a request, and what the user reads about it. No message contains a secret or a signed address."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from smalti.data import AccessDeniedError, IntegrityError, MissingFileError, StorageError, TransientStorageError


class Kind(Enum):
    """What a failed request means for the next one."""

    TRANSIENT = "transient"
    """The store did not answer, or asks to wait: the same request may succeed later."""
    DAMAGED = "damaged"
    """The bytes that arrived are not those that were sent: the same request may succeed later."""
    STRANGE = "strange"
    """An answer that is none of S3: of a proxy in between, or of a store that lacks something. It may pass, or stay."""
    MISSING = "missing"
    DENIED = "denied"
    """Permissions, keys, clock: the same request fails again."""
    EXISTS = "exists"
    """A conditional write found an object under the key."""
    RANGE = "range"
    """The range begins after the end of the object."""
    CHANGED = "changed"
    """The object is another one than at the beginning of the read."""
    REFUSED = "refused"


class Fault(Exception):  # noqa: N818 - one answer, not yet an error for the user
    """A request that failed. `code` is the store's own word, or the name of an exception; `after` asks for seconds to wait."""

    def __init__(self, kind: Kind, code: str = "", *, status: int = 0, after: float = 0.0, detail: str = "") -> None:
        super().__init__(f"{status} {code}".strip())
        self.kind = kind
        self.code = code
        self.status = status
        self.after = after
        self.detail = detail


_TRANSIENT = frozenset(
    (
        "InternalError",
        "ServiceUnavailable",
        "SlowDown",
        "RequestTimeout",
        "RequestTimeoutException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "OperationAborted",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "TemporaryRedirect",
        "Busy",
        "ServerBusy",
    )
)
_DAMAGED = frozenset(
    (
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "InvalidDigest",
    )
)
_DENIED = frozenset(
    (
        "AccessDenied",
        "AllAccessDisabled",
        "AccountProblem",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "RequestTimeTooSkewed",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "InvalidSecurity",
        "NotSignedUp",
        "RequestExpired",
        "AuthorizationHeaderMalformed",
        "Unauthorized",
        "UnauthorizedAccess",
        "Forbidden",
    )
)


def fault_of(status: int, code: str, *, after: float = 0.0, detail: str = "") -> Fault:
    """Returns the fault that an answer means; `code` is the store's, empty where the answer has no body."""
    if code in _DENIED:
        kind = Kind.DENIED
    elif code in _DAMAGED:
        kind = Kind.DAMAGED
    elif code in ("NoSuchKey", "NotFound", "NoSuchUpload", "NoSuchVersion", "NoSuchBucket") or (status == 404):
        kind = Kind.MISSING
    elif code in ("PreconditionFailed", "ConditionNotMet") or status == 412:
        kind = Kind.EXISTS
    elif code in ("InvalidRange", "RequestedRangeNotSatisfiable") or status == 416:
        kind = Kind.RANGE
    elif code in _TRANSIENT or status in (307, 408, 409, 425, 429) or (status >= 500 and status not in (501, 505)):
        kind = Kind.TRANSIENT
    elif status in (401, 403):
        kind = Kind.DENIED
    else:
        kind = Kind.REFUSED
    return Fault(kind, code, status=status, after=after, detail=detail)


@dataclass(frozen=True, kw_only=True)
class _Message:
    text: str
    fix: str


_MESSAGES = {
    "InvalidAccessKeyId": _Message(
        text="the store does not know the access key", fix="check aws_access_key_id, or the profile or environment it is from"
    ),
    "SignatureDoesNotMatch": _Message(
        text="the signature does not match", fix="check aws_secret_access_key: usually the secret of another key, or cut off"
    ),
    "RequestTimeTooSkewed": _Message(
        text="the clock of this computer is wrong", fix="set the clock (timedatectl set-ntp true), then start again"
    ),
    "ExpiredToken": _Message(
        text="the temporary credentials have expired", fix="get new ones (aws sso login), then start again"
    ),
    "InvalidToken": _Message(text="the session token is not valid", fix="check aws_session_token, or leave it out"),
    "AuthorizationHeaderMalformed": _Message(text="the region is wrong", fix="set aws_region_name to the region of the bucket"),
    "PermanentRedirect": _Message(
        text="the bucket is in another region, or behind another endpoint", fix="set aws_region_name, or aws_endpoint_url"
    ),
    "NoCredentials": _Message(
        text="there are no credentials",
        fix="set aws_access_key_id and aws_secret_access_key (as {env:NAME}), aws_profile_name, or AWS_ACCESS_KEY_ID",
    ),
    "PartialCredentials": _Message(text="the credentials are incomplete", fix="set both the access key and the secret key"),
    "ProfileNotFound": _Message(text="there is no such profile", fix="check aws_profile_name; `aws configure list-profiles`"),
    "NoSuchBucket": _Message(text="there is no such bucket", fix="check aws_bucket_name and aws_endpoint_url"),
    "Unreachable": _Message(text="the store cannot be reached", fix="check aws_endpoint_url and the network"),
    "Certificate": _Message(
        text="the certificate of the store is not trusted", fix="check aws_endpoint_url, or set AWS_CA_BUNDLE"
    ),
}
_ALIASES = {
    "RequestExpired": "RequestTimeTooSkewed",
    "TokenRefreshRequired": "ExpiredToken",
    "IllegalLocationConstraintException": "AuthorizationHeaderMalformed",
    "AuthorizationQueryParametersError": "AuthorizationHeaderMalformed",
}


def error_of(fault: Fault, place: str, operation: str, *, tries: int = 1, seconds: float = 0.0) -> StorageError:
    """Returns the error that the user reads about `place`, the address of a file or bucket."""
    code = _ALIASES.get(fault.code, fault.code)
    known = _MESSAGES.get(code)
    answer = " ".join(word for word in (str(fault.status or ""), fault.code) if word) or "no answer"
    detail = f": {fault.detail}" if fault.detail else ""
    if fault.kind is Kind.TRANSIENT:
        text = known.text if known else f"the store did not answer as expected ({answer}{detail})"
        fix = known.fix if known else "check the network and the state of the store, then start again"
        return TransientStorageError(f"{place}: {operation} failed {tries} times in {seconds:.0f} s: {text}", fix=fix)
    if fault.kind is Kind.DAMAGED:
        message = f"{place}: {operation}: the bytes differ from their digest after {tries} tries ({answer}{detail})"
        return IntegrityError(message, fix="check the network; if it stays, write the file again")
    if known:
        types = {Kind.MISSING: MissingFileError, Kind.DENIED: AccessDeniedError}
        return types.get(fault.kind, StorageError)(f"{place}: {known.text} ({answer})", fix=known.fix)
    if fault.kind is Kind.MISSING:
        return MissingFileError(f"{place}: no such file", fix="restore the file, or scan the dataset again")
    if fault.kind is Kind.DENIED:
        return AccessDeniedError(
            f"{place}: permission denied ({answer})",
            fix=f"the key needs {_PERMISSIONS.get(operation, 'more permissions')}; check the policy of the user and the bucket",
        )
    if fault.kind is Kind.CHANGED:
        return StorageError(f"{place}: changed while it was read", fix="scan the dataset again")
    return StorageError(f"{place}: {operation}: the store refused it ({answer}{detail})", fix="see docs/s3.md")


_PERMISSIONS = {
    "list": "s3:ListBucket",
    "read": "s3:GetObject",
    "stat": "s3:GetObject (and s3:ListBucket, to see that a file is missing)",
    "write": "s3:PutObject",
    "delete": "s3:DeleteObject",
    "uploads": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
}
