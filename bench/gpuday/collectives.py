"""Collective operations between the ranks of a run, in a group that smalti has made: `python -m gpuday.collectives ORDER`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from gpuday.steps import Order

_BYTES = {False: 512 << 20, True: 1 << 20}
_ROUNDS = 5


def main(text: str) -> None:
    """The result: `wrong` elements of a sum whose value is known, and `all_reduce`, the bandwidth of the bus in GB/s."""
    order = Order(**json.loads(text))
    import torch
    import torch.distributed as dist

    from smalti.cli.arguments import CommandLine
    from smalti.plugins import choose_distributed
    from smalti.training import open_parallel

    line = CommandLine.parse(list(order.words))
    config = line.config()
    parallel = open_parallel(choose_distributed(config, line.plugins), config)
    try:
        world = parallel.world
        known = torch.full((1 << 20,), float(world.rank + 1), device=world.device)
        dist.all_reduce(known)
        wrong = torch.tensor(float((known != world.size * (world.size + 1) / 2).sum()), device=world.device)
        dist.all_reduce(wrong)
        numbers = torch.ones(_BYTES[order.rehearsed] // 4, device=world.device)
        seconds = []
        for _ in range(_ROUNDS + 1):
            begun = time.perf_counter()
            dist.all_reduce(numbers)
            float(numbers[0])  # the host waits for it
            seconds.append(time.perf_counter() - begun)
        taken = statistics.median(seconds[1:])
        bandwidth = 2 * (world.size - 1) / world.size * numbers.nbytes / taken / 1e9
        if world.rank == 0:
            Path(order.result).write_text(json.dumps({"wrong": float(wrong), "all_reduce": bandwidth}))
    finally:
        parallel.close()


if __name__ == "__main__":
    main(sys.argv[1])
