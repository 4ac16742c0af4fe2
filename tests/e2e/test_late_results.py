"""Results of steps that are read while the next step computes: losses, weights and files are those of reading them first."""

import pytest
import torch

from support.whole import some

OPTIONS = {
    "max_train_steps": 6,
    "train_batch_size": 2,
    "use_ema": True,
    "nonfinite_loss": "skip",
    "lr_warmup_steps": 10,
    "lr_scheduler": "constant_with_warmup",
    "checkpoint_step_interval": 3,
}
OF_A_STEP = ("step", "epoch", "loss", "grad_norm", "learning_rate", "samples", "skipped")


def told(run):
    return [[event[name] for name in OF_A_STEP] for event in run.events("step")]


def same(one, other):
    """Where NaN is NaN, too."""
    return str(told(one)) == str(told(other))


def first_told(run):
    """The hook that comes first: the ranks' agreement on what comes next, or the result of the step before."""
    hooks = (call["hook"] for call in run.all_calls() if call["rank"] == 0)
    return next(hook for hook in hooks if hook in ("on_step_end", "on_step_boundary"))


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_losses_skips_and_weights_are_those_of_checking_first_and_so_they_resume(tmp_path, train, ranks):
    """The gradient of the second batch is not finite on one rank, and the run stops in the middle and goes on."""
    first = train(tmp_path / "first", **OPTIONS, num_processes=ranks, check_before_step="true", spoil="gradient:0:2")
    late = {**OPTIONS, "num_processes": ranks, "check_before_step": "false"}
    begun = train(tmp_path / "late", **late | {"max_train_steps": 4}, spoil="gradient:0:2")
    assert [first_told(run) for run in (first, begun)] == ["on_step_end", "on_step_boundary"]
    resumed = train(tmp_path / "late", **late)
    assert first.code == begun.code == resumed.code == 0
    assert [step for step, *_ in told(first)] == [1, 1, 2, 3, 4, 5, 6]
    assert [skipped for *_, skipped in told(first)].index(True) == 1
    assert same(resumed, first)
    for step in (3, 6):
        for group in ("model", "ema", "optimizer"):
            wanted, found = first.tensors(step, group), resumed.tensors(step, group)
            assert wanted
            assert wanted.keys() == found.keys()
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_run_that_fails_in_its_next_step_has_saved_the_one_before(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, check_before_step="false", spoil="error:0:5")
    assert run.code == 1
    assert "saved step 4" in run.output
    assert [step for step, *_ in told(run)] == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_stops_the_run_one_step_later_at_most(tmp_path, train):
    options = OPTIONS | {"nonfinite_loss": "stop", "num_processes": 2}
    run = train(tmp_path / "run", **options, check_before_step="false", spoil="gradient:1:3")
    assert run.code == 1
    assert "not finite in step 3" in run.output
    assert [step for step, *_ in told(run)] in ([1, 2, 2], [1, 2, 2, 3])
