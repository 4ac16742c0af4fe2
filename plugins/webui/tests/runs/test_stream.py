"""The events reach a browser without a gap and without a duplicate; requests reach the run, and its answers the page."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from smalti.rundir import RunDirectory, RunWriter


def id_of(run: RunDirectory) -> str:
    record = run.record()
    assert record is not None
    return record.id


def steps_of(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["type"] == "step"]


def write_steps(writer: RunWriter, steps: range) -> None:
    for step in steps:
        writer.events.append("step", step=step, max_steps=99, loss=1 / step, samples=4)


class Browser:
    """Reads a stream as an EventSource does."""

    def __init__(self, served: Any) -> None:
        self._address = served.url.removeprefix("http://")
        self._cookie = ""
        self.last = ""
        with self._asked(served.link.partition(served.url)[2]) as answer:
            self._cookie = (answer.getheader("set-cookie") or "").partition(";")[0]

    @contextmanager
    def _asked(self, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection(self._address, timeout=30)) as connection:
            connection.request("GET", path, headers={"cookie": self._cookie, **headers})
            with closing(connection.getresponse()) as answer:
                yield answer

    def json(self, path: str) -> Any:
        with self._asked(path) as answer:
            return json.loads(answer.read())

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": self.last} if self.last else {})
        with self._asked(path, **headers) as answer:
            assert answer.status == 200
            yield self._events(answer)

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        fields: dict[str, list[str]] = {}
        while line := answer.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields.setdefault(name, []).append(value)
            elif line == "\n":
                if "event" not in fields and "id" in fields:
                    self.last = fields["id"][-1]
                    yield from (json.loads(each) for each in fields["data"])
                fields = {}


def test_what_follows_a_snapshot_has_no_gap_and_no_duplicate(make_run: Any, served: Any) -> None:
    run = make_run("run", steps=30, condition="running")
    writer, browser, path = make_run.writers["run"], Browser(served), f"/runs/{id_of(run)}"
    snapshot = browser.json(f"{path}/series")
    seen = next(each["step"] for each in snapshot["series"] if each["name"] == "loss")
    assert seen == list(range(1, 31))
    write_steps(writer, range(31, 41))  # between the snapshot and the stream
    with browser.stream(f"{path}/events?from={snapshot['position']}") as events:
        while seen[-1] < 50:
            seen += steps_of([next(events)])
            if seen[-1] == 40:
                write_steps(writer, range(41, 51))
    write_steps(writer, range(51, 61))  # while the connection is lost; the browser says what it has seen
    with browser.stream(f"{path}/events?from={snapshot['position']}") as events:
        while seen[-1] < 60:
            seen += steps_of([next(events)])
    assert seen == list(range(1, 61))
    writer.close()


def test_events_as_json_continue_at_their_position(make_run: Any, client: TestClient) -> None:
    run = make_run("run", steps=25)
    path, position, seen = f"/runs/{id_of(run)}/events", "0", []
    for _ in range(3):
        answer = client.get(path, params={"from": position}).json()
        seen += steps_of(answer["events"])
        position = answer["position"]
    assert seen == list(range(1, 26))
    assert position == str(run.events_file.stat().st_size)
    assert answer["status"]["condition"] == "finished"
    for wrong in ("x", "-1", "1e3", "1+2"):
        refused = client.get(path, params={"from": wrong})
        assert refused.status_code == 422
        assert "is not a position" in refused.text
    assert client.get("/runs/unknown/events").status_code == 404


@pytest.mark.parametrize(("kind", "accepted"), [("save", True), ("sample", False), ("stop", True)])
def test_a_request_reaches_the_run_and_its_answer_is_shown(
    make_run: Callable[..., RunDirectory], client: TestClient, kind: str, accepted: bool
) -> None:
    run = make_run("run", steps=3, condition="running")
    writer: RunWriter = make_run.writers["run"]  # type: ignore[attr-defined]
    taken: list[str] = []

    def obey() -> None:
        while not taken:
            for request in writer.take_requests():
                taken.append(request.kind)
                writer.acknowledge(request, accepted=accepted, message="accepted" if accepted else "no prompts")
            time.sleep(0.02)

    thread = threading.Thread(target=obey)
    thread.start()
    answer = client.post(f"/runs/{id_of(run)}/{kind}", headers={"hx-request": "true"})
    thread.join()
    assert answer.status_code == 200
    (message,) = json.loads(answer.headers["hx-trigger"])["toast"]["messages"]
    assert message["level"] == ("success" if accepted else "error")
    assert ("accepted" if accepted else "no prompts") in message["text"]
    assert taken == [kind]
    assert ("accepted" if accepted else "no prompts") in client.get(f"/runs/{id_of(run)}/overview").text
    writer.close()


def test_a_run_that_has_ended_refuses_requests(make_run: Any, client: TestClient) -> None:
    run = make_run("run", condition="failed", message="it broke")
    for kind in ("stop", "save", "sample", "stop-now"):
        answer = client.post(f"/runs/{id_of(run)}/{kind}", headers={"hx-request": "true"})
        assert answer.status_code == 422
        assert "no running process" in answer.text
    assert not list(run.control.glob("*")) if run.control.exists() else True
