"""One-time links, and the sessions of browsers that have used one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from secrets import compare_digest, token_urlsafe

from smalti.system import atomic_write, load_json, read_regular

DAYS = 30
_LIMIT = 50


class Sessions:
    """Who may use the page. A link works once; the browser then has a cookie, which also works after a restart of the server.

    `file` has the digests of the cookies, with mode 600; servers on several ports share it. A cookie is valid on the port on
    which it was given only: browsers send it to whatever listens there. `on_new_link` is called with each new token after the
    first.
    """

    def __init__(self, token: str, port: int, file: Path, on_new_link: Callable[[str], None] = lambda token: None) -> None:
        self._token = token
        self._port = port
        self._file = file
        self._on_new_link = on_new_link
        self._digests = self._read()

    @property
    def token(self) -> str:
        """The token of the link that has not been used."""
        return self._token

    def redeem(self, token: str) -> str | None:
        """Use a link: the value of the cookie, or None if it is not the current link. The next link has another token."""
        if not compare_digest(token.encode(errors="replace"), self._token.encode()):
            return None
        self._token = token_urlsafe(24)
        cookie = token_urlsafe(32)
        self._digests = self._read()  # another server of this user may have added to it
        self._digests[self._digest(cookie)] = time.time()
        self._write()
        self._on_new_link(self._token)
        return cookie

    def knows(self, cookie: str) -> bool:
        """Whether a cookie is that of a session that has not expired."""
        begun = self._digests.get(self._digest(cookie))
        return begun is not None and time.time() - begun < DAYS * 86400

    def end(self, cookie: str) -> None:
        """End a session."""
        self._digests = self._read()
        if self._digests.pop(self._digest(cookie), None) is not None:
            self._write()

    def _read(self) -> dict[str, float]:
        try:
            found = load_json(read_regular(self._file))["sessions"]
            return {str(digest): float(begun) for digest, begun in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        newest = sorted(self._digests.items(), key=lambda item: item[1])[-_LIMIT:]
        self._digests = dict(newest)
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(self._file, json.dumps({"sessions": self._digests}).encode(), mode=0o600)

    def _digest(self, cookie: str) -> str:
        return hashlib.sha256(f"{self._port} {cookie}".encode(errors="replace")).hexdigest()
