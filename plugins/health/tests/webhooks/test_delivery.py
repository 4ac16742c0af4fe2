"""Attempts, waits, and what the outbox says, with a clock that the test turns."""

import base64
import hashlib
import hmac
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from smalti_health.webhooks.delivery.channel import LONGEST_QUEUE, Channel
from smalti_health.webhooks.delivery.outbox import Outbox
from smalti_health.webhooks.delivery.request import Limits, Reply, post
from smalti_health.webhooks.delivery.retry import ATTEMPTS, LONGEST_RETRY_AFTER, LONGEST_SECONDS, after
from smalti_health.webhooks.discord import discord_body
from smalti_testing.http_receiver import Receiver, drip, hang, reset, status

SHORT = Limits(connect=0.2, total=0.2)


def top(low: float, high: float) -> float:
    return high


class Turned:
    """A channel to a receiver, and its clock."""

    def __init__(self, endpoint, outbox=None, uniform=top):
        self.reports: list[str] = []
        self.now = 100.0
        self.channel = Channel(
            endpoint,
            outbox,
            post=lambda *request: post(*request, limits=SHORT),
            report=self.reports.append,
            uniform=uniform,
        )

    def run(self, most: int = 50) -> list[float]:
        """Attempt until nothing waits, or up to a number of times; returns the times of the attempts after the first event."""
        times = []
        while (due := self.channel.due()) is not None and len(times) < most:
            self.now = max(self.now, due)
            times.append(self.now - 100.0)
            self.channel.attempt(self.now)
        return times


@pytest.mark.parametrize("code", [200, 201, 202, 204, 206])
def test_success_is_any_2xx(receiver, endpoint_of, event_of, tmp_path, code):
    receiver.default, outbox, event = status(code), Outbox(tmp_path), event_of(critical=True)
    turned = Turned(endpoint_of(receiver), outbox)
    outbox.add(event, [turned.channel.endpoint])
    assert next(outbox.rows()).status == "pending"
    turned.channel.add(event, 100.0)
    assert turned.run() == [0.0]
    assert next(outbox.rows()).status == "delivered"


@pytest.mark.parametrize("code", [301, 302, 307, 400, 401, 403, 404, 405, 413, 422])
def test_a_redirect_or_refusal_ends_an_event_that_is_not_critical(receiver, endpoint_of, event_of, code):
    receiver.default = status(code, Location="http://127.0.0.1:1/")
    turned = Turned(endpoint_of(receiver))
    turned.channel.add(event_of(), 100.0)
    assert (turned.run(), len(receiver.requests)) == ([0.0], 1)
    assert f"HTTP {code}" in turned.reports[0]


@pytest.mark.parametrize(
    "failing", [status(408), status(425), status(429), status(500), status(502), status(503), status(504), reset, hang]
)
def test_what_may_pass_is_tried_again_until_it_succeeds_with_the_same_id(receiver, endpoint_of, event_of, failing):
    receiver.script = [failing, failing]
    turned = Turned(endpoint_of(receiver))
    turned.channel.add(event_of("msg_same"), 100.0)
    assert turned.run() == [0.0, 2.0, 6.0]
    assert {each.id for each in receiver.requests} == {"msg_same"}
    assert [int(each.headers["webhook-timestamp"]) for each in receiver.requests] == [100, 102, 106]
    assert turned.channel.counts.delivered == 1


def test_a_dripping_receiver_delays_nothing_for_longer_than_the_limit(receiver, endpoint_of, event_of):
    receiver.script = [drip(b"HTTP/1.1 200 OK\r\nA: b\r\n")]
    turned = Turned(endpoint_of(receiver))
    turned.channel.add(event_of(), 100.0)
    assert len(turned.run()) == 2
    assert turned.channel.counts.delivered == 1


def test_an_event_that_is_not_critical_is_given_up_after_some_attempts(receiver, endpoint_of, event_of):
    receiver.default = status(503)
    turned = Turned(endpoint_of(receiver))
    turned.channel.add(event_of(), 100.0)
    assert len(turned.run()) == ATTEMPTS
    assert (turned.channel.counts.failed, len(turned.channel)) == (1, 0)
    assert "is not delivered: HTTP 503" in turned.reports[-1]


@pytest.mark.parametrize("failing", [status(503), status(404), status(302, Location="http://127.0.0.1:1/")])
def test_a_critical_event_is_tried_for_days(receiver, endpoint_of, event_of, tmp_path, failing):
    receiver.default, outbox, event = failing, Outbox(tmp_path), event_of(critical=True)
    turned = Turned(endpoint_of(receiver), outbox)
    outbox.add(event, [turned.channel.endpoint])
    turned.channel.add(event, 100.0)
    turned.run(ATTEMPTS + 3)
    assert next(outbox.rows()).status == "pending"
    turned.now = 100.0 + 4 * 86400
    turned.run()
    assert next(outbox.rows()).status == "failed"


def test_retry_after_delays_the_next_attempt_and_the_events_behind_it(receiver, endpoint_of, event_of):
    receiver.script = [status(429, Retry_After="40")]
    turned = Turned(endpoint_of(receiver), uniform=lambda low, high: low)
    turned.channel.add(event_of("msg_1"), 100.0)
    turned.channel.add(event_of("msg_2"), 100.0)
    assert turned.run() == [0.0, 40.0, 40.0]
    assert [each.id for each in receiver.requests] == ["msg_1", "msg_2", "msg_1"]


def test_410_disables_the_endpoint_for_the_run(receiver, endpoint_of, event_of, tmp_path):
    receiver.default, outbox, event = status(410), Outbox(tmp_path), event_of("msg_2", critical=True)
    endpoint = endpoint_of(receiver)
    first = Turned(endpoint, outbox)
    outbox.add(event, [endpoint])
    for each in (event_of("msg_1"), event):
        first.channel.add(each, 100.0)
    first.run()
    again = Turned(endpoint, Outbox(tmp_path))
    again.channel.add(event_of("msg_3"), 200.0)
    again.run()
    assert [each.id for each in receiver.requests] == ["msg_1"]
    assert next(outbox.rows()).status == "disabled"
    assert "nothing more is sent there" in first.reports[0]


def test_an_address_that_is_not_allowed_is_not_tried_again(receiver, endpoint_of, event_of):
    turned = Turned(endpoint_of(receiver, allow_private=False))
    turned.channel.add(event_of(critical=True), 100.0)
    assert (len(turned.run()), receiver.requests) == (1, [])
    assert "needs allow_private" in turned.reports[0]


def test_one_failing_event_does_not_hold_up_later_ones(receiver, endpoint_of, event_of):
    receiver.script = [status(500)]
    turned = Turned(endpoint_of(receiver))
    for name in ("msg_1", "msg_2"):
        turned.channel.add(event_of(name), 100.0)
    turned.run()
    assert [each.id for each in receiver.requests] == ["msg_1", "msg_2", "msg_1"]


def test_a_full_queue_drops_the_oldest_that_is_not_critical_and_old_progress(endpoint_of, event_of, receiver):
    turned = Turned(endpoint_of(receiver))
    turned.channel.add(event_of("msg_critical", critical=True), 100.0)
    for number in range(LONGEST_QUEUE + 5):
        turned.channel.add(event_of(f"msg_{number}"), 100.0)
    assert (len(turned.channel), turned.channel.counts.dropped) == (LONGEST_QUEUE, 6)
    turned.channel.attempt(100.0)
    assert receiver.requests[0].id == "msg_critical"
    fresh = Turned(endpoint_of(receiver))
    for number in range(3):
        fresh.channel.add(event_of(f"msg_p{number}", type="training.progress"), 100.0)
    fresh.run()
    assert [each.id for each in receiver.requests[1:]] == ["msg_p2"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(100, 599),
    st.integers(1, 500),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 1e9)),
    st.floats(0, 1),
    st.floats(0, 10 * 86400),
)
def test_waits_are_bounded_and_only_2xx_is_success(code, attempts, critical, wanted, share, age):
    found = after(
        Reply(status=code, retry_after=wanted),
        attempts,
        critical=critical,
        age=age,
        uniform=lambda low, high: low + share * (high - low),
    )
    assert (found.result == "delivered") == (200 <= code < 300)
    assert 0 <= found.seconds <= max(LONGEST_SECONDS, LONGEST_RETRY_AFTER)
    if found.result == "retry":
        assert found.seconds >= min(wanted or 0.0, LONGEST_RETRY_AFTER)
        assert critical or attempts < ATTEMPTS


def test_a_receiver_can_verify_the_body_as_it_arrives(receiver, endpoint_of, event_of):
    turned = Turned(endpoint_of(receiver, message_prefix="[lab 3]", auth_token="t0ken", headers={"X-Team": "vision"}))
    turned.channel.add(event_of(), 100.0)
    turned.run()
    [request] = receiver.requests
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    content = f"{request.id}.{request.headers['webhook-timestamp']}.".encode() + request.body
    digest = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    assert request.headers["webhook-signature"] == f"v1,{digest}"
    assert (request.headers["x-api-key"], request.headers["x-team"]) == ("t0ken", "vision")
    assert request.json == {"type": "error", "message": "[lab 3] text of msg_1"}


@pytest.mark.parametrize("text", ["short", "x" * 5000, "😀" * 1500, "@everyone <@1> " * 300, "é" * 1999])
def test_discord_gets_at_most_2000_characters_and_notifies_nobody(text):
    body = json.loads(discord_body("[lab]", text))
    assert body["allowed_mentions"] == {"parse": []}
    assert len(body["content"].encode("utf-16-le")) // 2 <= 2000
    assert body["content"].startswith(f"[lab] {text[:5]}")


def test_discord_gets_a_text_and_no_signature(receiver, endpoint_of, event_of):
    turned = Turned(endpoint_of(receiver, kind="discord", secrets=()))
    turned.channel.add(event_of(), 100.0)
    turned.run()
    [request] = receiver.requests
    assert request.json["content"] == "text of msg_1"
    assert "webhook-signature" not in request.headers


def test_the_outbox_keeps_no_url_and_no_secret(receiver, endpoint_of, event_of, tmp_path):
    endpoint = endpoint_of(receiver, url=f"{receiver.url}/MARKER-5ECRET", auth_token="MARKER-5ECRET")
    receiver.script, outbox, event = [status(500)], Outbox(tmp_path), event_of(critical=True)
    outbox.add(event, [endpoint])
    turned = Turned(endpoint, outbox)
    turned.channel.add(event, 100.0)
    turned.run()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"MARKER-5ECRET" not in written
    assert b"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw" not in written
    assert b"127.0.0.1" in written


def test_damaged_rows_are_left_out(tmp_path, receiver, endpoint_of, event_of):
    outbox = Outbox(tmp_path)
    outbox.add(event_of(), [endpoint_of(receiver)])
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"event": {}}'), ("d", "null")):
        (outbox.folder / f"{name}.json").write_text(text)
    assert [row.event.id for row in outbox.rows()] == ["msg_1"]


def test_an_outbox_that_cannot_be_written_delays_no_delivery(receiver, endpoint_of, event_of, tmp_path):
    (tmp_path / "webhooks").write_text("a file in the way")
    turned = Turned(endpoint_of(receiver), Outbox(tmp_path))
    turned.channel.add(event_of(critical=True), 100.0)
    turned.run()
    assert len(receiver.requests) == 1


def test_every_endpoint_has_a_status_of_its_own(endpoint_of, event_of, tmp_path):
    with Receiver() as good, Receiver(default=status(500)) as bad:
        endpoints, outbox, event = [endpoint_of(good), endpoint_of(bad)], Outbox(tmp_path), event_of(critical=True)
        outbox.add(event, endpoints)
        for endpoint in endpoints:
            turned = Turned(endpoint, outbox)
            turned.channel.add(event, 100.0)
            turned.run(2)
    [row] = outbox.rows()
    assert sorted((each.status, each.attempts) for each in row.deliveries.values()) == [("delivered", 1), ("pending", 2)]


@pytest.mark.parametrize(("nodes", "found"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (4, [1])])
def test_each_node_takes_over_its_own_events_and_a_share_of_those_of_nodes_that_are_gone(
    tmp_path, receiver, endpoint_of, event_of, nodes, found
):
    for node in range(4):
        Outbox(tmp_path, node=node).add(event_of(f"msg_{node}", critical=True), [endpoint_of(receiver)])
    for path in (tmp_path / "webhooks" / "outbox").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "sender": {}}))
    rows = Outbox(tmp_path, node=min(1, nodes - 1)).take_over(nodes)
    assert sorted(int(row.event.id[-1]) for row in rows) == found


def test_the_events_of_a_sender_that_still_runs_are_left_to_it(tmp_path, receiver, endpoint_of, event_of):
    outbox = Outbox(tmp_path)
    outbox.add(event_of("msg_1", critical=True), [endpoint_of(receiver)])
    [path] = outbox.folder.glob("*.json")
    row = json.loads(path.read_text())
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    parent = {**row["sender"], "pid": os.getppid(), "start_time": started}
    path.write_text(json.dumps({**row, "sender": parent}))
    assert Outbox(tmp_path).take_over(1) == []
    path.write_text(json.dumps({**row, "sender": {**parent, "start_time": "another"}}))
    assert [each.event.id for each in Outbox(tmp_path).take_over(1)] == ["msg_1"]
