"""Lists of URLs: downloaded once from a real server, with limits, retries and refusals."""

import hashlib
import io
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from smalti.data import DataDefaults, DatasetSpec, catalog_of, parse_datasets
from smalti.data.scan.build import build_index
from smalti.data.storage.protocol import TransientStorageError
from smalti.errors import ConfigError, UserError
from smalti.plugins import load_plugins
from smalti_data.urls import url_list
from smalti_data.urls.http import Client, FailedError, RefusedError
from smalti_data.urls.url_list import FAILED, Urls
from smalti_testing import check_metadata_backend

CATALOG = catalog_of(load_plugins())


def picture(edge: int, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (edge, edge + 1), (edge, 0, 0)).save(data, kind)
    return data.getvalue()


class WebServer:
    """Files by path; `replies` are functions that write the whole response instead, once for each time they are there."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.replies: dict[str, list[Callable[[BaseHTTPRequestHandler], None]]] = {}
        self.requests: Counter[str] = Counter()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                server.requests[path] += 1
                if server.replies.get(path):
                    server.replies[path].pop(0)(self)
                    return
                data = server.files.get(path)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture(scope="module")
def module_server() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def server(module_server: WebServer) -> WebServer:
    for kept in (module_server.files, module_server.replies, module_server.requests):
        kept.clear()
    return module_server


@pytest.fixture
def client() -> Client:
    return Client(most_bytes=1 << 20, seconds=5, private_addresses=True, first_wait=0.001)


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return reply


def too_large(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "2000000")
    handler.end_headers()


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)


def closed(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def slow_header(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, so that the socket never times out."""
    stopped = threading.Event()
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    try:
        for _ in range(200):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            stopped.wait(0.05)
    except OSError:
        pass


def slow_body(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    slow_header(handler)


def endless(handler: BaseHTTPRequestHandler, code: int = 200, **headers: str) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    try:
        for _ in range(1000):
            handler.wfile.write(b"x" * 65536)
    except OSError:
        pass


@pytest.mark.parametrize("fault", [status(503), status(429, Retry_After="0"), cut, closed])
def test_faults_that_pass_are_retried(server: WebServer, client: Client, fault: Callable) -> None:
    server.files["/a"] = b"content"
    server.replies["/a"] = [fault] * 5
    assert client.get(f"{server.url}/a") == b"content"
    server.replies["/a"] = [fault] * 6
    with pytest.raises(FailedError, match="in 6 attempts"):
        client.get(f"{server.url}/a")
    assert server.requests["/a"] == 12


def test_a_host_that_does_not_answer_gets_fewer_attempts(client: Client) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens there
        with pytest.raises(FailedError, match="in 3 attempts"):
            client.get(f"http://127.0.0.1:{free.getsockname()[1]}/a")


@pytest.mark.parametrize("fault", [slow_header, slow_body])
def test_a_server_that_sends_a_byte_now_and_then_reaches_the_deadline(
    server: WebServer, client: Client, fault: Callable
) -> None:
    server.replies["/a"] = [fault]
    with pytest.raises(FailedError, match="took too long"):
        replace(client, seconds=0.3, attempts=1).get(f"{server.url}/a")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (status(404), "404 Not Found"),
        (status(403), "403 Forbidden"),
        (status(302, Location="ftp://127.0.0.1/a"), "302 Found"),
        (too_large, "larger than 1 MB"),
        (endless, "larger than 1 MB"),
    ],
)
def test_what_another_attempt_would_not_change_is_refused_at_once(
    server: WebServer, client: Client, reply: Callable, reason: str
) -> None:
    server.replies["/a"] = [reply]
    with pytest.raises(RefusedError, match=reason):
        client.get(f"{server.url}/a")
    assert server.requests["/a"] == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_private_addresses_are_refused(server: WebServer, client: Client, host: str) -> None:
    server.files["/a"] = b"secret"
    with pytest.raises(RefusedError, match="no public address"):
        replace(client, private_addresses=False).get(f"http://{host}:{server.port}/a")
    assert not server.requests


def test_redirects_are_followed_without_their_bodies_and_not_forever(server: WebServer, client: Client) -> None:
    server.files["/b"] = b"content"
    server.replies["/a"] = [partial(endless, code=302, Location="/b")]
    assert client.get(f"{server.url}/a") == b"content"
    server.replies["/a"] = [status(302, Location="/a")] * 20
    with pytest.raises(RefusedError, match="302 Found"):
        client.get(f"{server.url}/a")
    assert server.requests["/a"] == 12


def test_a_proxy_of_the_environment_is_used_and_a_redirect_past_it_is_checked(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", server.url.removeprefix("http://"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    client = Client(most_bytes=1 << 20, seconds=5, first_wait=0.001)
    server.files |= {"http://images.test/a": b"content", "/secret": b"secret"}
    assert client.get("http://images.test/a") == b"content"
    server.replies["http://images.test/b"] = [status(302, Location=f"{server.url}/secret")]
    with pytest.raises(RefusedError, match=r"127\.0\.0\.1 has no public address"):
        client.get("http://images.test/b")
    assert server.requests == {"http://images.test/a": 1, "http://images.test/b": 1}
    monkeypatch.setenv("http_proxy", "gopher://images.test")
    with pytest.raises(FailedError, match="Unknown scheme for proxy URL"):
        replace(client).get("http://images.test/a")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "http://[bad", "ftp://host/a", "http:///a"])
def test_only_addresses_of_web_servers_are_read(client: Client, url: str) -> None:
    with pytest.raises(RefusedError):
        client.get(url)


def spec_of(folder: Path, **entry: object) -> DatasetSpec:
    entry = {
        "csv_file": str(folder / "list.csv"),
        "csv_cache_dir": str(folder / "images"),
        "csv_allow_private_addresses": True,
        "caption_strategy": "csv",
    } | entry
    specs, problems = parse_datasets(
        [{"id": "web", "type": "csv", **entry}], where="data.json", defaults=DataDefaults(), catalog=CATALOG
    )
    assert problems == ()
    return specs[0]


def opened(spec: DatasetSpec) -> Urls:
    catalog = CATALOG
    source = catalog.open_source(spec, catalog.open_storage(spec))
    assert isinstance(source, Urls)
    source.client = replace(source.client, first_wait=0.001)
    return source


def scanned(spec: DatasetSpec, folder: Path) -> tuple[dict[str, tuple[str, ...]], Urls, list[str]]:
    """Captions by size of the image, the source, and the reasons of samples that cannot be used."""
    source = opened(spec)
    index = build_index(spec, CATALOG.open_storage(spec), source, folder / "run/web.arrow")
    usable = {f"{index.size(row)[0]}": index.captions(row) for row in range(len(index)) if index.size(row)[0]}
    return usable, source, [one.reason for one in index.quarantined]


def test_a_list_is_downloaded_once_and_what_is_not_there_is_left_out(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(url_list, "_REPORT_SECONDS", 0.0)
    server.files |= {"/1.png": picture(1), "/two": picture(2, "JPEG"), "/page.jpg": b"<html>", "/4.webp": picture(4, "WEBP")}
    u = server.url
    (tmp_path / "list.csv").write_text(
        f"url,caption\n{u}/1.png?token=secret,one\n{u}/two,two\n{u}/page.jpg,three\n{u}/4.webp,four\n{u}/gone.jpg,five\n"
        f"{u}/two,again\n,nothing\n"
    )
    usable, source, problems = scanned(spec_of(tmp_path), tmp_path)
    assert usable == {"1": ("one",), "2": ("two",), "4": ("four",)}
    assert problems == []
    assert re.search(r"5 of 5 images downloaded \(\d failed, 0.00 GB\), about 0 minutes left", caplog.text)
    text = "\n".join(source.notices)
    assert "2 images cannot be downloaded" in text
    for part in ("404 Not Found", "unknown format", "1 rows have the URL of an earlier row", "1 rows have no URL"):
        assert part in text
    kept = sorted(path for path in (tmp_path / "images").rglob("*.*") if path.name != FAILED)
    assert sorted(path.suffix for path in kept) == [".jpg", ".png", ".webp"]
    assert "secret" not in text + (tmp_path / "images" / FAILED).read_text()
    before = server.requests.total()
    again = scanned(spec_of(tmp_path), tmp_path)
    assert (again[0], again[1].notices) == (usable, source.notices)
    (tmp_path / "run/web.arrow").unlink()
    assert scanned(spec_of(tmp_path), tmp_path)[0] == usable
    assert server.requests.total() == before
    server.files["/gone.jpg"] = picture(5)
    (tmp_path / "images" / FAILED).unlink()
    assert scanned(spec_of(tmp_path), tmp_path)[0] == usable | {"5": ("five",)}


def test_what_may_pass_is_unusable_until_the_next_scan(server: WebServer, tmp_path: Path) -> None:
    server.files |= {"/1.png": picture(1), "/2.png": picture(2)}
    server.replies["/2.png"] = [status(503)] * 6
    (tmp_path / "list.csv").write_text(f"url,caption\n{server.url}/1.png,one\n{server.url}/2.png,two\n")
    usable, _, problems = scanned(spec_of(tmp_path), tmp_path)
    assert usable == {"1": ("one",)}
    assert problems == [f"{server.url}/2.png cannot be downloaded: 503 Service Unavailable, in 6 attempts"]
    assert scanned(spec_of(tmp_path), tmp_path)[0] == {"1": ("one",), "2": ("two",)}
    assert server.requests["/1.png"] == 1
    check_metadata_backend(lambda: opened(spec_of(tmp_path)))


def test_an_interrupted_download_continues(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smalti_data.urls.url_list._GIVE_UP", 4)
    server.files |= {f"/{edge}.png": picture(edge) for edge in range(1, 21)}
    rows = "".join(f"{server.url}/{edge}.png,image {edge}\n" for edge in range(1, 21))
    (tmp_path / "list.csv").write_text(f"url,caption\n{rows}")
    server.replies |= {f"/{edge}.png": [closed] * 6 for edge in range(5, 21)}
    with pytest.raises(TransientStorageError, match="4 downloads in a row failed"):
        scanned(spec_of(tmp_path, csv_downloads=1), tmp_path)
    server.replies.clear()
    done = {path for path, count in server.requests.items() if path in ("/1.png", "/2.png", "/3.png", "/4.png") and count}
    usable, _, problems = scanned(spec_of(tmp_path), tmp_path)
    assert (len(usable), problems) == (20, [])
    assert all(server.requests[path] == 1 for path in done)


def test_digests_of_the_list_are_compared(server: WebServer, tmp_path: Path) -> None:
    server.files |= {f"/{edge}.png": picture(edge) for edge in (1, 2, 3)}
    digests = [hashlib.sha256(picture(1)).hexdigest(), hashlib.md5(picture(7)).hexdigest(), ""]
    rows = "".join(f"{server.url}/{edge}.png,image {edge},{digest}\n" for edge, digest in enumerate(digests, 1))
    (tmp_path / "list.csv").write_text(f"url,caption,hash\n{rows}")
    usable, source, _ = scanned(spec_of(tmp_path, csv_digest_column="hash"), tmp_path)
    assert set(usable) == {"1", "3"}
    assert "the md5 is not that of the list" in source.notices[0]


def test_captions_of_other_columns_and_of_none(server: WebServer, tmp_path: Path) -> None:
    server.files["/1.png"] = picture(1)
    (tmp_path / "list.tsv").write_text(f"URL\tTEXT\talt\n{server.url}/1.png\tone, two\tother\n")
    columns = {"csv_file": str(tmp_path / "list.tsv"), "csv_url_column": "URL"}
    assert scanned(spec_of(tmp_path, csv_caption_column="TEXT", **columns), tmp_path)[0] == {"1": ("one, two",)}
    block = {"csv": {"caption_column": ["TEXT", "alt"]}}
    assert scanned(spec_of(tmp_path, **block, **columns), tmp_path)[0] == {"1": ("one, two", "other")}
    alone = {"caption_strategy": "instanceprompt", "instance_prompt": "zwx"}
    assert scanned(spec_of(tmp_path, **alone, **columns), tmp_path)[0] == {"1": ("zwx",)}


def test_entries_and_lists_that_cannot_be_read(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="csv_cache_dir is missing"):
        opened(spec_of(tmp_path, csv_cache_dir=None))
    with pytest.raises(UserError, match=r"the list .*list.csv cannot be read"):
        scanned(spec_of(tmp_path), tmp_path)
    (tmp_path / "list.csv").write_text(f"link,caption\n{server.url}/gone.png,one\n")
    with pytest.raises(UserError, match="has no column 'url'"):
        scanned(spec_of(tmp_path), tmp_path)
    with pytest.raises(UserError, match=r"none of the 1 images .* can be downloaded, first: .*404"):
        scanned(spec_of(tmp_path, csv_url_column="link"), tmp_path)
    line = json.loads((tmp_path / "images" / FAILED).read_text())
    assert line["reason"] == "404 Not Found"


def test_the_captions_of_a_list_are_not_in_another_table(tmp_path: Path) -> None:
    entry = {"id": "web", "type": "csv", "csv_file": "a.csv", "csv_cache_dir": "images", "metadata_backend": "json"}
    _, problems = parse_datasets([{**entry, "json": {}}], where="data.json", defaults=DataDefaults(), catalog=CATALOG)
    assert "the captions of type 'csv' are in its list" in problems[0].message
