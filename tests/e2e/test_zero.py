"""A run under ZeRO is the run that one process would have made: losses, weights, average, pictures; any other can end it.

So is one that trains an adapter. The example of SD3 goes all the way: it is begun, killed, ended under FSDP, and exported.
"""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti_export.command import export as export_command
from support.whole import some

EXAMPLE = Path(__file__).parents[2] / "examples" / "sd3-zero2-offload.toml"
TWO = {"num_processes": 2, "use_cpu": True, "allow_dataset_oversubscription": True}
PROMPTS = [f"circle number {number}" for number in range(3)]


def zero(stage: int) -> dict[str, str]:
    """All parameters cut."""
    return {"deepspeed_config": json.dumps({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})}


def whole(run, step: int, group: str) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, whoever wrote it."""
    files = TensorFiles(sorted((run.directory / "checkpoints" / f"step-{step:08d}" / group).glob("*.safetensors")))
    return {name: torch.frombuffer(bytearray(files.read(name)), dtype=torch.float32) for name in files.tensors}


def apart(one, other, step: int, group: str) -> float:
    """The largest difference between the same tensors of two runs."""
    expected, found = whole(one, step, group), whole(other, step, group)
    assert expected.keys() == found.keys()
    return max(float((expected[name] - found[name]).abs().max()) for name in expected)


def pictures_apart(one, other, step: int, number: int) -> int:
    """The largest difference between the same pictures of two runs, in 255ths."""
    from PIL import Image, ImageChops

    pair = [
        Image.open(sorted((run.directory / "samples" / f"{step:08d}").glob(f"{number:02d}-*.png"))[0]) for run in (one, other)
    ]
    return max(high for _, high in ImageChops.difference(*pair).getextrema())


# --- all weights ----------------------------------------------------------------------------------------------------

OPTIONS = {
    "use_ema": True,
    "max_grad_norm": 0.05,
    "max_train_steps": 20,
    "validation_prompt": PROMPTS,
    "validation_num_inference_steps": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    """Twenty steps by one process, and by two under ZeRO 3, in micro-batches."""
    root = tmp_path_factory.mktemp("zero")
    return {
        "one": train(root / "one", **OPTIONS, train_batch_size=12, allow_dataset_oversubscription=True),
        "zero": train(root / "zero", **OPTIONS, **TWO, **zero(3), train_batch_size=3, gradient_accumulation_steps=2),
    }


def test_losses_are_those_of_one_process(runs):
    assert runs["zero"].code == 0, runs["zero"].output
    assert runs["zero"].losses == pytest.approx(runs["one"].losses, rel=1e-5)


@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_and_average_are_those_of_one_process(runs, group):
    assert apart(runs["one"], runs["zero"], 20, group) < 2e-5


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_pictures_are_those_of_one_process(runs, number):
    assert pictures_apart(runs["one"], runs["zero"], 20, number) <= 1


# --- the example ----------------------------------------------------------------------------------------------------

SMALL = {
    "mixed_precision": "no",
    "resolution": 16,
    "resolution_type": "pixel",
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,  # else Adam makes a whole step of a rounding error
    "tokenizer_max_length": 32,
    "use_ema": True,
    "validation_num_inference_steps": 2,
    "without": "plots",
    "probe": False,
}
ALONE = {"deepspeed_config": "none", "num_processes": 1, "use_cpu": True, "train_batch_size": 4}
STEPS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny SD3."""
    return tiny.sd3(tmp_path_factory.mktemp("example") / "base")


@pytest.fixture(scope="module")
def example(base, train, start_for_module):
    """The example by one process; and as it stands, killed, and ended under FSDP."""
    root = base.parent
    named = {"config": EXAMPLE, "pretrained_model_name_or_path": base, "cache_dir": root / "cache"}
    drawn = {**SMALL, **named, "validation_prompt": PROMPTS[:1], "validation_step_interval": 4, "validation_base_model": True}
    alone = train(root / "alone", **drawn, **ALONE, max_train_steps=STEPS, allow_dataset_oversubscription=True)
    endless = {"max_train_steps": 100_000, "checkpoint_step_interval": 2, "checkpoint_async": False}
    given = {key: value for key, value in drawn.items() if key != "probe"}
    begun = start_for_module(root / "run", **given, **TWO, **endless, train_batch_size=2)
    begun.wait_for_step(3, seconds=300)  # DeepSpeed may have to compile its Adam first
    begun.kill()
    sharded = {"deepspeed_config": "none", "fsdp_enable": True, "train_batch_size": 2, "max_train_steps": STEPS}
    return {"alone": alone, "ended": train(root / "run", **drawn, **TWO, **sharded)}


def test_what_the_example_began_is_ended_under_fsdp_as_one_process_would_have(example):
    assert example["ended"].code == 0, example["ended"].output
    assert "resuming from" in example["ended"].output
    assert example["ended"].losses[-2:] == pytest.approx(example["alone"].losses[-2:], rel=1e-4)
    assert max(apart(example["alone"], example["ended"], STEPS, group) for group in ("model", "ema")) < 1e-4


@pytest.mark.parametrize("step", [0, 4, STEPS])
def test_the_example_draws_what_one_process_draws(example, step):
    assert pictures_apart(example["alone"], example["ended"], step, 0) <= 2


def export(run, target: Path) -> Path:
    done = CliRunner().invoke(export_command, [str(run.directory), "--to", str(target), "--ema"])
    assert done.exit_code == 0, done.output
    return target


def test_the_example_is_exported_as_a_pipeline(example, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(export(example["ended"], tmp_path / "pipeline"))
    trained = whole(example["ended"], STEPS, "ema")
    found = pipeline.transformer.state_dict()
    assert [name for name, tensor in trained.items() if not torch.equal(found[name].flatten(), tensor)] == []


# --- adapters -------------------------------------------------------------------------------------------------------

LORA = {
    **SMALL,
    "model_family": "sd3",
    "model_type": "lora",
    "lora_rank": 4,
    "learning_rate": 5e-2,
    "max_train_steps": 2,
    "checkpoint_step_interval": 1,
    "validation_prompt": PROMPTS[:1],
    "validation_step_interval": 2,
}


STAGES = some([1, 2, 3], 2, 3)


@pytest.fixture(scope="module")
def adapters(base, train):
    """Two steps by one process and under each of the stages; and one under ZeRO 1 after the first one under ZeRO 3."""
    root = base.parent
    named = {"pretrained_model_name_or_path": base, "cache_dir": root / "cache"}
    found = {"one": train(root / "lora", **LORA, **named, **ALONE)}
    for stage in STAGES:
        found[f"zero {stage}"] = train(root / f"lora-{stage}", **LORA, **named, **TWO, **zero(stage), train_batch_size=2)
    first = Path("checkpoints", "step-00000001")
    assert found["zero 3"].code == 0, found["zero 3"].output
    shutil.copytree(root / "lora-3" / first, root / "lora-moved" / first)
    found["moved"] = train(root / "lora-moved", **LORA, **named, **TWO, **zero(1), train_batch_size=2)
    return found


@pytest.mark.parametrize("kind", [*(f"zero {stage}" for stage in STAGES), "moved"])
def test_an_adapter_is_that_of_one_process(adapters, kind):
    assert adapters[kind].code == 0, adapters[kind].output
    assert adapters[kind].losses[-1] == pytest.approx(adapters["one"].losses[-1], rel=1e-5)
    assert max(apart(adapters["one"], adapters[kind], 2, group) for group in ("model", "ema")) < 1e-5


@pytest.mark.parametrize("kind", [f"zero {stage}" for stage in STAGES])
def test_two_ranks_draw_one_picture_with_an_adapter(adapters, kind):
    assert pictures_apart(adapters["one"], adapters[kind], 2, 0) <= 2


def test_an_adapter_goes_on_in_another_stage(adapters):
    assert [event["step"] for event in adapters["moved"].events("step")] == [2]


def test_an_adapter_is_exported_as_that_of_one_process(adapters, tmp_path):
    one, other = (
        load_file(export(adapters[kind], tmp_path / kind) / "pytorch_lora_weights.safetensors") for kind in ("one", "zero 3")
    )
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-5
