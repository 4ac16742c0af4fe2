"""Terms of the loss over ranks: what one process trains, whoever holds the images of a term; and exactly so after `kill -9`."""

import json
import shutil
import time
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from PIL import Image, ImageDraw, ImageOps

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from support.commands import commands
from support.whole import some

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
    "dpo": {"dpo_beta": 100, "tlora_min_rank": 1, "loraplus_lr_ratio": 4},
    "images": {"slider": "images"},
    "prompts": {"slider": "prompts", "slider_positive": "a large circle", "slider_negative": "a small circle"},
    "kept": {"preserve": "class", "preserve_class": "cat", "preserve_weight": 0.5, "prior_outside_mask": 0.5},
}
EVERY = [
    *(("dpo", way) for way in ("ddp", "fsdp", "zero")),
    *(("images", way) for way in ("accumulated", "zero", "shared")),
    *(("prompts", way) for way in ("fsdp", "zero")),
    *(("kept", way) for way in ("accumulated", "zero", "shared")),
]
TRAINED = some(EVERY, ("dpo", "zero"), ("images", "shared"), ("prompts", "fsdp"), ("kept", "shared"))
ADDED = {"dpo": ["dpo"], "kept": ["preserve", "prior_outside_mask"]}
"""Terms whose data are one image of the six of each step, so on one rank alone, and there in one micro-batch alone."""


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
    """Files of datasets by kind, of six images. Sliders have a counterpart of each; one image has a worse one, or a mask."""
    folders = {name: root / name for name in ("most", "one", "others", "masks")}
    for folder in folders.values():
        folder.mkdir()
    for path in sorted(pictures.glob("*.png"))[:6]:
        for one in (path, path.with_suffix(".txt")):
            shutil.copy(one, folders["one" if path.stem == "00" else "most"])
        with Image.open(path) as image:
            ImageOps.invert(image).save(folders["others"] / path.name)
            mask = Image.new("L", image.size)
        ImageDraw.Draw(mask).ellipse((4, 4, 20, 20), fill=255)
        mask.save(folders["masks"] / path.name)
    shape = {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    most, one = ({"id": name, "instance_data_dir": str(folders[name]), **shape} for name in ("most", "one"))
    paired = {"slider_counterpart_path": str(folders["others"])}
    entries = {
        "dpo": [most, {**one, "rejected_path": str(folders["others"])}],
        "images": [{**most, **paired}, {**one, **paired}],
        "prompts": [most, one],
        "kept": [most, {**one, "mask_path": str(folders["masks"]), "trigger_word": "circle"}],
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
def ran(root, train, given):
    """ran(KIND, WAY) -> the finished run, which is made once."""

    @cache
    def once(kind, way):
        run = train(root / f"{kind}-{way}", **given(kind, way))
        assert run.code == 0, run.output
        return run

    return once


@pytest.mark.parametrize(("kind", "way"), TRAINED)
def test_losses_and_adapters_are_those_of_one_process(ran, kind, way):
    alone, found = ran(kind, "one"), ran(kind, way)
    assert found.losses == pytest.approx(alone.losses, rel=2e-5)
    expected, tensors = whole(alone), whole(found)
    assert expected.keys() == tensors.keys()
    assert max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items()) < 2e-5
    for event in found.events("step")[1:]:  # a new adapter changes nothing
        assert all(event["parts"][name] > 0 for name in ADDED.get(kind, ())), "its image is in each step"


KILLED = [
    *((kind, "one") for kind in KINDS),
    *(("dpo", "ddp"), ("images", "fsdp"), ("prompts", "fsdp"), ("kept", "zero")),
    *(("images", "shared"), ("kept", "shared")),
]


@pytest.mark.parametrize(("kind", "way"), some(KILLED, ("images", "one")))
def test_a_killed_run_ends_bit_equal_to_one_that_was_not(ran, root, train, start, given, kind, way):
    undisturbed, folder = ran(kind, way), root / f"{kind}-{way}-killed"
    options = given(kind, way) | {"checkpoint_step_interval": 1, "probe": True}
    variables = options.pop("variables", {}) | {"PROBE_SPOIL": "sleep:0:2"}
    run = start(folder, variables=variables, **options)
    while not (folder / "checkpoints/step-00000001/manifest.json").exists():
        assert run.process.poll() is None, run.wait()
        time.sleep(0.05)
    run.kill()
    resumed = train(folder, **given(kind, way))
    assert (resumed.code, "at step 1" in resumed.output) == (0, True), resumed.output
    expected, found = whole(undisturbed), whole(resumed)
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    assert resumed.losses[-2:] == undisturbed.losses[-2:]


OUTSIDE = {
    "preference": ({"dpo_beta": 100}, {"pair_beta": 100}),
    "slider": (
        {**KINDS["prompts"], "slider_guidance": 1.0, "slider_rescale": False},
        {"towards": "a large circle", "away_from": "a small circle"},
    ),
}


@pytest.mark.parametrize("package", some(OUTSIDE, "preference"))
def test_a_package_of_a_third_party_trains_what_this_one_does(root, train, given, datasets, package, tmp_path):
    """Each takes public names alone, without this repository's own terms, in less than 200 lines."""
    folder, found = Path(__file__).parent / "outside", []
    assert len((folder / f"outside_{package}.py").read_text().splitlines()) < 200
    entries = tmp_path / "datasets.json"
    for number, settings in enumerate(OUTSIDE[package]):
        kind = "dpo" if package == "preference" else "prompts"
        named = datasets[kind].read_text()
        entries.write_text(named.replace("rejected_path", "worse_path") if number else named)
        own = {name: value for name, value in given(kind, "one").items() if name not in KINDS[kind]}
        more = {"variables": {"PYTHONPATH": str(folder)}} if number else {}
        run = train(tmp_path / f"run-{number}", **own | settings | more | {"data_backend_config": entries})
        assert run.code == 0, run.output
        found.append(run)
    expected, tensors = (whole(run) for run in found)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-6)
    assert max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-6


def test_an_exported_slider_moves_predictions_one_way_and_the_other(ran, root, capsys, tmp_path):
    """In diffusers, in fp64, by what was trained."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    run = ran("prompts", "one")
    code, _, error = commands(capsys, "checkpoint", "export")(run.directory, "--to", tmp_path / "slider")
    assert code == 0, error
    pipeline = StableDiffusion3Pipeline.from_pretrained(root / "base", dtype=torch.float64)
    pipeline.load_lora_weights(tmp_path / "slider", adapter_name="slider")
    plain = SD3Transformer2DModel.from_pretrained(root / "base" / "transformer", dtype=torch.float64)
    matrices, random = run.tensors(STEPS, "model"), torch.Generator().manual_seed(1)
    sizes = plain.config
    shapes = (1, sizes.in_channels, 4, 4), (1, 5, sizes.joint_attention_dim), (1, sizes.pooled_projection_dim)
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]

    @torch.no_grad()
    def predicted(model):
        noisy, texts, pooled = inputs
        given = {"encoder_hidden_states": texts, "pooled_projections": pooled, "timestep": torch.tensor([400.0]).double()}
        return model(hidden_states=noisy, **given).sample

    base, moved = predicted(plain), []
    for strength in (1.0, -1.0):
        with torch.no_grad():
            changes = {
                name.removesuffix(".lora_A.default.weight"): matrices[name.replace("lora_A", "lora_B")].double() @ down.double()
                for name, down in matrices.items()
                if ".lora_A." in name
            }
            for layer, change in changes.items():
                plain.get_submodule(layer).weight += strength * change
            expected = predicted(plain)
            for layer, change in changes.items():
                plain.get_submodule(layer).weight -= strength * change
        pipeline.set_adapters("slider", strength)
        moved.append(predicted(pipeline.transformer) - base)
        torch.testing.assert_close(base + moved[-1], expected, rtol=0, atol=1e-9)
    up, down = moved
    assert float(up.norm()) > 1e-4 * float(base.norm())
    assert float((up * down).sum() / up.norm() / down.norm()) < -0.9
