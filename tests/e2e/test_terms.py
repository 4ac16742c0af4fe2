"""Sliders and preferences over ranks: what one process trains, whoever holds the pairs; killed and resumed to the bit.

A slider, once exported, moves predictions one way at a positive strength, and the other way at a negative one.
"""

import json
import shutil

import pytest
import tiny
import torch
from click.testing import CliRunner
from PIL import Image, ImageOps

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti_export.command import export as export_command

STEPS = 3
OPTIONS = {
    "model_family": "sd3",
    "model_type": "lora",
    "lora_rank": 4,
    "mixed_precision": "no",
    "resolution": 16,
    "resolution_type": "pixel",
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # else Adam makes a whole step of a rounding error
    "tokenizer_max_length": 32,
    "vae_cache_disable": True,
    "max_train_steps": STEPS,
    "instance_data_dir": None,
    "allow_dataset_oversubscription": True,
    "probe": False,
}
ZERO = {"deepspeed_config": json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})}
SHARDED = {"fsdp_enable": True, "fsdp_activation_checkpointing": True}
WAYS = {
    "one": {"train_batch_size": 6, "use_cpu": True},
    "ddp": {"train_batch_size": 2, "num_processes": 3, "use_cpu": True},
    "fsdp": {"train_batch_size": 3, "num_processes": 2, "use_cpu": True, **SHARDED},
    "accumulated": {"train_batch_size": 1, "gradient_accumulation_steps": 3, "num_processes": 2, "use_cpu": True, **SHARDED},
    "zero": {"train_batch_size": 3, "num_processes": 2, "use_cpu": True, **ZERO},
    "shared": {"train_batch_size": 6, "num_processes": 2, "use_cpu": True, "context_parallel_size": 2, "fsdp_enable": True},
}
KINDS = {
    "dpo": {"dpo_beta": 100},
    "images": {"slider": "images"},
    "prompts": {"slider": "prompts", "slider_positive": "a large circle", "slider_negative": "a small circle"},
}
TRAINED = [
    *(("dpo", way) for way in ("ddp", "fsdp", "zero")),
    *(("images", way) for way in ("accumulated", "zero", "shared")),
    ("prompts", "ddp"),
]


def whole(run) -> dict[str, torch.Tensor]:
    """Whole tensors of the adapter after the last step, whoever wrote it."""
    files = TensorFiles(sorted((run.directory / "checkpoints" / f"step-{STEPS:08d}" / "model").glob("*.safetensors")))
    return {name: torch.frombuffer(bytearray(files.read(name)), dtype=torch.float32) for name in files.tensors}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terms")
    tiny.sd3(folder / "base")
    return folder


@pytest.fixture(scope="module")
def datasets(root, pictures):
    """Files of datasets by kind: of preferences, a quarter of the images has a worse one, so some ranks have none in a step."""
    (root / "others").mkdir()
    (root / "few").mkdir()
    for path in sorted(pictures.glob("*.png")):
        with Image.open(path) as image:
            ImageOps.invert(image).save(root / "others" / path.name)
        if int(path.stem) % 4 == 0:
            for one in (path, path.with_suffix(".txt")):
                shutil.copy(one, root / "few")
    shape = {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    whole = {"id": "all", "instance_data_dir": str(pictures), **shape}
    few = {"id": "few", "instance_data_dir": str(root / "few"), "rejected_path": str(root / "others"), **shape}
    entries = {
        "dpo": [whole, few],
        "images": [{**whole, "slider_counterpart_path": str(root / "others")}],
        "prompts": [whole],
    }
    for kind, found in entries.items():
        (root / f"{kind}.json").write_text(json.dumps(found))
    return {kind: root / f"{kind}.json" for kind in entries}


@pytest.fixture(scope="module")
def given(root, datasets):
    """The options of a kind of run."""

    def options(kind, way):
        named = {"pretrained_model_name_or_path": root / "base", "cache_dir": root / "cache"}
        found = {**OPTIONS, **named, **KINDS[kind], **WAYS[way], "data_backend_config": datasets[kind]}
        return found | ({"variables": {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}} if way == "shared" else {})

    return options


@pytest.fixture(scope="module")
def runs(root, train, given):
    found = {}
    for kind, way in (*((kind, "one") for kind in KINDS), *TRAINED):
        found[kind, way] = train(root / f"{kind}-{way}", **given(kind, way))
        assert found[kind, way].code == 0, found[kind, way].output
    return found


@pytest.mark.parametrize(("kind", "way"), TRAINED)
def test_losses_and_adapters_are_those_of_one_process(runs, kind, way):
    alone, found = runs[kind, "one"], runs[kind, way]
    assert found.losses == pytest.approx(alone.losses, rel=2e-5)
    expected, tensors = whole(alone), whole(found)
    assert expected.keys() == tensors.keys()
    assert max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items()) < 2e-5


def test_a_slider_that_was_killed_between_its_turns_ends_bit_equal(root, runs, given, train, start_for_module):
    options = {**given("images", "accumulated"), "checkpoint_step_interval": 1, "checkpoint_async": False}
    endless = {key: value for key, value in options.items() if key != "probe"} | {"max_train_steps": 100_000}
    begun = start_for_module(root / "killed", **endless, checkpoints_total_limit=0)
    begun.wait_for_step(STEPS, seconds=200)
    begun.kill()
    for saved in (root / "killed" / "checkpoints").glob("step-*"):
        if saved.name > f"step-{STEPS - 1:08d}":
            shutil.rmtree(saved)
    resumed = train(root / "killed", **options)
    assert resumed.code == 0, resumed.output
    assert "resuming from" in resumed.output
    expected, found = whole(runs["images", "accumulated"]), whole(resumed)
    assert resumed.losses[-1] == runs["images", "accumulated"].losses[-1]
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("kind", ["images", "prompts"])
def test_an_exported_slider_works_both_ways(root, runs, kind):
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    folder = root / f"exported-{kind}"
    done = CliRunner().invoke(export_command, [str(runs[kind, "one"].directory), "--to", str(folder)])
    assert done.exit_code == 0, done.output
    transformer = SD3Transformer2DModel.from_pretrained(root / "base", subfolder="transformer")
    state = StableDiffusion3Pipeline.lora_state_dict(folder)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 64, generator=generator),
        "pooled_projections": torch.randn(1, 64, generator=generator),
        "timestep": torch.tensor([500.0]),
    }
    with torch.no_grad():
        base = transformer(**inputs, return_dict=False)[0]
        transformer.load_lora_adapter(state, adapter_name="slider")
        moved = {}
        for strength in (1.0, -1.0):
            transformer.set_adapters("slider", strength)
            moved[strength] = (transformer(**inputs, return_dict=False)[0] - base).flatten()
    cosine = torch.nn.functional.cosine_similarity(moved[1.0], moved[-1.0], dim=0)
    assert moved[1.0].norm() > 1e-4
    assert cosine < -0.9
