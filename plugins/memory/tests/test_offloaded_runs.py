"""Runs with activations in host memory, on two real ranks: the losses and weights of a run without it, for each strategy."""

import pytest

from smalti_memory import activations
from support.alike import assert_alike, losses
from support.images import images_in
from support.warm_processes import warm_processes
from support.whole import some

STEPS, BATCH, WIDTH, RESOLUTION, PATCH = 3, 2, 64, 64, 4
STRATEGIES = {
    "ddp": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "fsdp2": {"fsdp_enable": True, "fsdp_activation_checkpointing": True},
    "fsdp2, outside of blocks": {"fsdp_enable": True, "gradient_checkpointing": True},
    "zero 2": {"deepspeed_config": '{"zero_optimization": {"stage": 2}}', "gradient_checkpointing": True},
    "zero 3": {"deepspeed_config": '{"zero_optimization": {"stage": 3}}', "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, option=value, ...) -> exit code, output, and the directory, of a model in two processes."""
    root = tmp_path_factory.mktemp("offloaded")
    common = {
        "model_family": "toy",
        "toy_width": WIDTH,
        "toy_depth": 4,
        "toy_heads": 2,
        "toy_patch": PATCH,
        "instance_data_dir": images_in(root / "images", 8, (RESOLUTION, RESOLUTION)),
        "resolution": RESOLUTION,
        "resolution_type": "pixel",
        "train_batch_size": BATCH,
        "mixed_precision": "no",
        "max_train_steps": STEPS,
        "checkpoint_step_interval": 0,
        "num_processes": 2,
        "use_cpu": True,
    }

    def run(name, **options):
        words = [f"--{key}={value}" for key, value in {**common, "output_dir": root / name, **options}.items()]
        return *warm_processes().train(words, {}), root / name

    return run


@pytest.mark.parametrize("strategy", some(STRATEGIES, "ddp", "fsdp2", "zero 2"))
def test_a_run_with_activations_in_host_memory_is_the_run_without_bit_for_bit(train, strategy):
    assert BATCH * (RESOLUTION // PATCH) ** 2 * WIDTH * 4 >= activations._LEAST, "inputs of blocks are worth a copy"
    directories = []
    for name, more in ((strategy, {}), (f"{strategy}, offloaded", {"offload_activations": True})):
        code, output, directory = train(name, **STRATEGIES[strategy], **more)
        assert code == 0, output
        directories.append(directory)
    assert len(losses(directories[0])) == STEPS
    assert_alike(*directories, STEPS)


def test_a_run_that_keeps_all_activations_is_refused(train):
    code, output, directory = train("refused", offload_activations=True)
    assert (code, "offload_activations needs recomputation" in output) == (2, True), output
    assert not directory.exists()
