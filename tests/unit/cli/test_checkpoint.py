import json
import subprocess
import sys

import pytest
from blake3 import blake3
from click.testing import CliRunner

from smalti.checkpoint.format.manifest import FileRecord, Manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, encode_header
from smalti.checkpoint.format.state_file import State
from smalti.checkpoint.format.store import CheckpointStore
from smalti.cli.checkpoint import checkpoint
from smalti.errors import UserError
from smalti_export.command import export


def make(run, step, *, elements=600, flags=(), **trainer):
    store = CheckpointStore(run / "checkpoints")
    with store.exclusive():
        partial = store.prepare(step)
        chunks = [("blocks.0.weight", Chunk(dtype="F32", shape=(elements, 2), offsets=(0, 0)))]
        chunks += [("step", Chunk(dtype="I64", shape=(), offsets=()))]
        files = {
            "model/a.safetensors": encode_header(chunks) + bytes(8 * elements + 8),
            "state.json": State(step=step, trainer=trainer).encode(),
        }
        records = {}
        for name, data in files.items():
            (partial / name).write_bytes(data)
            records[name] = FileRecord(size=len(data), digest=blake3(data).hexdigest())
        manifest = Manifest(
            step=step,
            world_size=2,
            files=records,
            created="2025-01-02T03:04:05+00:00",
            plugins=("fsdp2 1.0",),
            config_digest="abc",
            flags=flags,
        )
        return store.publish(partial, manifest)


def damage(path):
    file = path / "model/a.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")


def call(*arguments):
    done = CliRunner().invoke(checkpoint, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


def test_the_listing_is_aligned_and_says_what_cannot_be_used(tmp_path):
    make(tmp_path, 500)
    make(tmp_path, 1000, elements=300_000, flags=("suspect",))
    (make(tmp_path, 1500) / "manifest.json").unlink()
    assert call("ls", tmp_path).output == (
        "checkpoint        size  ranks  made\n"
        "step-00000500  5.1 KiB      2  2025-01-02T03:04:05+00:00\n"
        "step-00001000  2.3 MiB      2  2025-01-02T03:04:05+00:00  suspect\n"
        "step-00001500                                             not usable: manifest.json is missing: "
        "the save was not finished, or the file was removed\n"
    )


def test_the_listing_marks_the_best_that_is_there(tmp_path):
    for step in (500, 1000):
        make(tmp_path, step)
    (tmp_path / "checkpoints" / "ranking.json").write_text('{"keep": 1, "steps": [1500, 500, 1000]}')
    assert [line.split()[0] for line in call("ls", tmp_path).output.splitlines() if line.endswith("  best")] == [
        "step-00000500"
    ]
    assert [each["best"] for each in json.loads(call("ls", tmp_path, "--json").output)] == [True, False]


@pytest.mark.parametrize("step", ["1.5", "-1", "newest", ""])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    refused = CliRunner().invoke(export, [str(tmp_path), "--to=x", f"--step={step}"]).exception
    assert (type(refused), "is not a step" in str(refused)) == (UserError, True)


def test_the_listing_for_machines_has_everything(tmp_path):
    make(tmp_path, 500)
    (listed,) = json.loads(call("ls", tmp_path, "--json").output)
    assert (listed["step"], listed["world_size"], listed["plugins"], listed["problem"]) == (500, 2, ["fsdp2 1.0"], "")


def test_whole_checkpoints_verify(tmp_path):
    make(tmp_path, 500)
    done = call("verify", tmp_path)
    assert (done.exit_code, done.output) == (0, "step-00000500  ok  5.1 KiB\n")


def test_damage_is_shown_and_fails_the_command(tmp_path):
    make(tmp_path, 500)
    damage(make(tmp_path, 1000))
    done = call("verify", tmp_path)
    assert (done.exit_code, done.output) == (
        1,
        "step-00000500  ok  5.1 KiB\n"
        "step-00001000  DAMAGED\n"
        "    model/a.safetensors does not match its digest: damaged or edited\n",
    )


def test_one_checkpoint_can_be_verified_for_machines(tmp_path):
    path = make(tmp_path, 1000)
    damage(path)
    done = call("verify", path, "--json")
    assert (done.exit_code, [found["ok"] for found in json.loads(done.output)]) == (1, [False])


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_where_there_is_no_checkpoint_the_call_was_wrong(tmp_path, command):
    for place, message in ((tmp_path, "no checkpoint found in"), (tmp_path / "nowhere", "there is no folder")):
        refused = CliRunner().invoke(checkpoint, [command, str(place)]).exception
        assert isinstance(refused, UserError)
        assert (refused.exit_code, message in refused.message, bool(refused.fix)) == (2, True, True)


def test_looking_at_checkpoints_needs_no_torch():
    code = "import sys, smalti.cli.checkpoint as c; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
