"""What a run on several ranks has trained comes out whole on a machine with none of them."""

import json
import os
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.errors import UserError
from smalti.parallel.state import PortableState
from smalti_export.command import export as export_command
from smalti_export.folder import TrainedWeights
from smalti_testing.strategies import SingleRank
from support.forked_popen import run_forked

OPTIONS = {"max_train_steps": 2, "train_batch_size": 4, "use_ema": True, "checkpoint_step_interval": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    """Two steps on two sharded ranks."""
    finished = train(
        tmp_path_factory.mktemp("export") / "run", **OPTIONS, num_processes=2, use_cpu=True, fsdp_enable=True, probe=False
    )
    assert finished.code == 0, finished.output
    return finished


def export(*words):
    """Without any plugin but these and the built-in ones. The exit code, and all that was said."""
    done = CliRunner(env={"SMALTI_PLUGINS": "toy,export"}).invoke(export_command, list(map(str, words)))
    if isinstance(done.exception, UserError):
        return int(done.exception.exit_code), f"{done.output}{done.exception}"
    return done.exit_code, done.output


def test_shards_of_a_backend_that_is_not_there_become_whole_and_start_another_run(run, tmp_path, train):
    target = tmp_path / "made"
    command = [sys.executable, "-m", "smalti", "checkpoint", "export", run.directory, "--to", target, "--json"]
    done = run_forked(command, env=os.environ | {"SMALTI_PLUGINS": "toy,export"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["step"], told["family"], told["files"]) == (
        2,
        "toy",
        ["README.md", "config.json", "diffusion_pytorch_model.safetensors"],
    )
    again = train(tmp_path / "again", **OPTIONS, pretrained_model_name_or_path=target, learning_rate=1e-9, probe=False)
    assert again.code == 0, again.output
    found, first = again.tensors(1, "model"), load_file(target / "diffusion_pytorch_model.safetensors")
    assert max(float((found[name] - first[name]).abs().max()) for name in first) < 1e-6


def test_the_default_is_what_validation_samples_with(run, tmp_path):
    made = {}
    for words in ((), ("--ema",), ("--raw",)):
        target = tmp_path / f"made{'-'.join(words)}"
        code, said = export(run.directory, "--to", target, *words)
        assert (code, "validation samples with" in said) == (0, True), said
        made[words] = load_file(target / "diffusion_pytorch_model.safetensors")
    default, ema, raw = made.values()
    assert all(torch.equal(default[name], ema[name]) for name in default)
    assert any(not torch.equal(raw[name], ema[name]) for name in raw)


def test_a_family_with_one_format_refuses_others(run, tmp_path):
    code, said = export(run.directory, "--to", tmp_path / "made", "--format=kohya")
    assert (code, "the family toy exports one format only" in said) == (2, True), said


def test_averaged_weights_of_a_step_in_half_precision(run, tmp_path):
    assert export(run.directory, "--to", tmp_path / "made", "--step=1", "--ema", "--dtype=fp16")[0] == 0
    made = load_file(tmp_path / "made" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.float16}


REFUSALS = {
    "a target that is there": (["{run}", "--to", "{run}"], "already exists", 2),
    "a step that is not there": (["{run}", "--to", "{new}", "--step", "7"], "there is no checkpoint of step 7", 8),
    "a step of one checkpoint": (["{run}/checkpoints/step-00000001", "--to", "{new}", "--step=1"], "leave out --step", 2),
    "what is no run": (["{run}/samples", "--to", "{new}"], "there is no launch.json", 2),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_exported_is_refused_with_the_way_out(run, tmp_path, what):
    (run.directory / "samples").mkdir(exist_ok=True)
    words, reason, expected = REFUSALS[what]
    code, said = export(*(word.format(run=run.directory, new=tmp_path / "made") for word in words))
    assert (code, reason in said, (tmp_path / "made").exists()) == (expected, True, False), said


def test_a_damaged_checkpoint_is_passed_over_and_nothing_half_made_is_left(run, tmp_path):
    newest = run.directory / "checkpoints" / "step-00000002" / "state.json"
    kept = newest.read_bytes()
    newest.write_bytes(kept.replace(b"2", b"3", 1))
    try:
        _, said = export(run.directory, "--to", tmp_path / "made")
        refused, _ = export(newest.parent, "--to", tmp_path / "other")
    finally:
        newest.write_bytes(kept)
    assert ("skipped step-00000002" in said, "at step 1" in said, refused) == (True, True, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_value_too_large_for_half_precision_is_refused(tmp_path):
    snapshot = Snapshot(step=1, state=PortableState(model={"large": torch.tensor([1.0, 7e4])}))
    saved = save(tmp_path, snapshot, SingleRank())
    trained = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision="fp16")
    with pytest.raises(UserError, match="large has values that are too large for float16"):
        trained.read("large")
