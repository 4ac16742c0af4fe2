"""DDP on more than two ranks, where the order of a sum is not its only one."""

from contextlib import nullcontext

import torch
from torch import nn

from smalti.config.resolution import resolve
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.schema import schema_of
from smalti.training.build_run import open_parallel
from smalti.training.ddp_parallel import _with_final_buckets
from smalti.types import Block
from support.forked_ranks import forked_processes


class Kept(dict):
    """Weights of a state."""

    def names(self):
        return list(self)


def layers():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))


def launched(parallel, state, first, end, *, frozen=0, micro_batches=1, compiled=False):
    """The state of a model after steps `first` to `end` in a new DDP, as a launch makes it; the first layers may be frozen."""
    model = layers()
    model[:frozen].requires_grad_(False)
    blocks = [Block(path=str(number), class_name="Linear", parameters=512 * 513) for number in range(5)] if compiled else []
    before = torch.get_rng_state()
    wrapped = parallel.wrap(model, blocks, Kept(state))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step * 10 + parallel.world.rank)
        for micro in range(1, micro_batches + 1):
            with nullcontext() if micro == micro_batches else wrapped.no_sync():
                wrapped(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


RUNS = ({}, {"frozen": 2, "micro_batches": 2}, {"compiled": True})


def differences():
    """For each run of four steps, how many tensors differ from those of one that was resumed after two."""
    plugins = load_plugins()
    flags = ["--num_processes=3", "--use_cpu", "--mixed_precision=no", "--accelerate_config=none", "--dynamo_backend=eager"]
    config = resolve(schema_of(plugins), flags, environment={})
    parallel = open_parallel(choose_distributed(config, plugins), config)
    torch.manual_seed(0)
    start, found = layers().state_dict(), []
    for run in RUNS:
        whole = launched(parallel, start, 0, 4, **run)
        resumed = launched(parallel, launched(parallel, start, 0, 2, **run), 2, 4, **run)
        found.append(sum(not torch.equal(whole[name], resumed[name]) for name in whole))
    parallel.close()
    return found


def test_a_resumed_run_on_three_ranks_is_the_uninterrupted_one_bit_for_bit():
    """Plain, of an adapter with gradient accumulation, and with compiled blocks."""
    with forked_processes(ranks=3, group=False, seconds=120) as three:
        assert three.run(differences) == [[0, 0, 0]] * 3


def test_without_the_internals_of_torch_a_model_is_left_to_ddp():
    model = nn.Linear(2, 2)
    model.reducer = object()
    assert _with_final_buckets(model) is model
