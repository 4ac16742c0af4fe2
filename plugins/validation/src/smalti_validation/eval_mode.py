"""The model as it is judged: in eval mode, with EMA weights if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from smalti.training import AttemptFailed, Run, broadcast_running_stats, on_all_ranks


@contextmanager
def eval_mode(run: Run) -> Iterator[nn.Module]:
    """The unwrapped model in eval mode, with EMA weights if there are any, without gradients. *Collective*.

    Afterwards it is as before, bit for bit, except that running statistics are those of rank 0. After an exception that other
    ranks do not know of, no collective is called.
    """
    run.saver.wait_for_staging()  # the weights are about to change, and a checkpoint may still be copying them
    model = run.parallel.unwrap(run.model)
    broadcast_running_stats(model, run.parallel)
    model.eval()
    in_step = run.world.size == 1
    try:
        with ExitStack() as averaged, torch.no_grad():
            if (ema := run.ema) is not None:
                on_all_ranks(run.parallel, lambda: averaged.enter_context(ema.average_parameters()))
            run.parallel.state.invalidate_gathered()
            yield model
        in_step = True
    except AttemptFailed:
        in_step = True
        raise
    finally:
        model.train()
        if in_step:
            run.parallel.state.invalidate_gathered()
