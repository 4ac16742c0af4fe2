"""Mirrors on object stores: the same promises on a server, and whole runs that have nothing but a bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from smalti.checkpoint import RANKING, verify
from smalti.errors import InUseError
from smalti.rundir import RunDirectory, acquire
from smalti_data.remote.checkpoints import RemoteRun
from smalti_export.command import export as export_command
from smalti_storage_s3.mirror.commands import mirror as mirror_command
from smalti_storage_s3.mirror.ownership import Lease, SupersededError
from smalti_storage_s3.mirror.place import Access, open_place
from smalti_storage_s3.mirror.pulling import pull
from smalti_storage_s3.mirror.upload import Uploader
from smalti_testing.fault_proxy import Fault, FaultProxy, Rule
from smalti_testing.object_store import juicefs, seaweed
from support.checkpoints import make
from support.forked_popen import ForkedPopen
from support.images import images_in

TOY = (
    "--model_family=toy",
    "--toy_width=16",
    "--toy_depth=1",
    "--toy_heads=1",
    "--resolution=32",
    "--aspect_bucket_alignment=8",
    "--train_batch_size=2",
    "--mixed_precision=no",
    "--use_cpu",
)


@pytest.fixture(scope="module", params=[seaweed, juicefs], ids=["seaweed", "juicefs"])
def server(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("server")) as store:
        yield store


@pytest.fixture(autouse=True)
def credentials(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", server.region)


@pytest.fixture
def url(server, request) -> str:
    return f"s3://{server.bucket}/{request.node.name.partition('[')[0][-40:]}"


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    acquire(directory).close()
    return directory


def uploader(run: RunDirectory, url: str, *, keep: int | None = None) -> Uploader:
    record = run.record()
    assert record is not None
    return Uploader(run=run, lease=Lease.take(open_place(url, Access()), record.id), keep=keep)


def test_checkpoints_are_kept_and_removed_in_a_bucket_as_in_a_folder(run, url, tmp_path):
    uploads = uploader(run, url, keep=2)
    for step in (1, 2, 3):
        make(run.checkpoints, step)
        uploads.push_newest()
        uploads.rotate()
    mirror = RemoteRun(open_place(url, Access()))
    assert [each.name for each in mirror.all()] == ["step-00000002", "step-00000003"]
    assert [mirror.problems(each) for each in mirror.all()] == [(), ()]
    assert verify(pull(mirror, RunDirectory(tmp_path / "fresh"), "latest", lambda _sentence: None)).ok


def test_a_best_checkpoint_that_is_overtaken_before_its_upload_arrives_too_and_stays(run, url, tmp_path):
    uploads = uploader(run, url, keep=1)
    for step in (1, 2, 3, 4):
        make(run.checkpoints, step)
    (run.checkpoints / RANKING).write_text('{"keep": 2, "steps": [1, 3, 2]}')
    newest = uploads.push_newest()
    assert newest is not None
    assert newest.step == 4
    assert [each.step for each in uploads.push_best()] == [3, 1], "the newest first"
    assert uploads.push_best() == [], "nothing is sent or listed again"
    assert uploads.rotate() == []
    mirror = RemoteRun(open_place(url, Access()))
    assert [(each.step, mirror.problems(each)) for each in mirror.all()] == [(1, ()), (3, ()), (4, ())]
    make(run.checkpoints, 5)
    (run.checkpoints / RANKING).write_text('{"keep": 2, "steps": [5, 1, 3, 2]}')
    words = ["push", str(run.path), f"--to={url}", "--keep=1"]
    pushed = CliRunner().invoke(mirror_command, words)
    assert "step-00000001: complete" in pushed.output
    assert "step-00000004: removed there" in pushed.output
    assert [each.step for each in RemoteRun(open_place(url, Access())).all()] == [1, 5]
    (run.checkpoints / RANKING).write_text("{")
    uploads.report = (said := list[str]()).append
    assert uploads.push_best() == []
    assert "best checkpoints are not copied" in said[0]


def test_one_launch_writes_on_stores_with_and_without_conditional_writes(run, url, server):
    assert open_place(url, Access()).creates_once is server.conditional_writes
    first, second = uploader(run, url), uploader(run, url)
    assert (first.lease.number, second.lease.number) == (1, 2)
    make(run.checkpoints, 1)
    with pytest.raises(SupersededError):
        first.push_newest()
    with pytest.raises(InUseError, match="is the mirror of another run"):
        Lease.take(first.storage, "another")


def test_damage_in_the_bucket_is_found_and_the_checkpoint_before_it_is_taken(run, url, server, tmp_path):
    uploads, said = uploader(run, url, keep=1), []
    uploads.report = said.append
    for step in (1, 2):
        make(run.checkpoints, step)
        uploads.push_newest()
    key = f"{url.removeprefix(f's3://{server.bucket}/')}/checkpoints/step-00000002/model/a.safetensors"
    body = server.request("GET", key).body
    assert server.request("PUT", key, body[:-1] + b"\xff").status == 200
    assert uploads.rotate() == []
    assert "step-00000002" in said[0]
    path = pull(RemoteRun(uploads.storage), RunDirectory(tmp_path / "fresh"), "latest", said.append)
    assert path.name == "step-00000001"


FAULTS: tuple[Fault, ...] = ("500", "503", "reset_before", "lost_reply", "cut", "cut_reset", "flip_get", "flip_put")


def test_faults_of_the_network_cost_time_and_nothing_else(run, url, server, tmp_path):
    rules = [Rule(fault=fault, chance=0.02) for fault in FAULTS]
    with FaultProxy(server.endpoint, rules, seed=15) as proxy:
        storage = open_place(url, Access(endpoint_url=proxy.endpoint))
        record = run.record()
        assert record is not None
        uploads = Uploader(run=run, lease=Lease.take(storage, record.id), keep=2)
        for step in range(1, 5):
            make(run.checkpoints, step)
            assert uploads.push_newest() is not None
            uploads.rotate()
        path = pull(RemoteRun(storage), RunDirectory(tmp_path / "fresh"), "latest", lambda _sentence: None)
        assert len(proxy.injected) > 10
    assert path.name == "step-00000004"
    assert verify(path).ok
    direct = RemoteRun(open_place(url, Access()))
    assert [(each.name, direct.problems(each)) for each in direct.all()] == [("step-00000003", ()), ("step-00000004", ())]


def test_a_server_that_is_killed_loses_no_published_checkpoint(run, url, server, tmp_path):
    """It is killed while the second checkpoint is sent, and the upload goes on when it is back."""
    uploads = uploader(run, url)
    make(run.checkpoints, 1)
    uploads.push_newest()
    make(run.checkpoints, 2)
    with FaultProxy(server.endpoint, [Rule(fault="reset_before", operations={"put"}, path="state.json", count=1)]) as proxy:
        uploads.lease = Lease(open_place(url, Access(endpoint_url=proxy.endpoint)), uploads.lease.number)
        sending = threading.Thread(target=uploads.push_newest)
        sending.start()
        while not proxy.injected:
            time.sleep(0.01)
        server.restart()
        sending.join()
    mirror = RemoteRun(open_place(url, Access()))
    assert [(each.name, mirror.problems(each)) for each in mirror.all()] == [("step-00000001", ()), ("step-00000002", ())]


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return images_in(tmp_path_factory.mktemp("photos"), 4, caption="a square")


@pytest.fixture
def train(photos, server, tmp_path):
    """train(directory, words...) -> the running process of a run that sees only these directories and the server."""
    own = {**os.environ, "SMALTI_PLUGINS": "toy,storage_s3", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(directory: Path | str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "smalti", "train", *TOY, f"--instance_data_dir={photos}"]
        command += [f"--output_dir={directory}", *words]
        return ForkedPopen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def finish(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def weights(run: Path) -> dict[str, bytes]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {str(file.relative_to(newest)): file.read_bytes() for file in newest.rglob("*.safetensors")}


def exported(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("server", [pytest.param(seaweed, id="seaweed")], indirect=True)  # the other tests compare the servers
def test_hook_restore_run_continues_a_killed_run_from_the_bucket_alone(train, url, server, tmp_path):
    killed = train(tmp_path / "a", f"--checkpoint_mirror={url}", "--checkpoint_step_interval=3", "--max_train_steps=100000")
    mirror, until = RemoteRun(open_place(url, Access())), time.monotonic() + 120
    while not mirror.published():
        assert time.monotonic() < until, "no checkpoint has arrived"
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    arrived = mirror.published()[-1].step
    resumed = finish(train(url, f"--max_train_steps={arrived + 2}", "--checkpoint_step_interval=0"))
    assert "restored " in resumed
    directory = next((tmp_path / "cache" / "smalti" / "runs").iterdir())
    assert f"is the mirror of a run directory on this node: {directory}" in resumed
    finish(train(tmp_path / "c", f"--max_train_steps={arrived + 2}", "--checkpoint_step_interval=0"))
    assert weights(directory) == weights(tmp_path / "c") != {}
    record = RunDirectory(directory).record()
    assert record is not None
    assert record.id == json.loads(mirror.storage.read("run.json"))["id"]
    other = finish(train(tmp_path / "d", f"--resume_from_checkpoint={url}", f"--max_train_steps={arrived + 3}"))
    assert "resuming from " in other
    assert f"at step {arrived + 2}" in other
    assert RunDirectory(tmp_path / "d").record() != record
    assert CliRunner().invoke(export_command, [url, f"--to={tmp_path / 'there'}"]).exit_code == 0
    assert CliRunner().invoke(export_command, [str(directory), f"--to={tmp_path / 'here'}"]).exit_code == 0
    assert exported(tmp_path / "there") == exported(tmp_path / "here") != {}
    refused = train(tmp_path / "c", f"--checkpoint_mirror={url}", "--max_train_steps=100000")
    printed, _ = refused.communicate(timeout=300)
    assert refused.returncode == InUseError.exit_code
    assert "is the mirror of another run" in printed
