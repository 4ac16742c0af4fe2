"""Running out of memory on this rank becomes an error that says what filled the memory, and what would help."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from types import FrameType

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.config import Config
from smalti.errors import ExitCode, UserError
from smalti.models import Adaptable
from smalti.training.failures.memory_use import ALLOCATOR_VARIABLES, MemoryUse, amounts, out_of_memory_message, remedies
from smalti.training.run import Run
from smalti.types import World

_OPTIONS = (
    *("gradient_checkpointing", "fsdp_activation_checkpointing", "train_batch_size", "gradient_accumulation_steps"),
    *("validation_batch_size", "ema_device", "fsdp_enable", "fsdp_cpu_offload", "fsdp_version", "deepspeed_config"),
    *("optimizer", "base_model_precision", "model_type", "lora_rank"),
)
_NO_ROOM = re.compile(
    r"DefaultCPUAllocator: "
    r"|(CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    r"|Cuda failure( \d+)? 'out of memory'"  # NCCL's
    r"|CU[A-Z]+_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuSOLVER
)
_DRIVER = "CUDA driver error: "
_PHASES = {
    "smalti.data.encoded": "encoding of images and captions",
    "smalti.training.validation.validation": "sampling of validation images",
    "smalti.training.validation.evaluation": "evaluation",
    "smalti.checkpoint": "saving of a checkpoint",
}
"""By module; the outermost call counts."""
_IN_STEP = {
    "backward": "backward pass",
    "clip_gradients": "clipping of gradients",
    "clip_gradient_values": "clipping of gradients",
    "step": "optimizer step",
    "update": "update of the EMA",
}
"""By function, below `train_step`."""


class OutOfMemory(UserError):  # noqa: N818 - names what happened, as UserError says what it is
    """A device, or the host, has no room for what this rank wants to compute. No fault of the device."""

    exit_code = ExitCode.FAILED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_ROOM.search(str(error)) is not None


@contextmanager
def memory_explained(config: Config, world: World, run: Run | None = None) -> Iterator[None]:
    """An exception that says that memory ran out becomes an OutOfMemory; without a `run`, as it is built, it knows less.

    A driver that cannot map memory as the allocator is configured to becomes a UserError: it shows with the first allocation.
    """
    try:
        yield
    except Exception as error:
        if run is None and not is_out_of_memory(error) and _DRIVER in str(error) and _expandable():
            first = str(error).partition("\n")[0]
            raise UserError(
                f"the driver of {world.device} refuses expandable segments of memory ({first})",
                fix=f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:False in the environment",
            ) from error
        if not is_out_of_memory(error):
            raise
        use = memory_use(error, config, world, run)
        raise OutOfMemory(out_of_memory_message(use), fix=remedies(use)) from error


def _expandable() -> bool:
    return any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)


def memory_use(error: BaseException, config: Config, world: World, run: Run | None) -> MemoryUse:
    """What is known of the memory that this error is about."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    host = not isinstance(error, torch.OutOfMemoryError) and "CU" not in str(error)
    device = "cpu" if host else world.device
    use = replace(
        MemoryUse(
            device=device,
            phase=_phase(frames),
            ranks=world.size,
            total=psutil.virtual_memory().total if host else None,
            expandable=_expandable(),
            options={name: config.value(name) for name in _OPTIONS if name in config.schema.options},
        ),
        **amounts(str(error)),  # type: ignore[arg-type]
    )
    images, size = _batch(frames)
    return _with_state(replace(use, images=images, size=size), run) if run is not None else use


def _with_state(use: MemoryUse, run: Run) -> MemoryUse:
    model = run.parallel.unwrap(run.model)
    parameters = list(model.parameters())
    owned = {id(parameter) for parameter in parameters}
    flat = [each for group in run.optimizer.param_groups for each in group["params"] if id(each) not in owned]
    states = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]

    frozen = [each for each in parameters if not each.requires_grad]
    beside = run.family.frozen_storage(model)[0].bytes - sum(each.nbytes for each in frozen)  # quantised: no parameters

    def size(tensors: Iterable[Tensor | None]) -> int:
        return sum(_bytes_on(use.device, tensor) for tensor in tensors)

    return replace(
        use,
        weights=size(each for each in parameters if each.requires_grad),
        frozen=(size(frozen) + beside) if size(frozen) else 0,
        gradients=size(each.grad for each in (*parameters, *flat)),
        optimizer_state=size((*states, *flat)),
        ema=size(run.ema.storage) if run.ema is not None else 0,
        replicated=run.parallel.local_communicator() is not None,
        recomputes=_can_recompute(model),
        options={
            name: value for name, value in use.options.items() if name != "model_type" or isinstance(run.family, Adaptable)
        },
    )


def _can_recompute(model: nn.Module) -> bool:
    return hasattr(model, "enable_gradient_checkpointing")


def _bytes_on(device: str, tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size() if local.device == torch.device(device) else 0


def _phase(frames: list[FrameType]) -> str:
    """What was done when it happened, from the calls that led there, the outermost first."""
    in_step = False
    for frame in frames:
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        for start, phase in _PHASES.items():
            if module == start or module.startswith(f"{start}."):
                return phase
        if in_step and function in _IN_STEP:
            return _IN_STEP[function]
        in_step = in_step or (module, function) == ("smalti.training.trainer", "train_step")
    return "forward pass" if in_step else "building of the run"


def _batch(frames: list[FrameType]) -> tuple[int, str]:
    """How many images of which size the step had in a micro-batch."""
    for frame in frames:
        if frame.f_code.co_name == "train_step" and (batch := frame.f_locals.get("batch")) is not None:
            return len(batch.micro[0].numbers), str(batch.bucket)
    return 0, ""
