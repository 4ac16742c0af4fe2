"""Runs that keep weights in bf16, or step in the backward pass: what they save, how they resume, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from smalti_testing.ranks import RankFailed
from support.images import images_in
from support.warm_processes import warm_processes
from support.whole import some

STEPS = 4
BF16 = {"weights_dtype": "bf16", "mixed_precision": "bf16"}
RELEASED = {"release_gradients": True, "max_grad_norm": 0}
SHARDED = {"fsdp_enable": True, "num_processes": 2, "train_batch_size": 2}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, option=value, ...) -> exit code, output, and the directory, of a full run."""
    root = tmp_path_factory.mktemp("updated")
    common = {
        "model_family": "toy",
        "toy_width": 32,
        "toy_depth": 2,
        "toy_heads": 2,
        "instance_data_dir": images_in(root / "images", 8, (16, 16)),
        "resolution": 16,
        "resolution_type": "pixel",
        "train_batch_size": 4,
        "mixed_precision": "no",
        "learning_rate": 1e-3,
        "max_grad_norm": 0,
        "max_train_steps": STEPS,
        "checkpoint_step_interval": 0,
        "num_processes": 1,
        "use_cpu": True,
        "without": "plots",
    }

    def run(name, **options):
        words = [f"--{key}={value}" for key, value in {**common, "output_dir": root / name, **options}.items()]
        return *warm_processes().train(words, {"HF_HOME": str(root / "hf")}), root / name

    return run


@pytest.fixture(scope="module")
def plain(train):
    code, output, directory = train("plain")
    assert code == 0, output
    return directory


def events(directory, kind="step"):
    found = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event for event in found if event["type"] == kind]


def tensors(directory, step=STEPS):
    folder = directory / "checkpoints" / f"step-{step:08}"
    files = sorted(folder.glob("**/*.safetensors"))
    assert files
    return {f"{path.parent.name}/{name}": each for path in files for name, each in load_file(path).items()}


def assert_same(directory, other, step=STEPS):
    left, right = tensors(directory, step), tensors(other, step)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


def test_a_run_that_releases_its_gradients_is_the_plain_run_and_resumes_as_one(train, plain):
    code, output, directory = train("released", **RELEASED, max_train_steps=2)
    assert code == 0, output
    code, output, directory = train("released", **RELEASED, use_ema=True)
    assert code == 0, output
    assert [event["loss"] for event in events(directory)] == [event["loss"] for event in events(plain)]
    norms = [[event["grad_norm"] for event in events(each)] for each in (directory, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    mine = {name: each for name, each in tensors(directory).items() if not name.startswith("ema/")}
    theirs = tensors(plain)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(each, mine[name]) for name, each in theirs.items())


def test_so_does_one_of_two_ranks(train):
    found = []
    for name, options in (("whole", {}), ("in-backward", RELEASED)):
        code, output, directory = train(name, **SHARDED, **options)
        assert code == 0, output
        found.append(directory)
    assert_same(*found)
    assert [event["loss"] for event in events(found[0])] == [event["loss"] for event in events(found[1])]


@pytest.mark.parametrize("update", some(["stochastic", "kahan"], "stochastic"))
def test_weights_in_bf16_are_saved_as_they_are_and_resumed_exactly(train, update):
    options = {**BF16, "bf16_update": update, "optimizer": "adafactor"}
    code, output, whole = train(f"{update}-whole", **options)
    assert code == 0, output
    assert "weights are kept in bf16" in output
    train(f"{update}-resumed", **options, max_train_steps=2)
    code, output, resumed = train(f"{update}-resumed", **options, **RELEASED)
    assert code == 0, output
    assert_same(whole, resumed)
    assert {each.dtype for name, each in tensors(whole).items() if name.startswith("model/")} == {torch.bfloat16}


def test_weights_of_fp32_are_rounded_once_and_those_of_bf16_are_exact_in_fp32(train):
    train("mixed", max_train_steps=2)
    code, output, directory = train("mixed", **BF16, max_train_steps=3)
    assert code == 0, output
    assert "weights of the checkpoint are in fp32, and were rounded to bf16" in output
    code, output, directory = train("mixed", max_train_steps=3, checkpoint_step_interval=1, max_grad_norm=0)
    assert code == 0, output
    code, output, directory = train("mixed", max_train_steps=4)
    assert code == 0, output
    assert "rounded" not in output
    assert {each.dtype for name, each in tensors(directory).items() if name.startswith("model/")} == {torch.float32}


def test_a_loss_that_is_not_finite_is_skipped_and_changes_nothing(train):
    rate = {"learning_rate": 1e30, "adam_weight_decay": 0.0, "nonfinite_loss": "skip", "max_train_steps": 12}
    code, output, directory = train("diverges", **RELEASED, **rate)
    assert (code, "not finite" in output) == (1, True), output
    assert not list((directory / "checkpoints").glob("step-*")), "nothing of it is saved"


OVERFLOWS = {
    **RELEASED,
    "learning_rate": 1e8,
    "adam_weight_decay": 0.0,
    "nonfinite_loss": "skip",
    "checkpoint_step_interval": 1,
    "checkpoint_async": False,
}


def test_a_gradient_that_is_not_finite_ends_the_run_as_weights_have_changed(train):
    code, output, directory = train("overflows", **OVERFLOWS)
    assert (code, "a gradient is not finite, and release_gradients has updated weights" in output) == (1, True), output
    assert [path.name for path in (directory / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert all(math.isfinite(event["loss"]) for event in events(directory)), "so its loss had not told"


def test_so_it_does_on_every_rank(train):
    with pytest.raises(RankFailed) as failed:
        train("overflows-sharded", **OVERFLOWS, **SHARDED)
    assert str(failed.value).count("NonFiniteGradientError: a gradient is not finite") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**RELEASED, "gradient_accumulation_steps": 2}, "leaves no gradients to add"),
        ({**RELEASED, "max_grad_norm": 1.0}, "before the norm of all gradients is known"),
        ({**RELEASED, "num_processes": 2}, "frees nothing with DDP"),
        ({**RELEASED, "deepspeed_config": '{"zero_optimization": {"stage": 2}}'}, "does not go with DeepSpeed"),
        ({**RELEASED, "fsdp_enable": True, "fsdp_version": 1}, "does not go with FSDP 1"),
        ({**RELEASED, "optimizer": "prodigy"}, "needs all of them at once"),
        ({"weights_dtype": "bf16"}, "this run computes in fp32"),
        ({**BF16, "optimizer": "muon"}, "weights_dtype updates parameters one after the other"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_launch(train, options, message):
    code, output, directory = train("refused", **options)
    assert (code, message in output) == (2, True), output
    assert not directory.exists()
