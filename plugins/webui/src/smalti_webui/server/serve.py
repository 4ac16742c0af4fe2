"""The server process of `smalti ui`: its socket, its links, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import webbrowser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from smalti import UserError
from smalti.system import atomic_write
from smalti_webui.server.app import create_app
from smalti_webui.server.settings import Settings

HEAD_SECONDS = 20.0
"""Seconds after which a connection is closed whose request has not arrived."""
CONNECTIONS = 200
STOP_SECONDS = 1
"""Seconds that streams to browsers may take to end when the server stops."""


class Protocol(H11Protocol):
    """HTTP of uvicorn, which closes connections on which no complete request head arrives."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is None and self._waits():
            self._head = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(exc)

    def _waits(self) -> bool:
        """Whether no request is being answered on this connection."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_waiting(self) -> None:
        self._head = None
        if self._waits() and not self.transport.is_closing():
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UserError if the port is taken, or the address is not one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        if isinstance(error, socket.gaierror):
            raise UserError(f"--host={host} is not an address: {error.strerror}", fix="leave --host out") from None
        fix = f"choose another, --port={port + 1 if port < 65535 else 0}, or a free one, --port=0"
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}", fix=fix) from None
    return bound


def configuration(app: Any) -> uvicorn.Config:
    """How uvicorn serves the application, here and in tests."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )


def serve(roots: Iterable[Path], *, host: str, port: int, opens: bool, as_json: bool) -> int:
    """Serve until Ctrl-C or SIGTERM. Prints the link. Raises UserError if it cannot listen."""
    bound = listen(host, port)
    settings = Settings.of(roots, host=host, port=bound.getsockname()[1])
    link = f"{settings.address}runs?token={settings.token}"
    file = settings.data / f"open-{settings.port}.html"

    def on_new_link(token: str) -> None:
        file.unlink(missing_ok=True)  # its link has been used
        _print_next(f"{settings.address}runs?token={token}", as_json=as_json)

    app = create_app(settings, on_new_link)
    if as_json:
        shown = {"url": link, "pid": os.getpid(), "roots": [str(root) for root in settings.roots]}
        click.echo(json.dumps(shown))
    else:
        click.echo(f"{click.style('smalti ui', bold=True)}  {link}")
        click.echo(f"  runs below {', '.join(map(str, settings.roots))}; Ctrl-C stops the page; runs continue", err=True)
    for root in settings.roots:
        if not root.is_dir():
            click.echo(f"smalti: {root} is not there yet; its runs appear when the first one begins", err=True)
    if settings.host not in ("127.0.0.1", "::1", "localhost"):
        click.echo("smalti: warning: what browsers and this server send is not encrypted; prefer an SSH tunnel", err=True)
    server = _Server(configuration(app))
    server.app_state = app.state
    with _opened(link, file) if opens and _has_display() else nullcontext():
        server.run(sockets=[bound])
    return 0


@contextmanager
def _opened(link: str, file: Path) -> Iterator[None]:
    """Open a browser, which finds the link in a file that only this user can read: everybody can read its command line."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    refresh = f'<meta http-equiv="refresh" content="0;url={link}">'
    text = f'<!doctype html><meta charset="utf-8">{refresh}<a href="{link}">smalti</a>\n'
    atomic_write(file, text.encode(), mode=0o600)
    try:
        webbrowser.open(file.as_uri())
        yield
    finally:
        file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Ends at the first signal, and at once at the second. `app_state.closing` is set, so that its streams end."""

    app_state: Any = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it reports what it cancels with a traceback
        if self.app_state is not None:
            self.app_state.closing = True


def _print_next(link: str, *, as_json: bool) -> None:
    click.echo(json.dumps({"url": link}) if as_json else f"  for another browser  {link}", err=not as_json)


def _has_display() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
