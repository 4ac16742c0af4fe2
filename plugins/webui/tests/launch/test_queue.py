import os
import threading

import pytest

from smalti import UserError
from smalti.system import Process
from smalti_webui.launch.devices import Devices
from smalti_webui.launch.launches import Launch, end_of, progress_of
from smalti_webui.launch.queue import Queue

NOTHING = Devices()
FOUR = Devices(gpus=(0, 1, 2, 3))


@pytest.fixture
def queue(settings):
    return Queue(settings)


def wanted(queue, name, gpus=0, output_dir=None, folder=None):
    text = f'model_family = "no-such-family"\noutput_dir = "{name}"\n'
    folder = folder or queue.settings.roots[0]
    return queue.store.new(name=name, text=text, folder=folder, output_dir=output_dir, gpus=gpus)


def running(queue, name, devices=(), output_dir=None):
    """A launch whose process is alive: this one."""
    request = wanted(queue, name, len(devices), output_dir)
    launch = Launch(request=request, process=Process.of(os.getpid()), started=0.0, devices=tuple(devices))
    queue.store.write(launch)
    return launch


def names(queue):
    return [entry.request.name for entry in queue.entries()]


def test_what_waits_survives_the_server_in_its_order(queue, settings):
    for name in ("a", "b", "c"):
        queue.add(wanted(queue, name))
    assert names(Queue(settings)) == ["a", "b", "c"]
    second, third = (entry.request.id for entry in queue.entries()[1:])
    queue.move_up(third)
    assert names(Queue(settings)) == ["a", "c", "b"]
    queue.remove(second)
    assert names(Queue(settings)) == ["a", "c"]
    queue.add(wanted(queue, "d"))
    assert names(queue) == ["a", "c", "d"]


def test_the_first_cannot_move_up_and_what_is_gone_cannot_be_removed(queue):
    queue.add(wanted(queue, "a"))
    (entry,) = queue.entries()
    queue.move_up(entry.request.id)
    assert names(queue) == ["a"]
    queue.remove(entry.request.id)
    with pytest.raises(UserError, match="no longer waits"):
        queue.remove(entry.request.id)


def test_many_servers_add_without_losing_any(queue, settings):
    requests = [wanted(queue, f"run-{number}") for number in range(12)]
    threads = [threading.Thread(target=Queue(settings).add, args=[each]) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(queue)) == sorted(each.name for each in requests)


def test_a_file_that_cannot_be_read_is_left_alone(queue):
    queue.add(wanted(queue, "a"))
    broken = queue.folder / "00000000-broken.json"
    broken.write_text("{")
    assert names(queue) == ["a"]
    assert broken.exists()


def test_a_launch_on_processors_waits_for_the_run_that_uses_them(queue, make_run):
    request = wanted(queue, "next")
    assert queue.reason(request, NOTHING) == ""
    make_run("alive", condition="running", steps=1)
    assert queue.reason(request, NOTHING) == "waits for the processors of this node: alive is running"


def test_a_run_that_has_ended_keeps_nothing_waiting(queue, make_run):
    make_run("over", steps=1)
    assert queue.reason(wanted(queue, "next"), NOTHING) == ""


def test_gpus_are_reserved_for_launches_that_have_not_reached_them(queue):
    request = wanted(queue, "next", gpus=2)
    assert queue.reason(request, FOUR) == ""
    running(queue, "first", devices=(0, 1))
    assert queue.reason(request, FOUR) == ""
    assert queue.reason(wanted(queue, "large", gpus=3), FOUR) == "waits for 3 GPUs: 2 of 4 are free"
    assert queue.reason(request, Devices(gpus=(0, 1, 2, 3), busy=frozenset({3}))) == "waits for 2 GPUs: 1 of 4 is free"


def test_what_can_never_start_says_so(queue, tmp_path):
    assert queue.reason(wanted(queue, "huge", gpus=8), FOUR) == "needs 8 GPUs, but this node has 4"
    assert "does not exist any more" in queue.reason(wanted(queue, "gone", folder=tmp_path / "gone"), NOTHING)
    assert "nvidia-smi does not answer" in queue.reason(
        wanted(queue, "x", gpus=1), Devices(gpus=(0,), error="nvidia-smi does not answer: x")
    )


def test_one_run_directory_is_used_by_one_run(queue, tmp_path):
    directory = tmp_path / "run"
    running(queue, "first", output_dir=directory)
    request = wanted(queue, "next", gpus=1, output_dir=directory)
    assert queue.reason(request, FOUR) == "waits for first to end, which uses the same run directory"
    with pytest.raises(UserError, match="is in use by first"):
        queue.start(request, FOUR)


def test_a_paused_queue_starts_nothing(queue, settings):
    queue.add(wanted(queue, "a"))
    queue.pause(paused=True)
    assert Queue(settings).paused
    assert queue.advance() is None
    queue.pause(paused=False)
    assert not queue.paused


def test_the_order_is_kept_while_the_first_waits(queue, make_run):
    make_run("alive", condition="running", steps=1)
    queue.add(wanted(queue, "a"))
    queue.add(wanted(queue, "b"))
    assert queue.advance() is None
    assert names(queue) == ["a", "b"]


def test_the_next_starts_when_the_devices_are_free_and_its_end_is_known(queue, settings):
    queue.add(wanted(queue, "a"))
    queue.add(wanted(queue, "b"))
    launch = queue.advance()
    assert (launch.request.name, names(queue)) == ("a", ["b"])
    assert queue.advance() is None, "the first one uses the processors"
    while launch.process.alive():
        threading.Event().wait(0.05)
    progress = progress_of(Queue(settings).store, Queue(settings).store.find(launch.id))
    assert (progress.state, progress.failed, progress.run_id) == ("ended", True, "")
    assert "no-such-family" in "".join(progress.lines)


def test_what_was_started_as_the_server_ended_does_not_start_twice(queue):
    request = wanted(queue, "a")
    queue.add(request)
    queue.store.write(Launch(request=request, process=Process(pid=1, host="x", pid_namespace="", start_time=""), started=0.0))
    assert queue.advance() is None
    assert names(queue) == []


def test_an_id_is_not_a_path(queue):
    for identity in ("../../etc", "1", "", "1-0000000g"):
        with pytest.raises(UserError, match="cannot be a launch"):
            queue.store.find(identity)


@pytest.mark.parametrize(
    ("lines", "message", "failed"),
    [
        (["step 1", "smalti: done: trained 5 steps", "  use it       x"], "trained 5 steps", False),
        (["smalti: ended with exit code 7: stopped on request", "  to resume    x"], "stopped on request", False),
        (["smalti: ended with exit code 9: rank 1 was killed"], "rank 1 was killed", True),
        (["smalti: error: no images", "  fix: x"], "no images", True),
        (["Segmentation fault"], "it ended without a message", True),
        ([], "it ended without a message", True),
    ],
)
def test_the_log_says_how_a_launch_has_ended(lines, message, failed):
    assert end_of(lines) == (message, failed)
