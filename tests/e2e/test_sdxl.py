"""The published way to train SDXL, on a tiny one: sharded over two processes, killed, resumed, equal to one process."""

import re
from pathlib import Path

import pytest
import tiny

from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = (
    "--model_type=full",
    "--model_family=sdxl",
    "--output_dir=runs/sdxl",
    "--instance_data_dir=photos",
    "--max_train_steps=1000",
    "--fsdp_enable",
    "--fsdp_version=2",
    "--fsdp_state_dict_type=SHARDED_STATE_DICT",
    "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
    "--num_processes=2",
)
SMALL = {
    "use_cpu": True,
    "mixed_precision": "no",
    "resolution": 64,
    "max_train_steps": 6,
    "learning_rate": 1e-3,
    "train_batch_size": 2,
    "checkpoint_step_interval": 2,
    "validation_prompt": ["circle number 1", "circle number 2"],
    "validation_step_interval": 4,
    "validation_num_inference_steps": 2,
}
ALONE = {"num_processes": 1, "fsdp_enable": False, "train_batch_size": 4}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SMALL | {"pretrained_model_name_or_path": tiny.sdxl(tmp_path_factory.mktemp("sdxl"))}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, train, small):
    return train(tmp_path_factory.mktemp("alone") / "run", config=EXAMPLES / "sdxl-fsdp2.toml", probe=False, **small | ALONE)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, start_for_module, launch, small):
    """A run that was killed after its third step, at its end."""
    directory = tmp_path_factory.mktemp("sharded") / "run"
    saved_at_once = small | {"checkpoint_async": False}  # else it may be killed before anything is saved
    run = start_for_module(directory, config=EXAMPLES / "sdxl-fsdp2.toml", **saved_at_once)
    run.wait_for_step(3)
    run.kill()
    anew = small | {"cache_dir": directory.with_name("cache")}  # so that it encodes, and says all that a run can say
    return launch(directory, config=EXAMPLES / "sdxl-fsdp2.toml", probe=False, **anew)


def test_the_example_is_the_command_line():
    schema = schema_of(load_plugins(Selection(only=("fsdp2", "diffusers"))))
    file = resolve(schema, file=EXAMPLES / "sdxl-fsdp2.toml", environment={})
    assert file.values() == resolve(schema, FLAGS, environment={}).values()


def test_a_killed_run_resumes_and_ends(resumed):
    assert resumed.code == 0, resumed.output
    assert "resuming from" in resumed.output


def losses(run):
    """By step; of what was trained twice, the last."""
    return {event["step"]: event["loss"] for event in run.events("step")}


def test_losses_are_those_of_one_process_unsharded(resumed, alone):
    assert alone.code == 0, alone.output
    assert losses(resumed) == pytest.approx(losses(alone), rel=1e-4)


def test_pictures_are_drawn(resumed):
    names = sorted(path.name for path in (resumed.directory / "samples" / "00000004").glob("*.png"))
    assert names == ["00-circle-number-1.png", "01-circle-number-2.png", "grid.png"]


def test_nothing_of_the_libraries_reaches_the_terminal(resumed):
    ours = re.compile(r"smalti: |  |step |sdxl on |timesteps: |checkpoint of |resuming from |\d+ images? of |$")
    assert [line for line in resumed.output.splitlines() if not ours.match(line)] == []
