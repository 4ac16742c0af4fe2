"""What ZeRO takes on each rank, for `smalti plan`. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal

from smalti import Communication, Config, Part, Recompute, Strategy, World
from smalti.config import OptimizerOptions
from smalti.parallel import in_bf16
from smalti_deepspeed.config import BUCKET, SMALL, given
from smalti_deepspeed.optimizers import deepspeed_name, misplaced
from smalti_deepspeed.options import enabled
from smalti_deepspeed.parsing import Document, section

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_RECOMPUTE: Mapping[Recompute, Mapping[str, object]] = {
    "none": {"gradient_checkpointing": False},
    "full": {"gradient_checkpointing": True},
}

_OPERATIONS: Mapping[Literal["step", "micro-batch"], float] = {"step": 10, "micro-batch": 5}
_OPERATIONS_3: Mapping[Literal["step", "micro-batch"], float] = {"step": 45, "micro-batch": 60}
"""Dispatched for each tensor, measured on CPUs: hooks; in stage 3 those of each gathered parameter."""


def proposals(config: Config, world: World) -> list[Strategy]:
    """ZeRO 1 to 3 over all ranks, and 2 and 3 with the optimizer offloaded; those in which the run's optimizer can step."""
    item = 2 if in_bf16(config, world.device.partition(":")[0]) else 4
    own, optimizer = given(config) if enabled(config) else {}, deepspeed_name(config[OptimizerOptions].optimizer)
    kinds = [(stage, False) for stage in (1, 2, 3)] if world.size > 1 else []
    if not world.device.startswith("cpu"):
        kinds += [(stage, True) for stage in ((2, 3) if world.size > 1 else (2,))]
    return [
        _zero(stage, world, item, own, offload=offload)
        for stage, offload in kinds
        if misplaced(optimizer, stage, offloaded=offload) is None
    ]


def _document(own: Document, stage: int, *, offload: bool) -> tuple[dict[str, object], bool]:
    """The user's own configuration with this kind of ZeRO in it, and whether that is what it asks for already.

    Without the sizes of batches, which differ between plans.
    """
    document = {key: value for key, value in own.items() if key not in _BATCH}
    zero = section(own, "zero_optimization")
    device = section(zero, "offload_optimizer").get("device")
    if zero and zero.get("stage", 0) == stage and (device in ("cpu", "nvme")) == offload:
        return document, True
    made: dict[str, object] = {"stage": stage}
    if offload:
        made["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {**document, "zero_optimization": made}, False


def _zero(stage: int, world: World, item: int, own: Document, *, offload: bool) -> Strategy:
    document, is_configured = _document(own, stage, offload=offload)
    size = world.size
    divided: Mapping[Part, int] = {
        "weights": size if stage == 3 else 1,
        "gradients": size if stage >= 2 else 1,
        "state": size,
    }
    # Below stage 3, a bucket of gradients, and in bf16 a copy in fp32 that is being reduced; in stage 3 one bucket in fp32.
    in_buckets = item + 4 if stage < 3 and item == 2 else 4
    elements = BUCKET if stage < 3 else (BUCKET + SMALL) // 2
    return Strategy(
        name=f"zero-{stage}{'-offload' if offload else ''}",
        title=f"ZeRO {stage}{', optimizer offloaded' if offload else ''}",
        options={"deepspeed_config": json.dumps(document)},
        is_configured=is_configured,
        recompute=_RECOMPUTE,
        divided=divided,
        frozen=size if stage == 3 else 1,
        bytes={"weights": item, "gradients": item if stage < 2 else 4, "state": 4},
        keeps_gradients=stage == 3,
        summed_bytes=4 if offload and stage == 2 and item == 2 else 0,  # as they are averaged in fp32
        offloaded=frozenset(("state", "gradients") if offload else ()),
        gathered=2 if stage == 3 else 0,
        gathered_bytes=item if stage == 3 else 0,
        own_copies=True,
        operations=_OPERATIONS_3 if stage == 3 else _OPERATIONS,
        buffers=in_buckets * elements,
        buffers_per_parameter=item if stage < 3 else 4,
        keeps_buffers=stage == 3,
        communication=tuple(_communication(stage, world, item)) if size > 1 else (),
    )


def _communication(stage: int, world: World, item: int) -> Iterator[Communication]:
    """Gradients are reduced in fp32, in stage 1 once in a step; below stage 3 each rank gets all of them.

    Stage 3 gathers weights as it computes.
    """
    share, between = (world.size - 1) / world.size, world.size > world.local_size
    yield Communication(
        collective="reduce-scatter" if stage == 3 else "all-reduce",
        bytes_per_parameter=(1 if stage == 3 else 2) * 4 * share,
        ranks=world.size,
        of="trained",
        times="step" if stage == 1 else "micro-batch",
        between_nodes=between,
    )
    yield Communication(
        collective="all-gather",
        bytes_per_parameter=(2 if stage == 3 else 1) * item * share,
        ranks=world.size,
        of="all" if stage == 3 else "trained",
        times="micro-batch" if stage == 3 else "step",
        between_nodes=between,
    )
