"""What a request must fulfil before it reaches a page: host, session, origin, size; and the headers of every answer.

A middleware around the whole application, so that pages have nothing to do. All requests but GET and HEAD may change state.
"""

from __future__ import annotations

import asyncio
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import HTTPException  # FastAPI passes it on while it reads a body
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smalti_webui.server.sessions import DAYS, Sessions
from smalti_webui.server.settings import Settings
from smalti_webui.server.templating import Templates

MAX_BODY = 8 << 20
"""Bytes of a request at most."""
BODY_SECONDS = 30.0
"""Seconds after which a request whose body has not arrived is refused."""
CSP = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # without a referrer, forms would be sent with the origin null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_READING = ("GET", "HEAD")


class Security:
    """Refuses what is not from a browser of the user's, on the page itself. Every answer has the headers `HEADERS`."""

    def __init__(self, app: ASGIApp, settings: Settings, sessions: Sessions, templates: Templates) -> None:
        self._app = app
        self._settings = settings
        self._sessions = sessions
        self._templates = templates
        self.cookie = cookie_name(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, _Limited(receive), with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that must not reach a page; None for one that may."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._settings.allows(hosts[0]):
            return self._page(421, f"This server is reached at {self._settings.address} only.")
        changes = scope["method"] not in _READING
        if changes and not same_origin(headers, hosts[0]):
            return self._page(403, "The request comes from another site and was refused.")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            return self._page(413, _LARGE)
        if scope["path"].startswith("/static/") and not changes:
            return None
        if self._sessions.knows(cookie_of(headers, self.cookie)):
            return self._without_token(scope)
        return self._sign_in(scope)

    def _without_token(self, scope: Scope) -> Response | None:
        """A link that is followed again: the same page without the token in its address."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        rest = [(name, value) for name, value in query if name != "token"]
        if len(rest) == len(query) or scope["method"] not in _READING:
            return None
        return RedirectResponse(_path(scope) + ("?" + urlencode(rest) if rest else ""), 303)

    def _sign_in(self, scope: Scope) -> Response:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        token = query.pop("token", "")
        if scope["method"] != "GET" or not token or (cookie := self._sessions.redeem(token)) is None:
            return self._page(401, "", used=bool(token))
        target = _path(scope) + ("?" + urlencode(query) if query else "")
        response: Response = RedirectResponse(target, 303)
        if Headers(scope=scope).get("sec-fetch-site") == "cross-site":  # a redirection is still the other site's: no cookie
            response = HTMLResponse(self._templates.render("server/forward.html", target=target))
        response.set_cookie(self.cookie, cookie, max_age=DAYS * 86400, httponly=True, samesite="strict", path="/")
        return response

    def _page(self, status: int, message: str, **context: Any) -> Response:
        text = self._templates.render("server/refused.html", status=status, message=message, **context)
        return HTMLResponse(text, status)


_LARGE = f"The request is larger than {MAX_BODY >> 20} MiB."


class _Limited:
    """The body of a request, with a limit on its size and on the time until it has arrived: else HTTPException 413 or 408."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._size = 0
        self._complete = False
        self._deadline: float | None = None

    async def __call__(self) -> Message:
        if self._complete:  # now it only says when the browser has gone
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "The request did not arrive in time.") from None
        self._size += len(message.get("body", b""))
        if self._size > MAX_BODY:
            raise HTTPException(413, _LARGE)
        self._complete = not message.get("more_body", False)
        return message


def cookie_name(settings: Settings) -> str:
    """The name of the cookie. Cookies are shared by all ports of a host, so each server has its own."""
    return f"smalti-ui-{settings.port}"


def cookie_of(headers: Headers, name: str) -> str:
    """The value of a cookie; empty if there is none, or if the header cannot be read."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def same_origin(headers: Headers, host: str) -> bool:
    """Whether a request was sent by a page of this server. Browsers say so in Origin, and in Sec-Fetch-Site."""
    origins = headers.getlist("origin")
    site = headers.get("sec-fetch-site", "same-origin")
    return len(origins) == 1 and origins[0].lower() == f"http://{host.lower()}" and site == "same-origin"


def _path(scope: Scope) -> str:
    """The path of a request for a redirection. Not one of another host: a path never begins with two slashes."""
    path = scope.get("raw_path") or scope["path"].encode()
    return "/" + str(path.decode("latin-1")).partition("?")[0].lstrip("/\\")
