"""A server with repositories of models, as far as the client of the Hugging Face Hub reads them."""

import json
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


@contextmanager
def hub(repositories: dict[str, Path], monkeypatch, cache: Path):
    """Make the client ask a server that has these folders as repositories; yields the list of files that it has sent."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_HEAD(self):  # the name is http.server's
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                repository, _, rest = path.removeprefix("api/models/").partition("/tree/" if "/tree/" in path else "/revision/")
                folder = repositories.get(repository)
                return (
                    self.answer(404) if folder is None else self.listing(repository, folder, tree="/tree/" in path, rest=rest)
                )
            repository, _, rest = path.partition("/resolve/")
            _, _, name = rest.partition("/")
            file = repositories.get(repository, Path("/nowhere")) / name
            if not file.is_file():
                return self.answer(404)
            if self.command == "GET":
                sent.append(f"{repository}/{name}")
            return self.answer(200, file.read_bytes(), ETag=f'"{digest(file)}"')

        def listing(self, repository, folder, *, tree, rest):
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            entries = [
                {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": digest(path)}
                for path in files
            ]
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            return self.answer(
                200, json.dumps(entries if tree else {"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
            )

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        yield sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:40]
