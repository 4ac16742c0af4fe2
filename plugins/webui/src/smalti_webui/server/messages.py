"""Short messages about what was done: shown for some seconds, and kept in the list of recent messages."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smalti.system import load_json

Level = Literal["info", "success", "warning", "error"]
HEADER = "HX-Trigger"
_KEPT = 50


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A message. `t` is in unix seconds."""

    text: str
    level: Level
    t: float


class Messages:
    """The recent messages of this server, newest first."""

    def __init__(self) -> None:
        self._recent: deque[Shown] = deque(maxlen=_KEPT)
        self._pending: list[Shown] = []

    def add(self, text: str, level: Level, *, pending: bool) -> None:
        """Keep a message. A pending one is shown by the next page, because its own answer is a redirection."""
        shown = Shown(text=text, level=level, t=time.time())
        self._recent.appendleft(shown)
        if pending:
            self._pending.append(shown)

    def recent(self) -> list[Shown]:
        return list(self._recent)

    def take_pending(self) -> list[Shown]:
        pending, self._pending = self._pending, []
        return pending


def toast(response: Response, text: str, level: Level = "success") -> None:
    """Show a message with this answer: of a part of a page, a whole page or a redirection. Errors belong on the page too."""
    found = load_json(response.headers.get(HEADER, "{}"))
    found.setdefault("toast", {"messages": []})["messages"].append({"text": text, "level": level})
    response.headers[HEADER] = json.dumps(found)


class KeptMessages:
    """Keeps the messages of all answers."""

    def __init__(self, app: ASGIApp, messages: Messages) -> None:
        self._app = app
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keeping(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                found = load_json(headers.get(HEADER, "{}")).get("toast", {})
                part = Headers(scope=scope).get("hx-request") == "true" and "hx-redirect" not in headers
                for each in found.get("messages", ()):
                    self._messages.add(each["text"], each["level"], pending=not part)
            await send(message)

        await self._app(scope, receive, keeping if scope["type"] == "http" else send)
