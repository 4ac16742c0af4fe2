"""What is said when memory runs out: what filled it, and what would help by how much."""

from dataclasses import replace

import pytest

from smalti_plan.memory_use import MemoryUse, amounts, out_of_memory_message, remedies

GIB = 2**30
SAID = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which 512.00 MiB is free. "
    "Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is allocated by "
    "PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)
OPTIONS = {
    "gradient_checkpointing": False,
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "ema_device": "accelerator",
    "model_type": "full",
}
USE = MemoryUse(
    device="cuda:1",
    phase="backward pass",
    requested=2 * GIB,
    images=4,
    size="1024x1024",
    weights=10 * GIB,
    gradients=10 * GIB,
    optimizer_state=20 * GIB,
    ema=10 * GIB,
    allocated=74 * GIB,
    idle=GIB,
    total=80 * GIB,
    recomputes=True,
    options=OPTIONS,
)


def test_what_torch_says_of_its_memory_is_read():
    found = {name: round(size / GIB, 2) for name, size in amounts(SAID).items()}
    assert found == {"requested": 22.78, "total": 31.47, "allocated": 9.08, "idle": 9.35}


def test_what_the_allocator_of_the_host_says_is_read():
    said = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    assert amounts(said) == {"requested": 4096}


def test_memory_is_told_by_what_it_is_used_for_and_activations_are_the_rest():
    lines = out_of_memory_message(USE).splitlines()
    assert lines[0] == ("out of memory on cuda:1: no room for 2.00 GiB more in the backward pass, with 4 images of 1024x1024")
    assert "    optimizer state           20.00 GiB" in lines
    assert "    activations and all else  24.00 GiB" in lines


def test_what_a_first_step_has_not_made_yet_is_told():
    use = replace(USE, gradients=0, optimizer_state=0)
    assert "10.00 GiB of gradients, and then the optimizer state" in out_of_memory_message(use)


def test_what_saves_most_comes_first_with_what_it_saves():
    assert [line.strip() for line in remedies(USE).splitlines()] == [
        "any of these",
        "--gradient_checkpointing: saves most of 24.00 GiB, steps take about a third longer",
        "--train_batch_size=2 --gradient_accumulation_steps=4: saves about 12.00 GiB, and the effective batch stays",
        "--ema_device=cpu: saves 10.00 GiB, each step copies the weights to the host",
    ]


@pytest.mark.parametrize(
    ("changes", "more", "advice"),
    [
        ({"ranks": 4}, {"fsdp_enable": False}, "--fsdp_enable: shards the state over 4 ranks, saves 37.50 GiB on each"),
        ({}, {"fsdp_enable": False}, "--fsdp_enable --num_processes=N: shards 50.00 GiB of state over N devices"),
        ({"replicated": False}, {"fsdp_enable": True, "fsdp_cpu_offload": False}, "--fsdp_cpu_offload: saves up to 40.00 GiB"),
        (
            {"replicated": False},
            {"fsdp_enable": True, "fsdp_activation_checkpointing": False},
            "--fsdp_activation_checkpointing: saves most of 24.00 GiB",
        ),
        (
            {"frozen": 8 * GIB},
            {"model_type": "lora", "base_model_precision": "no_change"},
            "--base_model_precision=int8-torchao: saves up to 4.00 GiB of frozen weights",
        ),
        (
            {"frozen": 8 * GIB},
            {"model_type": "lora", "base_model_precision": "no_change"},
            "--base_model_precision=nf4-torchao: saves up to 6.00 GiB of frozen weights",
        ),
        (
            {},
            {"gradient_checkpointing": True, "offload_activations": False},
            "--offload_activations: inputs of blocks wait in host memory",
        ),
        ({}, {"lora_rank": 16}, "--model_type=lora: trains an adapter, saves almost all of 40.00 GiB"),
        ({"idle": 9 * GIB}, {}, "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: 9.00 GiB lie idle in pieces"),
        ({}, {"train_batch_size": 3}, "--train_batch_size=1 --gradient_accumulation_steps=6: saves about 16.00 GiB"),
        ({}, {"optimizer": "adamw"}, "--optimizer=adamw8bit: saves 15.00 GiB of optimizer state"),
        ({"optimizer_state": 0}, {"optimizer": "adamw"}, "--optimizer=adamw8bit: saves 15.00 GiB of optimizer state"),
        ({"phase": "evaluation"}, {"validation_batch_size": 8}, "--validation_batch_size=4: saves about half"),
    ],
)
def test_what_helps_depends_on_the_run(changes, more, advice):
    assert advice in remedies(replace(USE, **changes, options=OPTIONS | more))


@pytest.mark.parametrize(("fit", "offered"), [(None, "--fit=85GB: "), ("80GB", "--fit=77GB: ")])
def test_a_limit_of_the_size_of_the_card_is_offered_last_and_a_smaller_one_where_it_was_too_much(fit, offered):
    assert remedies(replace(USE, options=OPTIONS | {"fit": fit})).splitlines()[-1].strip().startswith(offered)


@pytest.mark.parametrize(
    ("changes", "more", "advice"),
    [
        ({}, {"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"recomputes": False}, {}, "gradient_checkpointing"),
        ({}, {"offload_activations": False}, "offload_activations"),
        ({}, {"train_batch_size": 1}, "train_batch_size"),
        ({"phase": "optimizer step"}, {}, "train_batch_size"),
        ({}, {"ema_device": "cpu"}, "ema_device"),
        ({}, {"optimizer": "adamw", "deepspeed_config": "zero2.json"}, "adamw8bit"),
        ({}, {"optimizer": "adamw", "fsdp_enable": True, "fsdp_version": 1}, "adamw8bit"),
        ({}, {"optimizer": "lion"}, "adamw8bit"),
        ({"idle": 9 * GIB, "expandable": True}, {}, "expandable"),
        ({"device": "cpu"}, {"fit": None}, "--fit"),
        ({"total": None}, {"fit": None}, "--fit"),
    ],
)
def test_what_is_done_already_or_would_not_help_is_not_advised(changes, more, advice):
    assert advice not in remedies(replace(USE, **changes, options=OPTIONS | more))


def test_where_nothing_is_left_to_do_the_answer_says_so():
    assert remedies(MemoryUse(device="cpu", phase="building of the run")) == "a device with more memory"
