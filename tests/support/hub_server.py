"""A server that speaks the protocol of the Hugging Face Hub as far as uploads of models and downloads of datasets use it.

Over real HTTP. Files are committed to memory; `add_dataset` adds some.
Faults are injected by path: `fail("PUT", "/lfs/", 500)`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_writes"
READ_TOKEN = "hf_reads"
USER = "ann"
_ROLES = {TOKEN: "write", READ_TOKEN: "read"}


class HubServer:
    """The state of the server. `repositories` has the files by name, and `private` says which repositories are."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self._objects: dict[str, bytes] = {}
        self._faults: list[tuple[str, str, int, int]] = []
        self._lock = threading.Lock()
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def add_dataset(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Add a dataset with these files, or another revision of it."""
        self.repositories[f"datasets/{name}@{revision}"] = files

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def fail(self, method: str, pattern: str, status: int, times: int = 1) -> None:
        """Answer the next requests to paths that match with this status; 0 closes the connection."""
        self._faults.append((method, pattern, status, times))

    def recover(self) -> None:
        """Fail no more."""
        self._faults.clear()

    def fault(self, method: str, path: str) -> int | None:
        with self._lock:
            for number, (kind, pattern, status, times) in enumerate(self._faults):
                if kind == method and times and re.search(pattern, path):
                    self._faults[number] = (kind, pattern, status, times - 1)
                    return status
        return None

    def sent(self, method: str, pattern: str) -> int:
        """How many requests matched."""
        return sum(kind == method and re.search(pattern, path) is not None for kind, path in self.requests)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_HEAD(self) -> None:
        self._handle("HEAD")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append((method, path))
        if (status := self.hub.fault(method, path)) is not None:
            if status:
                self._answer({"error": "injected"}, status)
            else:
                self.close_connection = True
                self.connection.close()
            return
        if path.startswith("/lfs/"):
            self._put_object(path, body)
            return
        role = _ROLES.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if role is None:
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/whoami-v2":
            self._answer({"type": "user", "name": USER, "auth": {"accessToken": {"role": role}}})
        elif method == "POST" and role == "read":
            self._answer({"error": "You don't have the rights"}, 403)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            self._preupload(match[1], json.loads(body))
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(match[1], body)
        elif match := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/(revision|tree)/(.+)", path):
            self._describe(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/(datasets/[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(method, self._at(match[1], match[2]), match[3], match[2])
        elif match := re.fullmatch(r"/(.+)/resolve/main/(.+)", path):
            self._resolve(method, match[1], match[2])
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        else:
            self._answer({"error": f"{method} {path} is not spoken here"}, 404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _create(self, request: dict[str, object]) -> None:
        name = f"{request.get('organization') or USER}/{request['name']}"
        known = name in self.hub.repositories
        if not known:
            self.hub.repositories[name] = {}
            self.hub.private[name] = request.get("private") is True or request.get("visibility") == "private"
        self._answer({"url": f"{self.hub.url}/{name}", "name": name, "id": name}, 409 if known else 200)

    def _preupload(self, name: str, request: dict[str, list[dict[str, object]]]) -> None:
        modes = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if str(each["path"]).endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for each in request["files"]
        ]
        self._answer({"files": modes})

    def _batch(self, request: dict[str, list[dict[str, object]]]) -> None:
        objects = []
        for each in request["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
            objects.append(each | ({} if each["oid"] in self.hub._objects else {"actions": actions}))
        self._answer({"transfer": "basic", "objects": objects})

    def _put_object(self, path: str, body: bytes) -> None:
        oid = path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer({"error": "the digest differs"}, 400)
            return
        self.hub._objects[oid] = body
        self._answer({})

    def _commit(self, name: str, body: bytes) -> None:
        files = self.hub.repositories[name]
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub._objects[value["oid"]]
            else:
                raise AssertionError(f"a commit that does more than add: {entry['key']}")
        number = f"{len(self.hub.commits):040x}"
        self._answer({"commitUrl": f"{self.hub.url}/{name}/commit/{number}", "commitOid": number, "success": True})

    def _at(self, name: str, revision: str) -> str:
        """The repository of a dataset at a revision, or at a commit."""
        known = [each for each in self.hub.repositories if each.startswith(f"{name}@")]
        return next((each for each in known if revision in (each.partition("@")[2], self._number(each))), "")

    def _number(self, repository: str) -> str:
        return hashlib.sha1(repr(sorted(self.hub.repositories[repository].items())).encode()).hexdigest()

    def _describe(self, name: str, what: str, revision: str) -> None:
        repository = self._at(name, revision)
        if not repository:
            self._answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.hub.repositories[repository]
        if what == "tree":
            found = [{"type": "file", "path": path, "size": len(data), "oid": _oid(data)} for path, data in files.items()]
            self._answer(found)
        else:
            siblings = [{"rfilename": path} for path in files]
            self._answer({"id": name.partition("/")[2], "sha": self._number(repository), "siblings": siblings})

    def _resolve(self, method: str, name: str, file: str, commit: str = "0" * 40) -> None:
        data = self.hub.repositories.get(name, {}).get(file)
        if data is None:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit}
        self._send(200, data, headers, with_body=method == "GET")

    def _answer(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
