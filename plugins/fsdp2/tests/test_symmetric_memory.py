"""Messages from symmetric memory, as far as that goes without GPUs."""

from support.forked_ranks import forked_processes


def sharded(has_memory):
    """How each group of parameters gathers and reduces; or the error. `has_memory` stands in for NCCL's."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    from smalti import UserError
    from smalti_fsdp2.sharding import use_symmetric_memory

    if has_memory:
        _fsdp_collectives.SymmMemAllocMixin.__init__ = lambda self, group, backend: None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    try:
        use_symmetric_memory(model)
    except UserError as error:
        return error.message, error.fix
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    return [(type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__) for group in groups]


def test_all_groups_gather_and_reduce_in_it_or_the_run_says_why_not():
    with forked_processes() as ranks:
        refused = ranks.run(sharded, False)
    assert all(message.startswith("torch cannot allocate symmetric memory of NCCL here: ") for message, _ in refused)
    assert all("--no_fsdp_symmetric_memory" in fix for _, fix in refused)
    with forked_processes() as ranks:
        found = ranks.run(sharded, True)
    assert found == [[("SymmMemAllGather", "SymmMemReduceScatter")] * 2] * 2
