"""Real runs and commands: what arrives, and what is nowhere."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from smalti_health.webhooks.delivery.channel import message
from smalti_health.webhooks.delivery.outbox import Outbox
from smalti_health.webhooks.delivery.request import post
from smalti_health.webhooks.endpoints import Endpoint
from smalti_testing.http_receiver import Receiver, status
from support.forked_popen import run_forked

MARKER = "MARKER-5ECRET-0123456789"
KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TOY = (
    *("--model_family=toy", "--toy_width=16", "--toy_depth=1", "--toy_heads=1", "--resolution=32"),
    *("--aspect_bucket_alignment=8", "--train_batch_size=2", "--mixed_precision=no", "--use_cpu", "--max_train_steps=2"),
)


def smalti(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smalti", *map(str, words)]
    environment = {**os.environ, "SMALTI_PLUGINS": "toy,webhooks", **variables}
    return run_forked(command, env=environment, timeout=300)


def entry(receiver: Receiver, **values: object) -> dict[str, object]:
    return {"webhook_type": "raw", "callback_url": f"{receiver.url}/{MARKER}", "allow_private": True, **values}


def test_a_run_sends_its_events_and_keeps_no_secret(receiver, tmp_path):
    photos, run = tmp_path / "photos", tmp_path / "run"
    photos.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (number * 60, 100, 200)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text("a square")
    config = json.dumps(entry(receiver, auth_token=f"{MARKER}-token"))
    words = (f"--instance_data_dir={photos}", f"--output_dir={run}", *TOY)
    done = smalti("train", *words, SMALTI_WEBHOOK_CONFIG=config)
    assert done.returncode == 0, done.stderr
    events = [each.json for each in receiver.requests]
    types = [(each["type"], each.get("stage", {}).get("status")) for each in events]
    assert types[-1] == ("lifecycle.stage", "completed")
    assert ("training.checkpoint", None) in types
    assert {each.headers["x-api-key"] for each in receiver.requests} == {f"{MARKER}-token"}
    assert [row.status for row in Outbox(run).rows()] == ["delivered"]
    assert MARKER not in done.stdout + done.stderr
    files = [path for path in run.rglob("*") if path.is_file() and "data" not in path.parts]
    assert [path for path in files if MARKER.encode() in path.read_bytes()] == []
    assert {"config.toml", "run.json", "events.jsonl"} <= {path.name for path in files}


@pytest.mark.parametrize("code", [204, 302, 404])
def test_the_test_event_shows_what_came_back_and_no_secret(receiver, tmp_path, code):
    receiver.default = status(code)
    file = tmp_path / "webhooks.json"
    file.write_text(json.dumps([entry(receiver), entry(receiver, webhook_type="discord", log_level="critical")]))
    done = smalti("webhook", "test", f"--webhook_config={file}", "--json")
    assert done.returncode == (0 if code == 204 else 1)
    assert [each["delivered"] for each in json.loads(done.stdout)] == [code == 204] * 2
    assert str(code) in json.loads(done.stdout)[0]["response"]
    assert len(receiver.requests) == 2
    assert MARKER not in done.stdout + done.stderr


def test_the_receiver_of_the_documentation_verifies_signatures(endpoint_of, event_of, monkeypatch):
    page = (Path(__file__).parents[4] / "docs" / "webhooks.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("WEBHOOK_SECRET", KEY)
    names: dict[str, object] = {}
    exec(code, names)
    names["Receiver"].log_message = lambda *_: None
    with http.server.HTTPServer(("127.0.0.1", 0), names["Receiver"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, now = f"http://127.0.0.1:{server.server_port}/", int(time.time())
        wrong = f"whsec_{'A' * 40}"
        replies = []
        for keys, moment in (((KEY,), now), ((wrong, KEY), now), ((wrong,), now), ((KEY,), now - 4000)):
            endpoint = Endpoint(kind="raw", url=url, allow_private=True, secrets=keys)
            replies.append(post(endpoint, *message(endpoint, event_of(), moment)).status)
        server.shutdown()
    assert replies == [204, 204, 401, 401]


def test_a_secret_on_the_command_line_is_refused_and_not_repeated(receiver):
    for words in (("webhook", "test"), ("train", *TOY)):
        done = smalti(*words, f"--webhook_config={json.dumps(entry(receiver))}")
        assert done.returncode == 2
        assert "other users can read secrets on the command line" in done.stderr
        assert MARKER not in done.stdout + done.stderr
    assert receiver.requests == []


def test_the_outbox_is_listed(receiver, endpoint_of, event_of, tmp_path):
    outbox, endpoint = Outbox(tmp_path), endpoint_of(receiver)
    outbox.add(event_of("msg_1", critical=True), [endpoint])
    outbox.update(event_of("msg_1"), endpoint, "pending", 3, "HTTP 503 Service Unavailable", 101.0)
    outbox.disable(endpoint, 102.0)
    done = smalti("webhook", "ls", tmp_path)
    assert "pending" in done.stdout
    assert "HTTP 503 Service Unavailable" in done.stdout
    assert "disabled: raw http://127.0.0.1" in done.stderr
    found = json.loads(smalti("webhook", "ls", tmp_path, "--json").stdout)
    assert [(each["event"]["id"], each["status"]) for each in found["events"]] == [("msg_1", "pending")]
    assert len(found["disabled"]) == 1
