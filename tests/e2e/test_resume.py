"""A run that stops and goes on is the run that never stopped."""

import pytest
import torch

OPTIONS = {"max_train_steps": 12, "train_batch_size": 4, "use_ema": True, "lr_scheduler": "cosine", "lr_warmup_steps": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train):
    """Twelve steps in one go, and the same with a stop after five."""
    root = tmp_path_factory.mktemp("resume")
    whole = train(root / "whole", **OPTIONS)
    stopped = train(root / "stopped", spoil="stop:0:5", **OPTIONS)
    stopped_losses = stopped.losses
    resumed = train(root / "stopped", **OPTIONS)
    return whole, (stopped, stopped_losses), resumed


def test_a_stop_that_a_plugin_asks_for_is_saved_and_ends_well(runs):
    _, (stopped, losses), _ = runs
    assert (stopped.code, len(losses)) == (0, 5)


def test_a_resumed_run_has_the_same_losses_as_one_that_was_not_stopped(runs):
    whole, _, resumed = runs
    assert resumed.losses == whole.losses


@pytest.mark.parametrize("group", ["model", "optimizer", "ema"])
def test_a_resumed_run_ends_bit_equal(runs, group):
    whole, _, resumed = runs
    expected, found = whole.tensors(12, group), resumed.tensors(12, group)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_finished_run_says_so_when_it_is_started_again(runs, train):
    whole, _, _ = runs
    again = train(
        whole.directory, max_train_steps=12, train_batch_size=4, use_ema=True, lr_scheduler="cosine", lr_warmup_steps=3
    )
    assert "already at step 12 of 12" in again.output


def test_a_run_with_another_effective_batch_is_not_continued(runs, train):
    whole, _, _ = runs
    again = train(whole.directory, max_train_steps=20, train_batch_size=8, use_ema=True)
    assert again.code == 2
    assert "effective batch 4 there, 8 here" in again.output


def test_a_launch_that_is_refused_leaves_the_configuration_of_the_run_as_it_is(runs, train):
    whole, _, _ = runs
    before = [(whole.directory / name).read_text() for name in ("config.toml", "launch.json")]
    assert train(whole.directory, max_train_steps=20, train_batch_size=8, use_ema=True).code == 2
    assert [(whole.directory / name).read_text() for name in ("config.toml", "launch.json")] == before


def test_a_run_that_goes_on_otherwise_says_so_in_its_configuration(runs, train):
    _, _, resumed = runs
    train(resumed.directory, **{**OPTIONS, "max_train_steps": 13})
    assert "max_train_steps = 13" in (resumed.directory / "config.toml").read_text()


def test_hook_load_checkpoint_is_asked_with_the_newest_checkpoint(runs):
    _, _, resumed = runs
    assert resumed.calls("load_checkpoint")[0]["source"] == "step-00000005"
