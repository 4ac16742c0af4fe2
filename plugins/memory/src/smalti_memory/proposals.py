"""What a streamed base takes on each rank, for `smalti plan`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from smalti import Communication, Config, Recompute, Strategy, World
from smalti.config import ModelOptions
from smalti.parallel import in_bf16
from smalti_memory.options import SLOTS, MemoryOptions

_RECOMPUTE: Mapping[Recompute, Mapping[str, object]] = {"full": {"gradient_checkpointing": True}}


def proposals(config: Config, world: World) -> list[Strategy]:
    """The adapter on every rank, and the frozen weights of blocks in host memory; nothing where all weights train."""
    if config[ModelOptions].model_type != "lora" or world.device.startswith("cpu"):
        return []
    reduction = Communication(
        collective="all-reduce",
        bytes_per_parameter=2 * 4 * (world.size - 1) / world.size,
        ranks=world.size,
        of="trained",
        times="step",
        between_nodes=world.size > world.local_size,
    )
    return [
        Strategy(
            name="streamed",
            title="base streamed" if world.size == 1 else "DDP, base streamed",
            options={"stream_base": True, "resident_gib": config[MemoryOptions].resident_gib},
            recompute=_RECOMPUTE,
            gathered=SLOTS,
            gathered_bytes=2 if in_bf16(config, world.device.partition(":")[0]) else 4,
            offloaded=frozenset(("frozen",)),
            keeps_gradients=world.size > 1,
            communication=(reduction,) if world.size > 1 else (),
        )
    ]
