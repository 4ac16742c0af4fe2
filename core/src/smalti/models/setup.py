"""How the model that is trained is set up before a strategy wraps it: torch.compile, TF32, channels last, its description.

torch.compile works block by block: one graph serves all blocks of a class, and the compiler sees no more than one of them.

TF32 holds for the products and convolutions of that model alone, forward and backward. Encoders keep torch's own precision:
text encoders compute the angles of their rotary embeddings as a product of fp32 matrices, and what they encode is kept for
later runs.

Channels last is the memory format (B, h, w, C) that tensor cores need. Only the inputs of convolutions are converted; their
outputs keep the format. Weights stay as they are, and with them shards, optimizer state and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from smalti.config import Config, LaunchOptions
from smalti.errors import UserError
from smalti.models.attention import forward_within
from smalti.models.family import ModelFamily
from smalti.parallel import in_bf16, products
from smalti.types import Block

_MOST_GRAPHS = 16 * 6
"""Of all blocks of a class, which torch counts together: up to 16 that differ, as in width, for six kinds of input each: the
first size, all others, from which on torch lets sizes vary, and batches of one; with gradients, and without in validation and
evaluation. So the number of buckets does not matter."""


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
    `_MOST_GRAPHS` graphs the blocks of a class run as they are, for inputs of further kinds.
    """
    options = config[LaunchOptions]
    if options.dynamo_backend is None:
        return
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    for block in blocks:
        module = model.get_submodule(block.path)
        module.forward = torch.compile(module.forward, backend=options.dynamo_backend.lower(), mode=options.dynamo_mode)


def tf32_choice(config: Config, device: str) -> bool | None:
    """Whether the model's products of fp32 matrices are computed in TF32; None where it has none, or no device to choose it."""
    kind = torch.device(device).type
    return products(config, kind) == "tf32" if kind == "cuda" and not in_bf16(config, kind) else None


@contextmanager
def products_in_tf32(allowed: bool | None) -> Iterator[None]:
    """Inside, on every thread of the process, products of fp32 matrices are computed in TF32 or in fp32; None changes nothing.

    Set through torch's older switches: the newer `fp32_precision` makes `torch.get_float32_matmul_precision` raise, which
    torch.compile still reads (torch 2.13, pytorch/pytorch#166387). The older ones set the newer along with themselves.
    """
    if allowed is None:
        yield
        return
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


def choose_tf32(model: nn.Module, allowed: bool | None) -> None:
    """Make every forward pass of `model` compute its products so. Backward is the loop's to surround.

    `forward` is replaced, below all hooks: call this before the model is wrapped.
    """
    if allowed is not None:
        forward_within(model, partial(products_in_tf32, allowed))


def wants_channels_last(chosen: bool | None, family: ModelFamily, device: str) -> bool:
    """Whether a run uses channels last: as chosen, else on CUDA devices for a family whose model is `convolutional`."""
    return family.convolutional and torch.device(device).type == "cuda" if chosen is None else chosen


def use_channels_last(model: nn.Module) -> None:
    """Make every two-dimensional convolution of `model`, which may be on the meta device, compute with channels last.

    Raises UserError for a model that has none.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not found:
        raise UserError("the model has no convolutions that could compute with channels last", fix="--no_channels_last")
    for module in found:
        module.register_forward_pre_hook(_to_channels_last)


def _to_channels_last(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """At each convolution again, because norms and reshapes between them change the format; free where it is right already."""
    return (inputs[0].contiguous(memory_format=torch.channels_last),)


def config_of(model: nn.Module) -> str:
    """The JSON text from which diffusers or transformers builds a model like this; "" for a model of neither.

    Ask before the model is wrapped: it says its class, and some wrappers change that.
    """
    for owner in (model, getattr(model, "config", None)):
        if callable(describe := getattr(owner, "to_json_string", None)):
            return str(describe())
    return ""
