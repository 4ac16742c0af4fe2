"""A sharded run is the run that one process would have made: losses, weights, pictures, and what comes after a resume.

So is one in which ranks share the tokens of a picture.
"""

import pytest
import torch

from smalti.checkpoint.format.safetensors_reader import TensorFiles
from support.whole import some

SHARDED = {"fsdp_enable": True, "use_ema": True, "allow_dataset_oversubscription": True, "max_grad_norm": 0.05}
OPTIONS = {
    **SHARDED,
    "max_train_steps": 20,
    "validation_step_interval": 10,
    "validation_num_inference_steps": 2,
    "validation_base_model": True,
}
ON_CPU = {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}
PROMPTS = [f"circle number {number}" for number in range(5)]


SEVERAL = {"num_processes": 2, "use_cpu": True}
RUNS = {
    "one": {"fsdp_enable": False, "train_batch_size": 12, "validation_prompt": PROMPTS},
    "alone": {"train_batch_size": 12, "validation_prompt": PROMPTS},
    "two": {**SEVERAL, "train_batch_size": 6, "validation_prompt": PROMPTS[:3]},
    "four": {**SEVERAL, "num_processes": 4, "train_batch_size": 3, "validation_prompt": PROMPTS[:1]},
    "accumulated": {
        **SEVERAL,
        "train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "check_before_step": False,  # but read results while the next step computes, as on accelerators
        "fsdp_reshard_after_forward": False,
        "fsdp_activation_checkpointing": True,
        "validation_prompt": PROMPTS,
    },
    "compiled": {
        **SEVERAL,
        "train_batch_size": 6,
        "dynamo_backend": "aot_eager",
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_mode": "selective",
        "validation_prompt": PROMPTS[:1],
    },
    "shared": {
        **SEVERAL,
        "variables": ON_CPU,
        "train_batch_size": 12,
        "context_parallel_size": 2,
        "validation_prompt": PROMPTS,
    },
    "two by two": {
        **SEVERAL,
        "num_processes": 4,
        "variables": ON_CPU,
        "train_batch_size": 6,
        "context_parallel_size": 2,
        "context_parallel_comm_strategy": "alltoall",
        "fsdp_activation_checkpointing": True,
        "validation_prompt": PROMPTS,
    },
}
"""Twelve pictures a step, clipped, by one process and by sharded ones; with five, three, one and five prompts."""
KINDS = some([kind for kind in RUNS if kind != "one"], "two", "compiled", "shared")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    root = tmp_path_factory.mktemp("sharded")
    return {kind: train(root / kind.replace(" ", "-"), **OPTIONS | RUNS[kind]) for kind in ("one", *KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(runs, kind):
    assert runs[kind].losses == pytest.approx(runs["one"].losses, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_and_average_are_those_of_one_process(runs, kind, group):
    expected, found = runs["one"].tensors(20, group), whole(runs[kind], 20, group)
    assert expected.keys() == found.keys()
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 10, 20])
def test_pictures_are_those_of_one_process(runs, kind, step):
    from PIL import Image, ImageChops

    folders = [runs[run].directory / "samples" / f"{step:08d}" for run in ("one", kind)]
    names = sorted(path.name for path in folders[1].glob("0*.png"))
    prompts = {"two": 3, "four": 1, "compiled": 1}.get(kind, 5)
    assert len(names) == prompts
    for name in names:
        pair = [Image.open(folder / name) for folder in folders]
        assert max(high for _, high in ImageChops.difference(*pair).getextrema()) <= 1


def test_losses_of_blocks_in_bf16_alone_are_within_the_noise_of_bf16(tmp_path, train):
    options = SHARDED | {"max_train_steps": 8, "train_batch_size": 12}
    exact = train(tmp_path / "exact", **options).losses
    bf16, pure = (
        train(tmp_path / str(alone), **options, mixed_precision="bf16", fsdp_bf16_blocks=alone).losses
        for alone in (False, True)
    )
    noise, found = (max(abs(one - other) for one, other in zip(exact, losses, strict=True)) for losses in (bf16, pure))
    assert pure != bf16
    assert found < 2 * noise


def test_a_run_goes_on_over_1_2_4_3_ranks_and_1_as_if_nothing_had_happened(tmp_path, runs, train):
    directory = tmp_path / "moving"
    stages = [(4, 1), (8, 2), (12, 4), (16, 3), (20, 1)]
    for steps, ranks in stages:
        options = {**OPTIONS, "max_train_steps": steps, "validation_step_interval": 0, "num_processes": ranks, "use_cpu": True}
        # Every other stage reads on one rank only; the last is not sharded any more.
        options |= {"fsdp_cpu_ram_efficient_loading": ranks in (2, 3), "fsdp_enable": steps < 20}
        run = train(directory, **options, train_batch_size=12 // ranks)
        assert run.code == 0, run.output
    assert run.losses == pytest.approx(runs["one"].losses, rel=1e-4)


def test_two_sharded_ranks_that_were_killed_are_resumed_by_one_process_unsharded(tmp_path, runs, train, start_for_module):
    directory, options = tmp_path / "killed", {**OPTIONS, "validation_step_interval": 0, "validation_base_model": False}
    begun = {**options, "checkpoint_step_interval": 2, "max_train_steps": 100_000}
    killed = start_for_module(directory, **begun, num_processes=2, use_cpu=True, train_batch_size=6)
    killed.wait_for_step(5)
    killed.kill()
    ended = train(directory, **options | {"fsdp_enable": False}, train_batch_size=12)
    assert ended.code == 0, ended.output
    assert "resuming from" in ended.output
    assert ended.losses[-5:] == pytest.approx(runs["one"].losses[-5:], rel=1e-4)


def whole(run, step: int, group: str) -> dict:
    """A group of a checkpoint, put together from the shards of all ranks."""
    files = TensorFiles(sorted((run.directory / "checkpoints" / f"step-{step:08d}" / group).glob("*.safetensors")))
    return {
        name: torch.frombuffer(bytearray(files.read(name)), dtype=torch.float32).view(tensor.shape)
        for name, tensor in files.tensors.items()
    }
