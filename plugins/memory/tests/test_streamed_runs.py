"""Runs of a tiny Flux with its base in host memory: losses and adapters of a resident one, resumed; what is refused."""

import pytest
import tiny

from support.alike import assert_alike, losses
from support.images import images_in
from support.warm_processes import warm_processes
from support.whole import only_whole, some

STEPS = 4


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, option=value, ...) -> exit code, output, and the directory, of a LoRA in two processes."""
    root = tmp_path_factory.mktemp("streamed")
    common = {
        "model_family": "flux",
        "model_type": "lora",
        "lora_rank": 4,
        "pretrained_model_name_or_path": tiny.flux(root / "base"),
        "instance_data_dir": images_in(root / "images", 8, (16, 16)),
        "cache_dir": root / "cache",
        "resolution": 16,
        "resolution_type": "pixel",
        "train_batch_size": 2,
        "mixed_precision": "no",
        "learning_rate": 1e-2,
        "max_train_steps": STEPS,
        "checkpoint_step_interval": 0,
        "validation_prompt": "a square",
        "validation_num_inference_steps": 2,
        "gradient_checkpointing": True,
        "num_processes": 2,
        "use_cpu": True,
    }

    def run(name, **options):
        words = [f"--{key}={value}" for key, value in {**common, "output_dir": root / name, **options}.items()]
        return *warm_processes().train(words, {"HF_HOME": str(root / "hf")}), root / name

    return run


@pytest.fixture(scope="module")
def resident(train):
    code, output, directory = train("resident")
    assert code == 0, output
    return directory


def test_a_streamed_run_is_the_resident_run_bit_for_bit(train, resident):
    code, output, directory = train("streamed", stream_base=True)
    assert code == 0, output
    assert_alike(directory, resident, STEPS)


@only_whole("plugins/memory/tests/test_streamed_runs.py::test_a_streamed_run_is_the_resident_run_bit_for_bit")
def test_so_is_one_that_began_resident_with_part_of_the_blocks_streamed_after_resuming(train, resident):
    code, output, directory = train("resumed", max_train_steps=2)
    assert code == 0, output
    code, output, directory = train("resumed", stream_base=True, resident_gib=1e-5, pinned_gib=1e-5)
    assert code == 0, output
    assert_alike(directory, resident, STEPS)


ADAPTERS = [("dora", "no_change"), ("lokr", "int8-rowwise"), ("loha", "int8-rowwise")]


@pytest.mark.parametrize(("kind", "precision"), some(ADAPTERS, ADAPTERS[1]))
def test_so_are_those_of_other_kinds_of_adapters_over_a_quantised_base_too(train, kind, precision):
    """But a DoRA, which goes with no quantised base."""
    common = {"lora_kind": kind, "base_model_precision": precision, "num_processes": 1, "validation_step_interval": 0}
    directories = []
    for streamed in (False, True):
        code, output, directory = train(f"{kind}-{streamed}", **common, max_train_steps=2, stream_base=streamed)
        assert code == 0, output
        directories.append(directory)
    assert_alike(*directories, 2)


SHARDED = {"fsdp_enable": True, "gradient_checkpointing": False, "fsdp_activation_checkpointing": True}


@pytest.fixture(scope="module")
def sharded(train):
    code, output, directory = train("sharded", **SHARDED)
    assert code == 0, output
    return directory


def test_a_sharded_run_that_goes_on_streamed_is_the_resident_one_bit_for_bit(train, sharded):
    """One block of four stays on the device, and most of the others are pages of a file."""
    code, output, directory = train("sharded resumed", **SHARDED, max_train_steps=2)
    assert code == 0, output
    code, output, directory = train("sharded resumed", **SHARDED, stream_base=True, resident_gib=4e-6, pinned_gib=1e-5)
    assert code == 0, output
    assert_alike(directory, sharded, STEPS)


def test_a_streamed_sharded_run_goes_on_in_one_process_and_back(train, sharded):
    both = {"stream_base": True, "max_train_steps": 2}
    code, output, directory = train("back", **SHARDED, **both)
    assert code == 0, output
    assert losses(directory) == losses(sharded)[:2]
    alone = {"num_processes": 1, "train_batch_size": 4, "max_train_steps": 3}
    code, output, directory = train("back", **both | alone)
    assert code == 0, output
    code, output, directory = train("back", **SHARDED)
    assert code == 0, output
    assert losses(directory) == pytest.approx(losses(sharded), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "full"}, "stream_base needs weights that do not train"),
        ({"gradient_checkpointing": False}, "stream_base needs gradient_checkpointing"),
        ({"fsdp_enable": True, "fsdp_cpu_offload": True}, "fsdp_cpu_offload keeps all shards there"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_the_launch(train, options, message):
    code, output, directory = train("refused", stream_base=True, **options)
    assert (code, message in output) == (2, True), output
    assert not directory.exists()
