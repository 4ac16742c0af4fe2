"""A rank that fails or is killed within a step is named by the others, and the lowest of them saves before they leave."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from smalti.checkpoint.format.manifest import SUSPECT
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from support.whole import some

ENDLESS = {"max_train_steps": 100_000, "train_batch_size": 2, "use_ema": True, "checkpoints_total_limit": 2}


def newest(directory):
    return CheckpointStore(directory / "checkpoints").all()[-1]


def together(launches):
    """The results of several launches: most of their time is waiting."""
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(launch) for name, launch in launches.items()}
        return {name: each.result() for name, each in running.items()}


def test_a_rank_that_does_not_reach_the_boundary_after_a_fault_leaves_and_another_one_saves(tmp_path, launch):
    options = {**ENDLESS, "num_processes": 2, "checkpoint_step_interval": 0}
    run = launch(tmp_path / "run", **options, spoil="report-stuck:1:8", variables={"PROBE_FAULT": "STOP_SUSPECT"})
    last = run.output[run.output.index("ended with exit code") :]
    entry = newest(run.directory)
    assert (run.code, entry.step, entry.manifest.flags) == (5, 8, (SUSPECT,)), run.output
    assert "rank 1: GpuFaultError: ecc on cuda:0: spoiled; this rank does not reach the end of its step" in last
    assert f"saved step 8 from rank 0 before leaving: {entry.path}" in last


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory, launch):
    """Runs on two ranks, one of which fails in the middle of a step."""
    root = tmp_path_factory.mktemp("spoiled")
    options = {**ENDLESS, "num_processes": 2, "max_train_steps": 8}
    return together(
        {spoil: partial(launch, root / spoil.partition(":")[0], **options, spoil=spoil) for spoil in ("error:1:4", "fault:0:4")}
    )


@pytest.mark.parametrize(
    ("spoil", "cause", "saver"),
    [
        ("error:1:4", "ended with exit code 1: rank 1: RuntimeError: spoiled", 0),
        ("fault:0:4", "ended with exit code 5: rank 0: Gpu", 1),
    ],
)
def test_when_one_rank_fails_its_failure_is_the_cause_and_the_other_one_saves(spoiled, spoil, cause, saver):
    run, entry = spoiled[spoil], newest(spoiled[spoil].directory)
    last = run.output[run.output.index("ended with exit code") :]
    assert cause in last
    assert f"saved step 3 from rank {saver} before leaving: {entry.path}" in last
    assert verify(entry.path).ok


def test_a_fault_of_an_accelerator_keeps_its_exit_code_whoever_saves(spoiled):
    assert [spoiled[spoil].code for spoil in ("error:1:4", "fault:0:4")] == [1, 5]
    assert "cuda_error on cpu: CUDA error: an illegal memory access was encountered" in spoiled["fault:0:4"].output


def test_what_is_saved_after_a_fault_that_forbids_saving_is_marked(spoiled):
    flags = [newest(spoiled[spoil].directory).manifest.flags for spoil in ("error:1:4", "fault:0:4")]
    assert flags == [(), (SUSPECT,)]


def test_what_is_saved_after_a_fault_that_does_not_forbid_it_is_an_ordinary_checkpoint(tmp_path, launch):
    options = {**ENDLESS, "num_processes": 2, "max_train_steps": 8}
    run = launch(tmp_path / "run", **options, spoil="fault:0:4", variables={"PROBE_FAULT": "CONTINUE"})
    assert (run.code, newest(run.directory).step, newest(run.directory).manifest.flags) == (5, 3, ()), run.output


def test_the_events_tell_of_a_checkpoint_that_the_main_rank_made_alone(spoiled):
    assert [event["step"] for event in spoiled["error:1:4"].events("checkpoint")] == [3]


@pytest.mark.parametrize("beside", some([True, False], True))
def test_a_rank_that_alone_fails_to_write_a_checkpoint_ends_the_run_with_its_failure(tmp_path, launch, beside):
    options = {"num_processes": 2, "max_train_steps": 100_000, "checkpoint_step_interval": 2, "checkpoint_async": beside}
    run = launch(tmp_path / "run", **{**ENDLESS, **options}, spoil="save:1:4")
    assert "ended with exit code 1: rank 1: ValueError: spoiled" in run.output
    assert newest(run.directory).step >= 2


@pytest.fixture(scope="module")
def waiting(tmp_path_factory, launch):
    """Runs in which one rank is lost while the others wait for it in a call that does not end by itself."""
    root = tmp_path_factory.mktemp("waiting")
    cases = {
        "killed": ({"num_processes": 3}, "kill:2:4,stuck:0:4,stuck:1:4"),
        "out of memory": ({"num_processes": 2}, "memory:0:4,stuck:1:4"),
        "sharded": (
            {
                "num_processes": 2,
                "fsdp_enable": True,
                "use_cpu": True,
                "checkpoint_step_interval": 2,
                "checkpoint_async": False,
            },
            "kill:1:4,stuck:0:4",
        ),
    }
    return together(
        {
            name: partial(launch, root / name.replace(" ", "-"), **{**ENDLESS, "max_train_steps": 8, **options}, spoil=spoil)
            for name, (options, spoil) in cases.items()
        }
    )


@pytest.mark.parametrize(
    ("name", "cause", "saver"),
    [
        ("killed", "ended with exit code 9: rank 2 was killed by SIGKILL", 0),
        (
            "out of memory",
            "ended with exit code 1: rank 0: out of memory on cpu: no room for 2.00 GiB more in the forward pass",
            1,
        ),
    ],
)
def test_a_rank_that_waits_for_a_lost_one_in_a_call_without_end_saves_beside_it_and_leaves(waiting, name, cause, saver):
    run, entry = waiting[name], newest(waiting[name].directory)
    last = run.output[run.output.index("ended with exit code") :]
    assert cause in last
    assert f"ended with exit code {run.code}: " in cause
    assert f"saved step 3 from rank {saver} before leaving: {entry.path}" in last
    assert verify(entry.path).ok
    assert [call["process"] for call in run.calls("on_train_end", rank=saver)]


def test_where_ranks_hold_shards_the_last_checkpoint_is_named_and_nobody_waits(waiting):
    run, entry = waiting["sharded"], newest(waiting["sharded"].directory)
    last = run.output[run.output.index("ended with exit code") :]
    assert (run.code, entry.step) == (9, 2)
    assert "ended with exit code 9: rank 1 was killed by SIGKILL" in last
    lost = f"the newest checkpoint is {entry.path}, so 1 step is lost"
    assert f"no emergency save was possible, because no rank holds the whole state; {lost}" in last


def test_a_rank_that_is_out_of_memory_says_what_was_there_and_what_would_help(waiting):
    last = waiting["out of memory"].output
    last = last[last.index("ended with exit code") :]
    assert (
        "    weights that train        0.7 MiB\n    optimizer state           1.4 MiB\n    EMA                       0.7 MiB\n"
        in last
    )
    assert "--train_batch_size=1 --gradient_accumulation_steps=2: saves 1/2 of the activations" in last
    assert "--gradient_checkpointing: saves most of the activations" in last


def test_a_single_process_saves_the_step_after_which_a_plugin_fails(tmp_path, train):
    run = train(tmp_path / "run", max_train_steps=8, train_batch_size=2, variables={"PROBE_RAISE": "on_step_end"})
    assert (run.code, newest(run.directory).step, newest(run.directory).manifest.flags) == (1, 1, ()), run.output
    assert f"saved step 1 from rank 0 before leaving: {newest(run.directory).path}" in run.output
    assert "RuntimeError: spoiled on_step_end" in run.output
    again = train(run.directory, max_train_steps=8, train_batch_size=2)
    assert (again.code, [event["step"] for event in again.events("step")]) == (0, list(range(2, 9)))


def test_where_all_ranks_are_out_of_memory_the_lowest_saves(tmp_path, launch):
    options = {**ENDLESS, "num_processes": 2, "max_train_steps": 8}
    run = launch(tmp_path / "run", **options, spoil="memory:0:4,memory:1:4")
    last = run.output[run.output.index("ended with exit code 1: ") :]
    assert "out of memory on cpu: no room for 2.00 GiB more in the forward pass" in last
    assert f"saved step 3 from rank 0 before leaving: {newest(run.directory).path}" in run.output
    assert verify(newest(run.directory).path).ok
