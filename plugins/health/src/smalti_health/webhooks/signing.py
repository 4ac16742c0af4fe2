"""Signatures of Standard Webhooks (https://www.standardwebhooks.com): HMAC-SHA256 of "id.timestamp.body"."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
SMALLEST, LARGEST = 24, 64
"""Bytes of a key."""


def decode_key(secret: str) -> bytes:
    """The key that "whsec_BASE64" stands for. Raises ValueError, with a message without the key."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("it is not base64") from None
    if not SMALLEST <= len(key) <= LARGEST:
        raise ValueError(f"it has {len(key)} bytes, not {SMALLEST} to {LARGEST}")
    return key


def signed_headers(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers `webhook-...` of a message. It is signed with every key, so that receivers can replace theirs one by one."""
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(decode_key(each), content, hashlib.sha256)).decode() for each in secrets]
    if signatures:
        headers["webhook-signature"] = " ".join(f"v1,{each}" for each in signatures)
    return headers
