"""The servers that the kit starts check secrets and clocks, keep what they acknowledged, and end with their parent."""

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from smalti_testing import juicefs, seaweed
from support.processes import lives


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("seaweed")) as store:
        yield store


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with juicefs(tmp_path_factory.mktemp("juicefs")) as store:
        yield store


@pytest.mark.parametrize("server", ["store", "gateway"])
def test_objects_come_back_under_their_keys(server, request):
    store = request.getfixturevalue(server)
    files = {f"keys/{key}": key.encode() for key in ("a/b", "with blank & +.png", "ä/日本.png", "%2F")}
    assert [store.request("PUT", key, data).status for key, data in files.items()] == [200] * 4
    assert {key: store.request("GET", key).body for key in files} == files
    assert store.keys("keys/") == sorted(files)


@pytest.mark.parametrize("server", ["store", "gateway"])
def test_wrong_secrets_and_clocks_are_refused(server, request):
    store = request.getfixturevalue(server)
    late = datetime.now(UTC) - timedelta(minutes=30)
    assert store.request("PUT", "refused", b"x", secret_key="wrong").status == 403
    refused = store.request("PUT", "refused", b"x", now=late)
    assert (refused.status, b"RequestTimeTooSkewed" in refused.body) == (403, True)
    assert store.request("GET", "refused").status == 404


@pytest.mark.parametrize("server", ["store", "gateway"])
def test_conditional_writes_are_honoured_as_the_store_says(server, request):
    store = request.getfixturevalue(server)
    assert store.request("PUT", "once", b"first").status == 200
    second = store.request("PUT", "once", b"second", headers={"If-None-Match": "*"})
    assert (second.status == 412) == store.conditional_writes
    assert store.request("GET", "once").body == (b"first" if store.conditional_writes else b"second")


def test_a_killed_server_has_what_it_acknowledged(store):
    written = {f"kept/{number}": os.urandom(1000 * number) for number in range(20)}
    assert all(store.request("PUT", key, data).status == 200 for key, data in written.items())
    store.kill()
    with pytest.raises(ConnectionRefusedError):
        store.request("GET", "kept/1")
    store.start()
    assert {key: store.request("GET", key).body for key in written} == written


def test_a_paused_server_accepts_connections_and_does_not_answer(store):
    store.pause()
    try:
        with pytest.raises(TimeoutError):
            store.request("GET", "kept/1", timeout=0.3)
    finally:
        store.resume()
    assert store.request("GET", "kept/none").status == 404


def test_the_server_ends_when_its_parent_is_killed(tmp_path):
    script = f"""import os, signal
from pathlib import Path
from smalti_testing import juicefs
with juicefs(Path({str(tmp_path)!r})) as store:
    print(store.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    server, deadline = int(done.stdout), time.monotonic() + 20
    while lives(server):
        assert time.monotonic() < deadline, "the server goes on without its parent"
        time.sleep(0.02)
