"""What Discord gets: a text. Nobody is notified, whatever a caption or a message says."""

from __future__ import annotations

import json

LONGEST = 1990
"""Discord takes 2,000 characters, which it counts in UTF-16."""


def discord_body(prefix: str, text: str) -> bytes:
    """The JSON of a message, shortened to what Discord takes."""
    content = f"{prefix} {text}".strip()
    return json.dumps({"content": _shortened(content), "allowed_mentions": {"parse": []}}).encode()


def _shortened(text: str) -> str:
    if _length(text) <= LONGEST:
        return text
    while _length(text) > LONGEST - 4:
        text = text[: min(len(text) - 1, LONGEST - 4)]
    return f"{text} ..."


def _length(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
