"""The server on real sockets: slow and oversized requests, taken ports, sessions after a restart, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from smalti import UserError
from smalti_webui.server import security, serve
from smalti_webui.server.processes import run_cli
from smalti_webui.server.serve import listen
from support.processes import commands

FORM = "Content-Type: application/x-www-form-urlencoded"


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def head(port: int, method: str = "GET", path: str = "/runs", *lines: str) -> bytes:
    origin = f"Origin: http://127.0.0.1:{port}"
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", origin, *lines, "", "")).encode()


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            content += part
    return content


@contextlib.contextmanager
def session(served: Any) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, headers={"origin": served.url}, timeout=20) as client:
        assert client.get(served.link, follow_redirects=True).status_code == 200
        yield client


def cookie_line(client: httpx2.Client) -> str:
    return "Cookie: " + "; ".join(f"{name}={value}" for name, value in client.cookies.items())


def test_requests_that_never_arrive_end_and_nobody_waits_for_them(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(security, "BODY_SECONDS", 0.3)
    port = served.settings.port
    with session(served) as client, contextlib.ExitStack() as stack:
        cookie = cookie_line(client)
        slow = [stack.enter_context(connected(port)) for _ in range(30)]
        for number, connection in enumerate(slow):
            post = head(port, "POST", "/theme", cookie, FORM, "Content-Length: 100") + b"value=d"
            begun = (b"", b"GET /ru", head(port)[:-2], post)
            connection.sendall(begun[number % 4])
        assert client.get("/runs").status_code == 200
        ends = [received(connection) for connection in slow]
        assert [end for number, end in enumerate(ends) if number % 4 != 3 and end] == []
        assert {end.split(b"\r\n")[0] for end in ends[3::4]} == {b"HTTP/1.1 408 Request Timeout"}
        assert client.get("/runs").status_code == 200


STRANGE: tuple[tuple[tuple[str, ...], bytes, bytes], ...] = (
    (("Content-Length: 99999999999999999999",), b"x", b"413"),
    (("Content-Length: 9000000",), b"x", b"413"),
    (("Content-Length: -1",), b"x", b"400"),
    (("Content-Length: 1", "Content-Length: 2"), b"xx", b"400"),
    (("Transfer-Encoding: chunked", "Content-Length: 3"), b"0\r\n\r\n", b"422"),  # the chunks count, and have no field
    (("X-Long: " + "a" * 200_000,), b"", b"400"),
    (tuple(f"X-{number}: x" for number in range(20_000)), b"", b"400"),
    (("Host: evil.example",), b"", b"400"),
    (("Expect: 100-continue", "Content-Length: 99999999"), b"", b"413"),
    (("\x00: x",), b"", b"400"),
    (("Upgrade: websocket", "Sec-WebSocket-Key: x"), b"", b"422"),
)


def test_oversized_and_malformed_requests_are_refused(served: Any) -> None:
    port, wrong = served.settings.port, []
    with session(served) as client:
        for lines, body, status in STRANGE:
            with connected(port) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(head(port, "POST", "/theme", "Connection: close", cookie_line(client), *lines) + body)
                answer = received(connection)
            wrong += [(lines[0][:40], answer[:100])] if answer.split(b" ")[1:2] not in ([status], []) else []
            assert client.get("/runs").status_code == 200
    assert wrong == []


def test_a_body_in_chunks_is_counted(served: Any) -> None:
    async def body(request: Request) -> int:
        return len(await request.body())

    served.app.add_api_route("/body", body, methods=["POST"])
    port = served.settings.port
    with session(served) as client, connected(port) as connection:
        assert client.post("/body", content=bytes(security.MAX_BODY)).json() == security.MAX_BODY
        chunked = "Transfer-Encoding: chunked"
        connection.sendall(head(port, "POST", "/body", cookie_line(client), chunked, "Connection: close"))
        with contextlib.suppress(ConnectionError):
            for _ in range(9):
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        assert received(connection).startswith(b"HTTP/1.1 413")
        assert client.get("/runs").status_code == 200


def test_a_port_that_is_taken_is_an_error_with_another_one(served: Any) -> None:
    port = served.settings.port
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use") as caught:
        listen("127.0.0.1", port)
    assert f"--port={port + 1}" in caught.value.fix
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)
    with pytest.raises(UserError, match="is not an address"):
        listen("no.such.host.invalid", 0)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def test_a_command_ends_when_the_browser_goes_away_unless_it_changes_something(served: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    waits = ["config", "show", str(fifo)]  # until somebody writes to it

    async def read() -> int:
        return (await run_cli(waits, 60)).code

    async def change() -> int:
        return (await run_cli(waits, 60, changes=True)).code

    served.app.add_api_route("/read", read)
    served.app.add_api_route("/change", change)

    def running() -> int:
        return sum(waits[-1] in words for _, words in commands(psutil.Process().children(recursive=True)))

    port = served.settings.port
    with session(served) as client:
        for path, left in (("/read", 0), ("/change", 1)):
            with connected(port) as connection:
                connection.sendall(head(port, "GET", path, cookie_line(client)))
                wait_until(lambda: running() == 1)
            wait_until(lambda left=left: running() == left)
        fifo.write_text("")
        wait_until(lambda: running() == 0)


def test_the_server_ends_although_a_browser_reads_a_stream(served: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b": x\n\n"
            await asyncio.sleep(0.05)

    served.app.add_api_route("/endless", lambda: StreamingResponse(endless(), media_type="text/event-stream"))
    with session(served) as client, client.stream("GET", "/endless") as answer:
        assert next(answer.iter_bytes()) == b": x\n\n"
        served.stop()


def started(root: Path, data: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "smalti", "ui", str(root), "--no_open", "--json", *arguments]
    environment = {**os.environ, "XDG_DATA_HOME": str(data)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def test_a_session_works_after_a_restart_and_ctrl_c_ends_the_server(root: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    process, link = started(root, data, "--port=0")
    address, port = link.partition("/runs")[0], int(link.split(":")[2].partition("/")[0])
    with httpx2.Client(base_url=address, follow_redirects=True, timeout=20) as client:
        assert client.get(link).status_code == 200
        assert stat.S_IMODE((data / "smalti/ui/sessions.json").stat().st_mode) == 0o600
        assert process.stdout is not None
        assert "token=" in json.loads(process.stdout.readline())["url"]  # for another browser
        with connected(port) as half:
            half.sendall(head(port)[:-2])
            process.send_signal(signal.SIGINT)
            assert (process.communicate(timeout=30), process.returncode) == (("", ""), 0)
        process, link = started(root, data, f"--port={port}")
        assert client.get("/runs").status_code == 200
        process.terminate()
        assert (process.communicate(timeout=30), process.returncode) == (("", ""), 0)


def test_the_token_is_not_on_the_command_line_of_the_browser(root: Path, tmp_path: Path, browser: Any) -> None:
    """The browser gets a file of the user's alone, whose link signs it in. The file is removed when the link is used."""
    data, called, script = tmp_path / "data", tmp_path / "called", tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$@" > {called}.part\nmv {called}.part {called}\n')
    script.chmod(0o755)
    command = [sys.executable, "-m", "smalti", "ui", str(root), "--port=0", "--json"]
    environment = {**os.environ, "XDG_DATA_HOME": str(data), "BROWSER": f"{script} %s"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        token = json.loads(process.stdout.readline())["url"].rpartition("=")[2]
        deadline = time.monotonic() + 30
        while not called.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        address = called.read_text().strip()
        file = Path(address.removeprefix("file://"))
        assert token not in address
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        page = browser.new_page()
        page.goto(address)
        page.wait_for_url("http://127.0.0.1:*/runs")
        assert page.title() == "Runs · smalti"
        page.context.close()
        assert not file.exists()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_root_that_is_not_there_is_told_and_its_runs_appear_later(tmp_path: Path, make_run: Any) -> None:
    missing = tmp_path / "root" / "later"
    process, link = started(missing, tmp_path / "data", "--port=0")
    try:
        with httpx2.Client(follow_redirects=True, timeout=20) as client:
            assert client.get(link).status_code == 200
            run = make_run("later/first").record().id
            assert client.get(f"{link.partition('?')[0]}/{run}").status_code == 200
    finally:
        process.terminate()
        _, told = process.communicate(timeout=30)
    assert told == f"smalti: {missing} is not there yet; its runs appear when the first one begins\n"
