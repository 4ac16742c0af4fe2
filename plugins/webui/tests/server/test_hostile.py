"""Requests that nobody should be able to send with success: other hosts and origins, links, paths, sizes, markup.

They are generated from the routes of the application, so pages that are added are attacked too.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from smalti_webui.server import security
from smalti_webui.server.app import create_app
from smalti_webui.server.files import below_roots
from smalti_webui.server.sessions import DAYS
from smalti_webui.server.settings import Settings

MARK = "SECRET-OF-ANOTHER-FOLDER"
HOSTS = (
    *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:80", "127.0.0.1:81", "127.0.0.2"),
    *("0.0.0.0", "[::1]:81", "127.1", "2130706433", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "", " ", "*"),
    *("127.0.0.1, evil.example", "localhost\x00", "LOCALHOST.", "127.0.0.1/", "[::ffff:127.0.0.1]", "a" * 5000),
)
ORIGINS = (
    *(
        "null",
        "",
        "http://evil.example",
        "https://127.0.0.1",
        "http://127.0.0.1:81",
        "http://localhost",
        "http://127.0.0.1.evil",
    ),
    *(
        "http://127.0.0.1@evil.example",
        "http://[::1]",
        "file://",
        "chrome-extension://abc",
        "http://127.0.0.1, http://evil",
        "*",
    ),
)
SITES = ("cross-site", "same-site", "none", "SAME-ORIGIN, cross-site")
PATHS = (
    *("../secret.txt", "../../secret.txt", "..%2fsecret.txt", "%2e%2e%2fsecret.txt", "..%252fsecret.txt", "..\\secret.txt"),
    *("....//secret.txt", "/etc/passwd", "//etc/passwd", "%2fetc%2fpasswd", "file:///etc/passwd", "link/secret.txt", "link"),
    *("link%2fsecret.txt", "first/../../secret.txt", "%00", "x%00.png", "%ff%fe", "a" * 5000, "con/../" * 200 + "secret.txt"),
    *(
        "~",
        "~root/.ssh/id_rsa",
        "/proc/self/environ",
        "%c0%ae%c0%ae/secret.txt",
        "-rf",
        "--help",
        "$(id)",
        ";id",
        "|id",
        "`id`",
    ),
)
MARKUP = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "'onmouseover='alert(1)",
    "</textarea></title></style><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "\u202e<b>\u0000",
)
sent: dict[str, int] = {}


def count(kind: str, number: int) -> None:
    sent[kind] = sent.get(kind, 0) + number


@pytest.fixture
def secret(root: Path) -> Path:
    """A file beside the root, and a link inside the root that leads to it."""
    file = root.parent / "secret.txt"
    file.write_text(MARK)
    (root / "link").symlink_to(root.parent)
    return file


def routes(client: TestClient) -> Iterator[tuple[str, str]]:
    """(method, path) of every route."""

    def walk(found: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
        for route in found:
            if hasattr(route, "methods") and hasattr(route, "path"):
                yield from ((method, prefix + route.path) for method in route.methods if method != "HEAD")
            inner = getattr(getattr(route, "original_router", None), "routes", None)
            if inner:
                yield from walk(inner, prefix)

    app: Any = client.app
    yield from walk(app.routes)


def test_the_routes_of_all_rooms_are_found(client: TestClient) -> None:
    found = {path.split("/")[1] for _, path in routes(client)}
    assert found >= {"runs", "configs", "datasets", "theme", "sign-out"}
    assert ("POST", "/theme") in set(routes(client))


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_a_request_for_another_host_is_refused(client: TestClient, method: str) -> None:
    answers = {host: client.request(method, "/runs", headers={"host": host}).status_code for host in HOSTS}
    count("host", len(answers))
    assert {host: status for host, status in answers.items() if status != 421} == {}


def test_two_hosts_and_no_host_are_refused(settings: Settings) -> None:
    assert not settings.allows("")
    assert not Settings(roots=(), host="0.0.0.0", port=80).allows("evil.example:80")
    assert Settings(roots=(), host="0.0.0.0", port=80).allows("192.168.1.7:80")


def test_a_change_that_another_site_asks_for_is_refused(client: TestClient) -> None:
    changing = sorted({path for method, path in routes(client) if method not in ("GET", "HEAD")})
    hostile = [{"origin": origin} for origin in ORIGINS] + [{"sec-fetch-site": site} for site in SITES]
    attacks = [("/theme", headers) for headers in hostile] + [(path, headers) for path in changing for headers in hostile[::6]]
    wrong = []
    for path, headers in attacks:
        answer = client.post(re.sub(r"\{[^}]*\}", "x", path), headers=headers)
        wrong += [(path, headers)] if answer.status_code != 403 else []
    count("origin", len(attacks))
    assert wrong == []


def cookies(client: TestClient) -> str:
    return "; ".join(f"{name}={value}" for name, value in client.cookies.items())


def test_without_an_origin_nothing_is_changed(client: TestClient) -> None:
    del client.headers["origin"]
    assert client.post("/theme", data={"value": "dark"}).status_code == 403


def test_wrong_links_and_cookies_give_no_session(stranger: TestClient, settings: Settings) -> None:
    token, name = settings.token, security.cookie_name(settings)
    tokens = (
        "",
        token[:-1],
        token + "x",
        token.swapcase(),
        token[::-1],
        "é",
        "%00",
        "x" * 7000,
        "null",
        "undefined",
        "../" + token,
    )
    values = ("", "x", token, "x" * 3000, '"', "; ; =", f"{token};", "\\x00", "../sessions.json", "a=b")
    wrong: list[object] = []
    for guess in tokens:
        answer = stranger.get("/runs", params={"token": guess}, follow_redirects=False)
        wrong += [guess] if answer.status_code != 401 or "set-cookie" in answer.headers else []
    for value in values:
        answer = stranger.get("/runs", headers={"cookie": f"{name}={value}"})
        wrong += [value] if answer.status_code != 401 else []
    for method, path in itertools.islice(routes(stranger), 400):
        answer = stranger.request(method, re.sub(r"\{[^}]*\}", "x", path))
        wrong += [(method, path)] if answer.status_code != 401 else []
    count("token", len(tokens) + len(values) + len(list(routes(stranger))))
    assert wrong == []
    assert stranger.post("/runs", params={"token": token}).status_code == 401  # a link is followed, not posted
    assert stranger.get(f"/?token={token}", follow_redirects=False).status_code == 303


def test_a_session_ends(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    known, later = {"cookie": cookies(client)}, time.time() + DAYS * 86400 + 1
    with monkeypatch.context() as patch:
        patch.setattr("smalti_webui.server.sessions.time.time", lambda: later)
        assert client.get("/runs", headers=known).status_code == 401
    assert client.get("/runs", headers=known).status_code == 200
    client.post("/sign-out", headers=known)
    assert client.get("/runs", headers=known).status_code == 401


def test_a_cookie_is_of_no_use_on_another_port(client: TestClient, settings: Settings) -> None:
    (cookie,) = client.cookies.values()
    other = replace(settings, port=81)
    with TestClient(create_app(other), base_url="http://127.0.0.1:81") as elsewhere:
        answer = elsewhere.get("/runs", headers={"cookie": f"{security.cookie_name(other)}={cookie}"})
    assert answer.status_code == 401
    assert client.get("/runs").status_code == 200


def test_the_answer_to_an_exception_has_the_headers_too(client: TestClient) -> None:
    def broken() -> None:
        raise RuntimeError("a defect")

    app: Any = client.app
    app.add_api_route("/broken", broken)
    answer = client.get("/broken")
    assert (answer.status_code, "a defect" in answer.text) == (500, True)
    assert {name: answer.headers.get(name) for name in security.HEADERS} == security.HEADERS


def test_the_address_after_a_link_is_never_that_of_another_host(stranger: TestClient, settings: Settings) -> None:
    answer = stranger.get(f"//evil.example/x?token={settings.token}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"][:2] != "//") == (303, True)


def test_nothing_outside_of_the_roots_is_read(client: TestClient, secret: Path, make_run: Any) -> None:
    run = make_run("first", steps=4, samples=(2,), checkpoints=(4,)).record().id
    wrong, number = [], 0
    targets = [path for method, path in routes(client) if method == "GET" and "{" in path] + ["/static/{path:path}"]
    for target in targets:
        names = re.findall(r"\{[^}]*\}", target)
        addresses = [f"{fill(target, names, run)}?{key}={PATHS[0]}" for key in ("path", "file", "folder")]
        for attacked in names:
            payloads = PATHS if ":path" in attacked else PATHS[::8]
            addresses += [
                fill(target, [each for each in names if each != attacked], run).replace(attacked, payload)
                for payload in payloads
            ]
        for address in addresses:
            status, content = fetch(client, address)
            wrong += [(address[:90], status)] if status >= 500 or leaked(content) else []
        number += len(addresses)
    count("traversal", number)
    assert wrong == []


def fill(target: str, names: list[str], run: str) -> str:
    """The address with the id of a run, or 1, for these parameters."""
    for name in names:
        target = target.replace(name, run if "id" in name else "1")
    return target


def fetch(client: TestClient, address: str) -> tuple[int, bytes]:
    """The status and the first bytes of an answer, also of one that does not end."""
    with client.stream("GET", address, headers={"accept": "text/html"}) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer.status_code, b""
        return answer.status_code, answer.read()


def leaked(content: bytes) -> bool:
    return MARK.encode() in content or b"root:x:0" in content


def test_below_roots_resolves_links(settings: Settings, secret: Path, root: Path) -> None:
    assert below_roots(settings, root / "new" / ".." / "file") == root.resolve() / "file"
    (root / "circle").symlink_to("circle")
    refused = [
        root / "link" / "secret.txt",
        root / ".." / "secret.txt",
        Path("/"),
        root.parent,
        Path(f"{root}-beside"),
        Path("/proc/self"),
    ]
    statuses = []
    for path in [*refused, root / "nul\0", root / "circle", root / ("a" * 5000)]:
        try:
            below_roots(settings, path)
        except Exception as error:  # noqa: BLE001 - the status is compared
            statuses.append(getattr(error, "status_code", error))
    count("traversal", len(statuses))
    assert statuses[: len(refused)] == [403] * len(refused)
    assert set(statuses[len(refused) :]) <= {403, 404}


def test_names_prompts_and_messages_are_text(client: TestClient, make_run: Any) -> None:
    """No markup of a run reaches a page: neither of its name, nor of prompts, messages, log lines."""
    prompts = tuple(text.replace("\u0000", "") for text in MARKUP)
    runs = []
    for number, text in enumerate(prompts):
        name = re.sub(r"[/\0]", "-", text)
        runs.append(make_run(name, steps=4, samples=(2,), checkpoints=(), prompts=prompts, condition="failed", message=text))
        (runs[-1].path / f"caption {number}.txt").write_text(text)
    pages = {path for method, path in routes(client) if method == "GET" and "{" not in path}
    pages |= {
        re.sub(r"\{[^}]*id\}", run.record().id, path)
        for run in runs[:1]
        for method, path in routes(client)
        if method == "GET" and path.count("{") == 1 and re.search(r"\{[^}]*id\}", path)
    }
    wrong = []
    for address in sorted(pages - SLOW):
        status, content = fetch(client, address)
        text = content.decode(errors="replace")
        wrong += [(address, status)] if status >= 500 else []
        if "<html" in text or "<div" in text:
            wrong += [
                (address, found) for found in re.findall(r"<script>alert|<img src=x|<svg/onload|'onmouseover|7 \* 7 = 49", text)
            ]
            links = re.findall(r"(?:href|src)=[\"']?\s*([^\"'\s>]+)", text)
            wrong += [(address, link) for link in links if unescape(link).lower().startswith(("javascript:", "data:text"))]
    count("markup", len(pages) * len(MARKUP))
    assert wrong == []


SLOW = {"/plugins", "/doctor", "/maintenance"}
"""Pages that run a command, which takes seconds. They show nothing of runs."""


def test_hostile_forms_are_refused_or_kept_as_text(client: TestClient) -> None:
    wrong = []
    for text in (*MARKUP, *PATHS):
        answer = client.post("/theme", data={"value": unescape(text)})
        wrong += [text] if answer.status_code >= 500 or "dark" in answer.headers.get("set-cookie", "") else []
    strange = (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "application/json",
        "text/xml",
        "application/x-www-form-urlencoded; charset=utf-7",
    )
    for kind in strange:
        answer = client.post("/theme", content=b"--\r\n\xff\x00{<!DOCTYPE x>", headers={"content-type": kind})
        wrong += [kind] if answer.status_code not in (400, 422) else []
    for cookie in ('smalti-ui-theme="; drop', "smalti-ui-theme=<script>", "=;=;", "\x01", "a=" + "b" * 6000):
        answer = client.get("/configs", headers={"cookie": f"{cookies(client)}; {cookie}"})
        wrong += [cookie] if answer.status_code >= 500 or "<script>" in answer.text.partition("<body")[0] else []
    count("markup", len(MARKUP) + len(PATHS) + len(strange) + 5)
    assert wrong == []


def test_every_answer_has_the_headers_of_safety(client: TestClient) -> None:
    for address in ("/runs", "/nothing", "/static/css/base.css", "/static/nothing", "/?token=x"):
        headers = client.get(address, follow_redirects=False).headers
        assert {name: headers.get(name) for name in security.HEADERS} == security.HEADERS, address
    refused = client.get("/runs", headers={"host": "evil.example"}).headers
    assert Headers(refused).get("content-security-policy") == security.CSP


def test_a_defect_is_a_page_and_not_a_crash(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    app: Any = client.app

    @app.get("/defect")
    def defect() -> None:
        raise ZeroDivisionError("<b>")

    answer = client.get("/defect")
    assert (answer.status_code, "ZeroDivisionError: &lt;b&gt;" in answer.text, "Traceback" in answer.text) == (500, True, False)
    assert client.get("/runs").status_code == 200


def test_commands_do_not_get_the_token(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from smalti_webui.server.processes import command, environment

    create_app(settings)
    assert not any(settings.token in value for value in [*environment().values(), *os.environ.values()])
    assert settings.token not in repr(settings)
    assert command(["run", "ls", "; rm -rf ~"])[-1] == "; rm -rf ~"


def test_there_were_hundreds_of_hostile_requests() -> None:
    assert set(sent) == {"host", "origin", "token", "traversal", "markup"}
    assert sum(sent.values()) >= 250
