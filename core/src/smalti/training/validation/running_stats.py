"""Running statistics of a model's activations, which no optimizer moves: each rank gathers them from its own samples."""

from __future__ import annotations

import torch
from torch import nn

from smalti.parallel import Parallel


@torch.no_grad()
def broadcast_running_stats(model: nn.Module, parallel: Parallel) -> None:
    """Give every rank the running statistics of rank 0, those of the model that is saved and judged. *Collective*.

    They depend on no other rank, so a run that resumes from them on all ranks continues as one that was not interrupted.
    """
    for module in model.modules():
        if getattr(module, "track_running_stats", False):
            for buffer in module.buffers(recurse=False):
                buffer.copy_(parallel.gather(buffer)[0])
