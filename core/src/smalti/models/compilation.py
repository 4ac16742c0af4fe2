"""torch.compile, block by block: one graph serves all blocks of a class, and the compiler sees no more than one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from smalti.config import Config
from smalti.settings import LaunchOptions
from smalti.types import Block


def compile_blocks(model: nn.Module, blocks: Sequence[Block], config: Config) -> None:
    """Compile every block if the options ask for it; nothing runs before the first forward pass.

    The block's own `forward` is compiled, below all hooks, which gather parameters and cannot be traced. After
    `dynamo_recompile_limit` different shapes a block runs as it is, for those shapes that come after.
    """
    options = config[LaunchOptions]
    if options.dynamo_backend is None:
        return
    torch._dynamo.config.recompile_limit = options.dynamo_recompile_limit
    for block in blocks:
        module = model.get_submodule(block.path)
        compiled = torch.compile(module.forward, backend=options.dynamo_backend.lower(), mode=options.dynamo_mode)
        module.forward = compiled
