"""DDP on more than two ranks, where the order of a sum is not its only one."""

import torch
from torch import nn

from smalti.config.resolution import resolve
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.schema import schema_of
from smalti.training.build_run import open_parallel
from support.forked_ranks import forked_processes


class Kept(dict):
    """Weights of a state."""

    def names(self):
        return list(self)


def launched(parallel, state, first, end):
    """The state of a model after steps `first` to `end` in a new DDP, as a launch makes it."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))
    before = torch.get_rng_state()
    wrapped = parallel.wrap(model, [], Kept(state))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step * 10 + parallel.world.rank)
        wrapped(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def differences():
    """How many tensors of a run of four steps differ from those of one that was resumed after two."""
    plugins = load_plugins()
    flags = ["--num_processes=3", "--use_cpu", "--mixed_precision=no", "--accelerate_config=none"]
    config = resolve(schema_of(plugins), flags, environment={})
    parallel = open_parallel(choose_distributed(config, plugins), config)
    torch.manual_seed(0)
    start = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))).state_dict()
    whole = launched(parallel, start, 0, 4)
    resumed = launched(parallel, launched(parallel, start, 0, 2), 2, 4)
    parallel.close()
    return sum(not torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_resumed_run_on_three_ranks_is_the_uninterrupted_one_bit_for_bit():
    with forked_processes(ranks=3, group=False, seconds=120) as three:
        assert three.run(differences) == [0, 0, 0]
