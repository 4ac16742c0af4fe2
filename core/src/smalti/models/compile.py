"""torch.compile, block by block: one graph serves all blocks of a class, and the compiler sees no more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from smalti.config import Config, LaunchOptions
from smalti.errors import UserError
from smalti.types import Block

_MOST_SHAPES = 16
"""Input shapes compiled for each block."""


def ensure_compiled(
    wrapped: nn.Module, unwrap: Callable[[nn.Module], nn.Module], blocks: Sequence[Block], config: Config, strategy: str
) -> None:
    """Compile the blocks if the options ask for it and the strategy that has wrapped the model has compiled nothing.

    Raises UserError where that cannot be done any more: the strategy has put the blocks elsewhere.
    """
    if config[LaunchOptions].dynamo_backend is None or any(_is_compiled(module) for module in wrapped.modules()):
        return
    model = unwrap(wrapped)
    names = {name for name, _ in model.named_modules()}
    if any(block.path not in names for block in blocks):
        raise UserError(f"{strategy} does not compile the model that it wraps", fix="--dynamo_backend=no, or another strategy")
    compile_blocks(model, blocks, config)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def compile_blocks(model: nn.Module, blocks: Sequence[Block], config: Config) -> None:
    """Compile every block if the options ask for it; nothing runs before the first forward pass.

    The block's own `forward` is compiled, below all hooks, which gather parameters and cannot be traced. After
    `_MOST_SHAPES` different shapes a block runs as it is, for those shapes that come after.
    """
    options = config[LaunchOptions]
    if options.dynamo_backend is None:
        return
    torch._dynamo.config.recompile_limit = _MOST_SHAPES
    for block in blocks:
        module = model.get_submodule(block.path)
        compiled = torch.compile(module.forward, backend=options.dynamo_backend.lower(), mode=options.dynamo_mode)
        module.forward = compiled
