"""What `smalti checkpoint inspect` shows."""

import json

import pytest
from click.testing import CliRunner

from smalti.checkpoint import CheckpointStore, Chunk, Manifest, State, encode_header
from smalti.errors import CheckpointError, UserError
from smalti_migrate.checkpoints.inspection import inspect
from support.checkpoints import record

MADE_WITH = {"family": "sdxl", "precision": "bf16", "strategy": "FSDP2", "base_model": "org/sdxl"}
CHUNKS = [
    ("blocks.0.weight", Chunk(dtype="F32", shape=(600, 2), offsets=(0, 0))),
    ("step", Chunk(dtype="I64", shape=(), offsets=())),
]


def make(run, step, **trainer):
    store = CheckpointStore(run / "checkpoints")
    with store.exclusive():
        partial = store.prepare(step)
        files = {
            "model/a.safetensors": encode_header(CHUNKS) + bytes(4808),
            "state.json": State(step=step, trainer=trainer).encode(),
        }
        for name, data in files.items():
            (partial / name).write_bytes(data)
        records = {name: record(data) for name, data in files.items()}
        return store.publish(partial, Manifest(step=step, world_size=2, files=records))


def shown(*arguments):
    done = CliRunner().invoke(inspect, [str(argument) for argument in arguments], catch_exceptions=False)
    return done.output


def test_inspecting_a_run_shows_its_newest_checkpoint(tmp_path):
    make(tmp_path, 500)
    make(tmp_path, 1000)
    output = shown(tmp_path)
    assert "step        1000\n" in output
    assert "model: 2 tensors, 1,201 elements, 4.7 KiB, F32, I64\n" in output
    assert "blocks.0.weight" not in output


def test_inspecting_says_what_the_checkpoint_was_made_with(tmp_path):
    path = make(tmp_path, 500, made_with=MADE_WITH)
    assert "family      sdxl\nprecision   bf16\nstrategy    FSDP2\nbase model  org/sdxl\n" in shown(path)
    assert json.loads(shown(path, "--json"))["made_with"] == MADE_WITH
    assert json.loads(shown(make(tmp_path, 1000), "--json"))["made_with"] == {}  # of an earlier version


def test_inspecting_can_show_every_tensor(tmp_path):
    output = shown(make(tmp_path, 500), "--tensors")
    assert "blocks.0.weight  F32   [600, 2]  4.7 KiB\nstep             I64   []            8 B\n" in output


def test_inspecting_for_machines_shows_every_tensor_too(tmp_path):
    groups = json.loads(shown(make(tmp_path, 500), "--tensors", "--json"))["groups"]
    assert groups["model"]["contents"]["blocks.0.weight"] == {"dtype": "F32", "shape": [600, 2], "chunks": 1}


def test_inspecting_what_cannot_be_read_fails_with_the_reason(tmp_path):
    path = make(tmp_path, 500)
    (path / "model/a.safetensors").write_bytes(b"\x80\x04]q\x00.")
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        shown(path)


def test_where_there_is_no_checkpoint_the_call_was_wrong(tmp_path):
    for place, message in ((tmp_path, "no checkpoint found in"), (tmp_path / "nowhere", "there is no folder")):
        with pytest.raises(UserError, match=message) as refused:
            shown(place)
        assert refused.value.exit_code == 2
