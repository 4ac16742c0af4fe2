"""FSDP2 keeps the contract of a distribution strategy, on one, two and four ranks."""

from support.forked_ranks import ForkedContract


class TestOneRank(ForkedContract):
    plugin = "fsdp2"
    flags = ("--fsdp_enable",)
    ranks = 1


class TestTwoRanks(ForkedContract):
    """Gradients are reduced once a step; blocks are recomputed in part."""

    plugin = "fsdp2"
    flags = (
        "--fsdp_enable",
        "--no_fsdp_sync_each_batch",
        "--fsdp_activation_checkpointing",
        "--fsdp_activation_checkpointing_mode=selective",
    )


class TestCopiesOfTwoRanks(ForkedContract):
    """Four ranks, two copies of the model; first weights from rank 0; all of it kept gathered; blocks by size, recomputed."""

    plugin = "fsdp2"
    flags = (
        "--fsdp_enable",
        "--fsdp_shard_size=2",
        "--fsdp_cpu_ram_efficient_loading",
        "--no_fsdp_reshard_after_forward",
        "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
        "--fsdp_min_num_params=100",
        "--fsdp_activation_checkpointing",
    )
    ranks = 4
