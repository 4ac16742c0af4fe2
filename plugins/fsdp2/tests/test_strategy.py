"""FSDP2 keeps the contract of a distribution strategy, on one, two and four ranks."""

import pytest

from smalti_testing.strategies import STRATEGY, run_check
from support.forked_ranks import ForkedContract, forked_processes
from support.whole import some


class TestTwoRanks(ForkedContract):
    """Gradients are reduced once a step; blocks are recomputed in part."""

    plugin = "fsdp2"
    flags = (
        "--fsdp_enable",
        "--no_fsdp_sync_each_batch",
        "--fsdp_activation_checkpointing",
        "--fsdp_activation_checkpointing_mode=selective",
    )


COPIES = (
    "--fsdp_enable",
    "--fsdp_shard_size=2",
    "--fsdp_cpu_ram_efficient_loading",
    "--no_fsdp_reshard_after_forward",
    "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
    "--fsdp_min_num_params=100",
    "--fsdp_activation_checkpointing",
)
"""Two copies of the model; first weights from rank 0; all of it kept gathered; blocks by size, recomputed."""
KEPT = ("it_fills_the_model_with_the_first_weights", "steps_are_those_of_one_process", "the_norm_is_that_of_the_whole_gradient")
KEPT += ("a_restored_state_continues_bit_for_bit", "a_checkpoint_comes_back_bit_for_bit", "one_process_reads_its_checkpoints")


@pytest.fixture(scope="module")
def one():
    with forked_processes(ranks=1, group=False) as rank:
        yield rank


@pytest.mark.parametrize("check", some(STRATEGY.checks, *KEPT))
def test_one_rank_keeps_the_contract(one, tmp_path, check):
    run_check(one, check, "fsdp2", ("--fsdp_enable",), tmp_path)


@pytest.fixture(scope="module")
def four():
    with forked_processes(ranks=4, group=False) as ranks:
        yield ranks


@pytest.mark.parametrize("check", some(STRATEGY.checks, *KEPT))
def test_two_copies_on_four_ranks_keep_the_contract(four, tmp_path, check):
    run_check(four, check, "fsdp2", COPIES, tmp_path)
