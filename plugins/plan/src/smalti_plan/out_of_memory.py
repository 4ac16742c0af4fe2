"""What is known of the memory of a rank when it ran out: what filled it, and what would help."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from traceback import walk_tb
from types import FrameType

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti import RankInfo, UserError
from smalti.parallel import ALLOCATOR_VARIABLES
from smalti.training import Run
from smalti_plan.memory_use import MemoryUse, amounts, out_of_memory_message, remedies

_OPTIONS = (
    *("gradient_checkpointing", "fsdp_activation_checkpointing", "train_batch_size", "gradient_accumulation_steps"),
    *("validation_batch_size", "ema_device", "fsdp_enable", "fsdp_cpu_offload", "fsdp_version", "deepspeed_config"),
    *("optimizer", "base_model_precision", "model_type", "lora_rank", "offload_activations", "fit"),
)
_PHASES = {
    "smalti_validation.validation": "sampling of validation images",
    "smalti_validation.evaluation": "evaluation",
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


def explained(error: BaseException, info: RankInfo, run: Run | None) -> UserError:
    """What filled the memory, and what would help; without a `run`, as it is built, less is known."""
    use = memory_use(error, info, run)
    return UserError(out_of_memory_message(use), fix=remedies(use))


def memory_use(error: BaseException, info: RankInfo, run: Run | None) -> MemoryUse:
    """What is known of the memory that this error is about."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    host = not isinstance(error, torch.OutOfMemoryError) and "CU" not in str(error)
    device = "cpu" if host else info.world.device
    encoding = info.phases.current is not None and info.phases.current.name == "encoding"
    use = replace(
        MemoryUse(
            device=device,
            phase="encoding of images and captions" if encoding else _phase(frames),
            ranks=info.world.size,
            total=psutil.virtual_memory().total if host else None,
            expandable=any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES),
            options={name: info.config.value(name) for name in _OPTIONS if name in info.config.schema.options},
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
        options={name: value for name, value in use.options.items() if name != "model_type" or run.family.adaptable},
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
