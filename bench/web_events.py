"""What following 50,000 events costs the web page, in CPU seconds against reading the same file line by line with `json.loads`.

"stream" is what a browser is sent, "over HTTP" the same with the server and a client that reads it, "snapshot" what the first
paint needs: series, markers and phases of all events.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from run import Result, paired
from sizes import sized

from smalti.rundir import RunDirectory, acquire
from smalti_webui.runs.following import Follower
from smalti_webui.runs.history import Histories
from smalti_webui.runs.stream import message
from smalti_webui.server.app import create_app
from smalti_webui.server.serve import configuration, listen
from smalti_webui.server.settings import Settings

EVENTS = sized(50_000, short=500)
PAIRS = sized(5, short=1)
_FIELDS = {
    "max_steps": EVENTS,
    "epoch": 3,
    "grad_norm": 1.4874112606048584,
    "learning_rate": 0.0001,
    "samples": 8,
    "seconds": 0.011521572996571194,
    "data_seconds": 1.3131000741850585e-05,
    "skipped": False,
    "forward_seconds": 0.0024555050040362403,
    "peak_memory_mb": 403.12109375,
    "recent_samples_per_second": 65.69999635779087,
    "time": {"training": 0.098, "data": 0.006, "starting": 2.241, "other": 0.007},
}


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run")
        write(directory)
        server, settings = serve(Path(folder))
        cases: dict[str, tuple[Callable[[], None], float]] = {
            "stream": (lambda: stream(directory), 1.0),
            "stream over HTTP": (lambda: over_http(settings, server, directory), 3.0),
            "snapshot": (lambda: snapshot(directory), 3.0),
        }
        results = []
        for name, (ours, goal) in cases.items():
            pairs = [(seconds(ours), seconds(lambda: bare(directory))) for _ in range(PAIRS)]
            own, peer = zip(*pairs, strict=True)
            results.append(paired(f"web page: {EVENTS} events, {name}", own, peer, unit="CPU s", goal=goal))
        server.should_exit = True
        return results


def write(directory: RunDirectory) -> None:
    with acquire(directory) as writer:
        for step in range(1, EVENTS + 1):
            writer.events.append("step", step=step, loss=1 / step, smoothed_loss=2 / step, **_FIELDS)


def seconds(action: Callable[[], None]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def bare(directory: RunDirectory) -> None:
    with directory.events_file.open("rb") as file:
        count = sum(1 for line in file if json.loads(line))
    assert count > EVENTS


def stream(directory: RunDirectory) -> None:
    follower, sent, more = Follower(directory), 0, True
    while more:
        batch = follower.read()
        sent += len(message(batch))
        more = batch.more
    assert sent > directory.events_file.stat().st_size


def snapshot(directory: RunDirectory) -> None:
    history = Histories().of(directory).history
    assert history.last_step["step"] == EVENTS


def serve(root: Path) -> tuple[uvicorn.Server, Settings]:
    socket = listen("127.0.0.1", 0)
    settings = Settings(roots=(root.resolve(),), port=socket.getsockname()[1], data=root / "data")
    server = uvicorn.Server(configuration(create_app(settings)))
    threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, settings


_cookies: list[str] = []


def over_http(settings: Settings, server: uvicorn.Server, directory: RunDirectory) -> None:
    """Read the stream until the last complete line has come."""
    connection = http.client.HTTPConnection("127.0.0.1", settings.port)
    if not _cookies:
        connection.request("GET", f"/?token={settings.token}")
        answer = connection.getresponse()
        _cookies.append((answer.getheader("set-cookie") or "").partition(";")[0])
        answer.read()
    record = directory.record()
    assert record is not None
    headers = {"accept": "text/event-stream", "cookie": _cookies[0]}
    connection.request("GET", f"/runs/{record.id}/events?from=0", headers=headers)
    answer = connection.getresponse()
    end = b"id: %d" % directory.events_file.stat().st_size
    while answer.readline().rstrip(b"\n") != end:
        pass
    connection.close()


if __name__ == "__main__":
    for result in measure():
        print(result)
