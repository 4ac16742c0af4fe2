"""How ranks part."""

import time

import torch
import torch.distributed as dist

from smalti_testing.strategy_subject import open_strategy
from support.forked_ranks import forked_processes


def part_with_words_under_way():
    """What gloo's threads still hold when the model goes, they must be able to let go of."""
    subject = open_strategy("ddp", (), 2)
    subject.step(0)
    if subject.parallel.world.rank == 1:
        time.sleep(0.3)
    dist.all_reduce(torch.zeros(3), async_op=True)
    subject.parallel.close()
    open_strategy.cache_clear()


def test_a_model_that_outlives_its_group_goes_without_a_deadlock():
    with forked_processes(group=False, seconds=60) as pair:
        pair.run(part_with_words_under_way)
