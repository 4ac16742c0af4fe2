"""A run that stops and goes on is the run that never stopped."""

import json
from shutil import copyfile, copytree

import pytest
import torch

from smalti_validation.png import image_settings

OPTIONS = {"max_train_steps": 12, "train_batch_size": 4, "use_ema": True, "lr_scheduler": "cosine", "lr_warmup_steps": 3}

COMPARED = {"validation_base_model": True, "validation_prompt": ["circle number 1"], "validation_resolution": "16"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    """Twelve steps in one go, and the same with a stop after five."""
    root = tmp_path_factory.mktemp("resume")
    whole = train(root / "whole", **OPTIONS)
    stopped = train(root / "stopped", spoil="stop:0:5", **OPTIONS, **COMPARED)
    stopped_losses = stopped.losses
    resumed = train(root / "stopped", **OPTIONS, **COMPARED)
    return whole, (stopped, stopped_losses), resumed


def test_a_stop_that_a_plugin_asks_for_is_saved_and_ends_well(runs):
    _, (stopped, losses), _ = runs
    assert (stopped.code, len(losses)) == (7, 5)


def test_a_resumed_run_has_the_same_losses_as_one_that_was_not_stopped(runs):
    whole, _, resumed = runs
    assert resumed.losses == whole.losses


@pytest.mark.parametrize("group", ["model", "optimizer", "ema"])
def test_a_resumed_run_ends_bit_equal(runs, group):
    whole, _, resumed = runs
    expected, found = whole.tensors(12, group), resumed.tensors(12, group)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_model_before_training_is_sampled_once(runs):
    _, _, resumed = runs
    assert [event["step"] for event in resumed.events("sample")] == [0, 12]
    (image,) = resumed.events("sample")[1]["images"]
    assert image["base"] == "samples/00000000/00-circle-number-1.png"
    folders = sorted((resumed.directory / "samples").iterdir())
    before, after = (image_settings(folder / "00-circle-number-1.png") for folder in folders)
    assert (before.pop("step"), after.pop("step")) == ("0", "12")
    assert before == after
    assert (
        folders[0].joinpath("00-circle-number-1.png").read_bytes() != folders[1].joinpath("00-circle-number-1.png").read_bytes()
    )


def test_weights_that_are_gone_cannot_be_sampled_with_other_settings(runs, train, tmp_path):
    _, _, resumed = runs
    directory = copytree(resumed.directory, tmp_path / "run")
    options = {**OPTIONS, **COMPARED, "max_train_steps": 13, "validation_prompt": ["circle number 1", "circle number 2"]}
    again = train(directory, **options)
    assert again.code == 0, again.output
    assert "1 images of the base model are not compared" in again.output
    images = again.events("sample")[-1]["images"]
    assert [image.get("base") for image in images] == ["samples/00000000/00-circle-number-1.png", None]


def test_a_finished_run_says_so_when_it_is_started_again(runs, train):
    whole, _, _ = runs
    again = train(
        whole.directory, max_train_steps=12, train_batch_size=4, use_ema=True, lr_scheduler="cosine", lr_warmup_steps=3
    )
    assert "already at step 12 of 12" in again.output


def test_a_run_with_another_effective_batch_is_not_continued(runs, train):
    whole, _, _ = runs
    again = train(whole.directory, max_train_steps=20, train_batch_size=8, use_ema=True)
    assert again.code == 8
    assert "the effective batch was 4, is now 8 (1 rank x 8 x 1)\n" in again.output
    assert "fix: --train_batch_size=4; or start a new run" in again.output


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"train_batch_size": 8}, "the effective batch was 4, is now 8"),
        ({"seed": 7}, "the seed was 42, is now 7"),
        ({"toy_width": 64}, "of another shape"),
        ({"toy_depth": 3}, "missing from the checkpoint"),
        ({"channels_last": True}, "the model has no convolutions"),
    ],
)
def test_a_dry_run_refuses_what_the_resume_would(runs, train, other, told):
    whole, _, _ = runs
    again = train(whole.directory, dry=True, **{**OPTIONS, "max_train_steps": 20, **other})
    assert (again.code, told in again.output) == (2 if "channels_last" in other else 8, True), again.output


def test_a_launch_that_is_refused_leaves_the_configuration_of_the_run_as_it_is(runs, train):
    whole, _, _ = runs
    before = [(whole.directory / name).read_text() for name in ("config.toml", "launch.json")]
    assert train(whole.directory, max_train_steps=20, train_batch_size=8, use_ema=True).code == 8
    assert [(whole.directory / name).read_text() for name in ("config.toml", "launch.json")] == before


def test_a_run_that_goes_on_otherwise_says_so_in_its_configuration(runs, train):
    _, _, resumed = runs
    done = train(resumed.directory, **{**OPTIONS, "max_train_steps": 13}, timestep_distribution="uniform")
    assert "timesteps were logit-normal(0, 1), are now uniform" in done.output
    given, _, defaults = (resumed.directory / "config.toml").read_text().partition("[defaults]")
    assert ("max_train_steps = 13" in given, "adam_beta1" in given, "adam_beta1 = 0.9" in defaults) == (True, False, True)


def test_a_run_goes_on_with_the_defaults_with_which_it_was_begun(runs, train):
    """As after an update to a version whose default is another one."""
    _, _, resumed = runs
    launched = resumed.directory / "launch.json"
    launch = json.loads(launched.read_text())
    launched.write_text(json.dumps(launch | {"defaults": launch["defaults"] | {"validation_batch_size": 7}}))
    again = train(resumed.directory, **{**OPTIONS, "max_train_steps": 14})
    assert "validation_batch_size: 7, the default when the run began; it is 8 now" in again.output
    after = json.loads(launched.read_text())
    assert (after["values"]["validation_batch_size"], after["defaults"]["validation_batch_size"]) == (7, 7)
    assert train(resumed.directory, config=resumed.directory / "config.toml", max_train_steps=15).code == 0


def test_steps_of_another_size_are_not_continued_with_the_same_name_of_an_optimizer(tmp_path, train):
    """Of `adafactor` when it was torch's, whose steps are scaled by the size of each weight."""
    options = {"train_batch_size": 4, "max_train_steps": 1}
    assert train(tmp_path / "run", **options, optimizer="adafactor_scaled").code == 0
    refused = train(tmp_path / "run", **{**options, "max_train_steps": 2}, optimizer="adafactor")
    assert (refused.code, "--optimizer=adafactor_scaled resumes it" in refused.output) == (8, True), refused.output
    resumed = train(tmp_path / "run", **{**options, "max_train_steps": 2}, optimizer="adafactor_scaled")
    assert (resumed.code, "at step 1" in resumed.output) == (0, True), resumed.output


def test_hook_load_checkpoint_is_asked_with_the_newest_checkpoint(runs):
    _, _, resumed = runs
    assert resumed.calls("load_checkpoint")[0]["source"] == "step-00000005"


def test_a_run_on_changed_data_is_refused_or_continues_and_remembers_it(pictures, train, tmp_path):
    """24 images in batches of 4: 6 in an epoch, and 7 once there are 28."""
    images = copytree(pictures, tmp_path / "images")
    options = {"instance_data_dir": images, "train_batch_size": 4, "resume_from_checkpoint": "latest"}
    train(tmp_path / "run", max_train_steps=8, **options)
    (images / "01.txt").write_text("another caption")
    refused = train(tmp_path / "run", max_train_steps=9, **options)
    assert (refused.code, "the data have changed: 1 caption changed, first: 01.png\n" in refused.output) == (8, True)
    caption = train(tmp_path / "run", max_train_steps=9, on_changed_data="continue", **options)
    assert "training continues with what is there now: 1 caption changed, first: 01.png" in caption.output
    for number in (1, 2, 4, 5):
        for suffix in (".png", ".txt"):
            copyfile(images / f"{number:02d}{suffix}", images / f"{number + 30}{suffix}")
    added = train(tmp_path / "run", max_train_steps=10, on_changed_data="continue", **options)
    trainer = json.loads((added.directory / "checkpoints/step-00000010/state.json").read_text())["trainer"]
    assert (trainer["step"], trainer["position"], trainer["epoch"]) == (10, 10, 2)
    assert trainer["order_beginning"] == {"position": 9, "epoch": 2}
    assert trainer["data_changes"] == [
        {"step": 8, "changes": ["1 caption changed, first: 01.png"]},
        {"step": 9, "changes": ["4 images were added, first: 31.png"]},
    ]
    two = train(tmp_path / "run", max_train_steps=11, **{**options, "train_batch_size": 2}, num_processes=2)
    trainer = json.loads((two.directory / "checkpoints/step-00000011/state.json").read_text())["trainer"]
    assert (trainer["position"], trainer["epoch"], trainer["order_beginning"]) == (11, 2, {"position": 9, "epoch": 2})
