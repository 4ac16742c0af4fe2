"""The plugin and its process: what hooks send, what survives a crash, and what never appears."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smalti import (
    Checkpoint,
    GpuFault,
    Outcome,
    RunInfo,
    RunState,
    StepResult,
    StopReason,
    UserError,
    ValidationImage,
    ValidationResult,
    World,
)
from smalti.config import resolve
from smalti.plugins import load_plugins, schema_of
from smalti.rundir import Phase
from smalti_health.webhooks.delivery.outbox import Outbox
from smalti_health.webhooks.delivery.process import LONGEST_LIST, SenderProcess
from smalti_health.webhooks.delivery.sender import Sender, Setup
from smalti_health.webhooks.plugin import Webhooks
from smalti_testing.http_receiver import Receiver, hang, status

MARKER = "MARKER-5ECRET-0123456789"
SECRET = "whsec_" + base64.b64encode(MARKER.encode() * 2).decode()


@pytest.fixture(scope="module")
def schema():
    return schema_of(load_plugins())


@pytest.fixture
def info_of(schema, tmp_path):
    def make(receiver: Receiver, world: World | None = None, *flags: str, **values: object) -> RunInfo:
        entry = {"webhook_type": "raw", "callback_url": f"{receiver.url}/{MARKER}", "allow_private": True}
        file = tmp_path / "webhooks.json"
        file.write_text(json.dumps({**entry, "auth_token": MARKER, "secret": SECRET, **values}))
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        config = resolve(schema, ("--model_family=toy", f"--webhook_config={file}", *flags), environment={})
        return RunInfo(
            id="id-1",
            directory=run,
            world=world or World(),
            config=config,
            family="toy",
            strategy="ddp",
            parameters=1,
            trainable=1,
            effective_batch=4,
            timesteps="all",
            plugins=(),
        )

    return make


@pytest.fixture
def plugin():
    found = Webhooks()
    yield found
    found.on_rank_end(RunState(max_steps=10), None)


def end(plugin: Webhooks, state: RunState, reason: StopReason = StopReason.COMPLETED) -> None:
    plugin.on_train_end(state, Outcome(reason=reason, message=f"{reason.name.lower()} after step {state.step}"))
    plugin.on_rank_end(state, None)


def begin(plugin: Webhooks, state: RunState, info: RunInfo) -> None:
    plugin.on_rank_start(state, info)
    plugin.on_train_start(state, info)


def step(number: int) -> StepResult:
    return StepResult(step=number, loss=0.5, grad_norm=1.0, learning_rate=1e-4, samples=4, seconds=0.1)


def test_a_run_is_reported_from_its_start_to_its_end(receiver, info_of, plugin, tmp_path):
    state = RunState(max_steps=10, step=4)
    begin(plugin, state, info_of(receiver))
    plugin.on_checkpoint(state, Checkpoint(step=4, path=tmp_path / "c", size=9, seconds=1.5))
    image = ValidationImage(prompt="a cat", seed=1, path=tmp_path / "0.png")
    plugin.on_validation(state, ValidationResult(step=4, images=(image,), folder=tmp_path))
    plugin.on_warning(state, "the validation failed", ValueError())
    end(plugin, state)
    events = [each.json for each in receiver.wait_for(5)]
    assert [each["type"] for each in events] == [
        *("lifecycle.stage", "training.checkpoint", "training.validation", "notification", "lifecycle.stage")
    ]
    assert (events[0]["stage"]["status"], events[-1]["stage"]["status"]) == ("running", "completed")
    assert events[1]["checkpoint"] == {
        "path": str(tmp_path / "c"),
        "label": "step 4",
        "is_final": False,
        "step": 4,
        "bytes": 9,
        "seconds": 1.5,
    }
    assert events[2]["validation"]["images"] == [{"prompt": "a cat", "seed": 1, "path": str(tmp_path / "0.png")}]
    assert {each["job_id"] for each in events} == {"id-1"}
    assert len({each.id for each in receiver.requests}) == 5


def test_the_fault_has_the_payload_of_the_reference(receiver, info_of, plugin):
    state = RunState(max_steps=10, step=7)
    begin(plugin, state, info_of(receiver, World(rank=9, size=16, local_rank=1, local_size=8, node=1)))
    reading = {"index": 1, "name": "H100", "temperature_celsius": 64, "ecc_errors_double": 2, "memory_used_percent": 81.53}
    plugin.on_gpu_fault(
        state,
        GpuFault(kind="ecc", message="2 errors", device="cuda:1", rank=9, memory=True, reading={**reading, "uuid": "GPU-1"}),
    )
    end(plugin, state, StopReason.FAULT)
    [request] = receiver.wait_for(1)
    event = request.json
    assert (event["type"], event["severity"], event["title"]) == ("gpu.fault", "critical", "GPU Fault: ecc")
    assert event["source"] | {"host": ""} == {"run": "run", "host": "", "node": 1, "rank": 9}
    assert event["fault"]["gpu"] == {
        "index": 1,
        "name": "H100",
        "temperature_celsius": 64,
        "ecc_errors_single": None,
        "ecc_errors_double": 2,
        "throttle_reasons": [],
        "memory_used_percent": 81.5,
        "uuid": "GPU-1",
        "device": "cuda:1",
    }
    assert (event["fault"]["type"], event["fault"]["action_taken"], event["fault"]["memory_suspect"]) == (
        "ecc",
        "circuit_opened",
        True,
    )


def test_other_ranks_than_the_main_one_send_only_their_own_errors(receiver, info_of, plugin, tmp_path):
    state = RunState(max_steps=10, step=7)
    begin(plugin, state, info_of(receiver, World(rank=1, size=2, local_rank=1, local_size=2)))
    plugin.on_checkpoint(state, Checkpoint(step=4, path=tmp_path, size=9, seconds=1))
    plugin.on_step_end(state, step(7))
    assert plugin._sender is not None
    assert plugin._sender._process is None  # it starts with the first event
    plugin.on_error(state, ValueError("it broke"))
    plugin.on_train_end(state, None)
    plugin.on_rank_end(state, ValueError("it broke"))
    [request] = receiver.wait_for(1)
    assert (request.json["type"], request.json["error"]["exception_type"]) == ("error", "ValueError")
    assert request.json["message"] == "step 7: ValueError: it broke"


def test_what_follows_from_the_failure_of_another_rank_is_reported_once_per_node(receiver, info_of):
    from smalti.parallel import BrokenGroupError

    for rank, local in ((2, 0), (3, 1)):
        plugin, state = Webhooks(), RunState(max_steps=10, step=7)
        begin(plugin, state, info_of(receiver, World(rank=rank, size=4, local_rank=local, local_size=2, node=1)))
        error = BrokenGroupError("connection closed by peer")
        plugin.on_error(state, error)
        plugin.on_train_end(state, None)
        plugin.on_rank_end(state, error)
    assert [each.json["source"]["rank"] for each in receiver.requests] == [2]


def test_stages_before_the_loop_and_a_failure_in_one_are_reported(receiver, info_of, plugin):
    state = RunState(max_steps=0)
    plugin.on_rank_start(state, info_of(receiver))
    for name in ("scanning", "encoding", "saving", "encoding"):
        plugin.on_phase(state, Phase(name=name, begun=0.0, done=0, total=500, unit="images"))
    plugin.on_rank_end(state, OSError("no space left"))
    events = [each.json for each in receiver.wait_for(4)]
    found = [(each["type"], each.get("stage", {}).get("key"), each.get("stage", {}).get("status")) for each in events]
    assert found == [
        ("lifecycle.stage", "scanning", "running"),
        ("lifecycle.stage", "encoding", "running"),
        ("error", None, None),
        ("lifecycle.stage", "encoding", "failed"),
    ]
    assert events[1]["message"] == "encoding 0/500 images"


@pytest.mark.parametrize(
    ("reason", "status_", "severity"),
    [
        (StopReason.COMPLETED, "completed", "info"),
        (StopReason.PREEMPTED, "stopped", "warning"),
        (StopReason.NON_FINITE, "failed", "error"),
        (StopReason.FAULT, "failed", "error"),
    ],
)
def test_the_end_says_how_the_run_ended(reason, status_, severity):
    from smalti_health.webhooks.events import Source, run_end

    source = Source(run="r", directory=Path(), job_id="j", host="h")
    event = run_end(source, RunState(max_steps=10, step=5), "training", Outcome(reason=reason, message="m"), None, 0.0)
    assert (event.payload["stage"]["status"], event.level, event.critical) == (status_, severity, True)


def test_what_is_no_number_is_null_and_long_texts_are_cut():
    from smalti_health.webhooks import events

    source = events.Source(run="r", directory=Path(), job_id="j", host="h")
    result = StepResult(step=5, loss=float("nan"), grad_norm=float("inf"), learning_rate=0.1, samples=4, seconds=1)
    payload = events.progress(source, RunState(max_steps=10), result, 0.0).payload
    assert json.loads(json.dumps(payload, allow_nan=False))["progress"]["loss"] is None
    failure = events.failure(source, RunState(max_steps=10), UserError("x" * 100_000, fix="y"), 0.0)
    assert len(json.dumps(failure.payload)) < 4000


def test_progress_is_sent_in_intervals(receiver, info_of, plugin):
    state = RunState(max_steps=1000)
    begin(plugin, state, info_of(receiver, None, "--webhook_reporting_interval=3600"))
    for number in range(1, 100):
        plugin.on_step_end(state, step(number))
    plugin._next_progress = 0.0
    for number in range(100, 200):
        plugin.on_step_end(state, step(number))
    end(plugin, state)
    assert [each.json["progress"]["step"] for each in receiver.requests if "progress" in each.json] == [100]


def test_without_an_interval_no_progress_is_sent(receiver, info_of, plugin):
    begin(plugin, RunState(max_steps=9), info_of(receiver, None, "--webhook_reporting_interval=0"))
    assert plugin._next_progress == float("inf")


# --- the process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def setup_of(endpoint_of, tmp_path):
    def make(receiver: Receiver, **values: object) -> Setup:
        return Setup(**{"endpoints": (endpoint_of(receiver),), "run": tmp_path, "end_seconds": 5.0, **values})

    return make


def test_a_stopped_sender_delays_no_hook_and_its_list_is_bounded(receiver, setup_of, event_of):
    sender = SenderProcess(setup_of(receiver))
    sender.start()
    os.kill(sender._process.pid, signal.SIGSTOP)
    filler = "x" * 20_000
    for number in range(400):  # 8 MB, of which the pipe takes 1: it would block here for ever if a write could
        sender.send(event_of(f"msg_{number}{filler}"))
    assert len(sender._list) == LONGEST_LIST
    assert sender.dropped > 0
    os.kill(sender._process.pid, signal.SIGKILL)
    sender._end()


def test_a_hanging_receiver_delays_no_hook(setup_of, event_of):
    with Receiver(default=hang) as receiver:
        sender = SenderProcess(setup_of(receiver, end_seconds=0.2))
        for number in range(300):
            sender.send(event_of(f"msg_{number}"))
        assert not sender._list  # each send was one write to the pipe
        assert sender.finish().get("pending", 0) > 0


def test_an_event_whose_rank_is_killed_at_once_is_delivered(receiver, setup_of, event_of, tmp_path):
    """The rank starts a sender, sends a fault, and is killed."""
    code = (
        "import os, pickle, sys\n"
        "from smalti_health.webhooks.delivery.process import SenderProcess\n"
        "setup, event = pickle.load(sys.stdin.buffer)\n"
        "sender = SenderProcess(setup)\n"
        "sender.send(event)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import pickle

    data = pickle.dumps((setup_of(receiver), event_of("msg_fault", critical=True, time=time.time())))
    done = subprocess.run([sys.executable, "-c", code], input=data, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [each.id for each in receiver.wait_for(1)] == ["msg_fault"]


def test_a_rank_that_was_killed_is_reported_by_its_sender(receiver, info_of, plugin):
    plugin.on_rank_start(RunState(max_steps=0), info_of(receiver, World(rank=8, size=16, local_size=8, node=1)))
    sender = plugin._sender
    sender._pipes.stdin.close()  # what the system does for a process that is killed
    event = receiver.wait_for(1)[0].json
    assert (event["type"], event["title"], event["source"]["rank"]) == ("error", "Rank lost", 8)
    assert "was killed, or ended without reporting why" in event["message"]
    plugin._sender = None
    sender._end()


def test_a_rank_that_has_reported_its_error_is_not_reported_as_lost(receiver, info_of, plugin):
    state = RunState(max_steps=10)
    plugin.on_rank_start(state, info_of(receiver))
    plugin.on_error(state, ValueError("it broke"))
    sender = plugin._sender
    sender._pipes.stdin.close()
    sender._process.wait(20)
    assert [each.json["title"] for each in receiver.requests] == ["Error"]
    plugin._sender = None
    sender._end()


def test_a_child_of_the_rank_that_keeps_the_pipe_open_does_not_keep_the_sender(receiver, setup_of, event_of):
    sender = SenderProcess(setup_of(receiver))
    sender.send(event_of())
    kept = os.dup(sender._process.stdin.fileno())
    assert sender.finish()["delivered"] == 1
    os.close(kept)


def test_an_event_that_was_not_delivered_is_sent_by_the_next_start_with_the_same_id(setup_of, event_of, tmp_path, receiver):
    event = event_of("msg_critical", critical=True, time=time.time())
    with Receiver(default=hang) as down:
        down_port_setup = setup_of(down)
        sender = SenderProcess(down_port_setup)
        sender.send(event)
        down.wait_for(1)
        os.kill(sender._process.pid, signal.SIGKILL)  # between the event and its delivery
        sender._end()
    [row] = Outbox(tmp_path).rows()
    assert (row.event.id, row.status) == ("msg_critical", "pending")
    endpoint = down_port_setup.endpoints[0]
    rebuilt = Receiver()
    with rebuilt:
        # The same URL: the id of an endpoint is that of its URL, so the receiver comes back on the same port.
        moved = Setup(endpoints=(endpoint,), run=tmp_path, takes_over=True)
        posted: list[str] = []

        def post(target, headers, body):
            from smalti_health.webhooks.delivery.request import Reply

            posted.append(headers["webhook-id"])
            return Reply(status=200)

        again = Sender(moved, lambda sentence: None, post=post)
        again.finish(10)
    assert posted == ["msg_critical"]
    assert next(Outbox(tmp_path).rows()).status == "delivered"


def test_a_sender_that_dies_is_started_again_and_nothing_critical_is_lost_or_sent_twice(receiver, setup_of, event_of, tmp_path):
    sender = SenderProcess(setup_of(receiver))
    sender.send(event_of("msg_1", critical=True, time=time.time()))
    receiver.wait_for(1)
    until = time.monotonic() + 10
    while next(Outbox(tmp_path).rows()).status != "delivered" and time.monotonic() < until:
        time.sleep(0.01)
    sender._process.kill()
    sender._process.wait()
    sender.send(event_of("msg_2", critical=True, time=time.time()))
    sender.send(event_of("msg_3", critical=True, time=time.time()))
    sender.finish()
    assert [each.id for each in receiver.requests] == ["msg_1", "msg_2", "msg_3"]


def test_the_end_waits_for_a_limited_time_and_the_rest_stays_in_the_outbox(setup_of, event_of, tmp_path):
    with Receiver(default=status(503)) as receiver:
        sender = SenderProcess(setup_of(receiver, end_seconds=0.5))
        sender.send(event_of(critical=True, time=time.time()))
        counts = sender.finish()
    assert (counts["delivered"], counts["pending"]) == (0, 1)
    assert next(Outbox(tmp_path).rows()).status == "pending"


def test_levels_decide_what_an_endpoint_gets(endpoint_of, event_of, tmp_path):
    with Receiver() as loud, Receiver() as quiet, Receiver() as chat:
        endpoints = (
            endpoint_of(loud, level="debug"),
            endpoint_of(quiet, level="error"),
            endpoint_of(chat, kind="discord", secrets=()),
        )
        sender = Sender(Setup(endpoints=endpoints, run=tmp_path), lambda sentence: None)
        for level in ("debug", "info", "warning", "error", "critical"):
            sender.add(event_of(f"msg_{level}", level=level))
        sender.add(event_of("msg_progress", type="training.progress", level="info"))
        assert sender.finish(10)["pending"] == 0
        assert [len(each.requests) for each in (loud, quiet, chat)] == [6, 2, 4]


# --- secrets --------------------------------------------------------------------------------------------------------


def test_a_secret_is_in_no_event_log_or_file(info_of, plugin, caplog, capfd, tmp_path):
    state = RunState(max_steps=10, step=7)
    with Receiver(script=[status(503)], default=status(404)) as receiver:
        info = info_of(receiver)
        begin(plugin, state, info)
        plugin.on_warning(state, f"cannot reach {receiver.url}/{MARKER}", ValueError(MARKER))
        plugin.on_error(state, ValueError(f"token {MARKER} and {SECRET}"))
        arguments = Path(f"/proc/{plugin._sender._process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{plugin._sender._process.pid}/environ").read_bytes()
        plugin._sender._setup = plugin._sender._setup.__class__(**{**vars(plugin._sender._setup), "end_seconds": 0.5})
        plugin.on_train_end(state, None)
        plugin.on_rank_end(state, ValueError("it broke"))
        bodies = b"".join(each.body for each in receiver.requests)
        urls = [each.line for each in receiver.requests]
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    seen = capfd.readouterr()
    for text in (bodies, arguments, environment, written, caplog.text.encode(), seen.out.encode(), seen.err.encode()):
        assert MARKER.encode() not in text
        assert SECRET.encode() not in text
        assert SECRET.removeprefix("whsec_").encode() not in text
    assert MARKER in urls[0]  # it is used
    assert b"outbox" not in written
    assert written


def test_an_inline_secret_is_not_in_the_configuration_that_the_run_directory_gets(schema):
    entry = json.dumps({"webhook_type": "raw", "callback_url": "https://h.example.com/a", "auth_token": MARKER})
    config = resolve(schema, ("--model_family=toy",), environment={"SMALTI_WEBHOOK_CONFIG": entry})
    assert config.value("webhook_config") == entry
    assert MARKER not in json.dumps([config.values(), config.flags(), config.given(), config.shared_values(), config.notices])
    assert config.secrets()["SMALTI_WEBHOOK_CONFIG"] == entry
