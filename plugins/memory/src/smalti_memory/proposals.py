"""What a streamed base takes on each rank, for `smalti plan`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from smalti import Communication, Config, Recompute, Strategy, World
from smalti.config import ModelOptions
from smalti.parallel import in_bf16
from smalti_memory.options import SLOTS, MemoryOptions
from smalti_memory.updates.checks import problems

_RECOMPUTE: Mapping[Recompute, Mapping[str, object]] = {"full": {"gradient_checkpointing": True}}
_ANY: Mapping[Recompute, Mapping[str, object]] = {"none": {}, "selective": {}, "full": {}}
_UPDATES: tuple[tuple[str, str, Mapping[str, object]], ...] = (
    ("released", "gradients released", {"release_gradients": True}),
    ("bf16", "weights in bf16", {"weights_dtype": "bf16"}),
)
_ALONE = {"num_processes": 1, "gradient_accumulation_steps": 1}
"""In place of what a way to train sets itself."""


def proposals(config: Config, world: World) -> list[Strategy]:
    """The streamed base where it is frozen, and what other strategies can have in addition; nothing on CPUs."""
    if world.device.startswith("cpu"):
        return []
    return [*_streamed(config, world), *_additions(config)]


def _streamed(config: Config, world: World) -> list[Strategy]:
    """The adapter on every rank, and the frozen weights of blocks in host memory; nothing where all weights train."""
    if config[ModelOptions].model_type != "lora":
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


def _additions(config: Config) -> Iterator[Strategy]:
    """Activations in host memory, gradients that are released, and weights in bf16, where this run would accept them.

    The plugins of the package can be chosen one by one, so that a run may lack the options of the others.
    """
    known = config.values().keys()
    if "offload_activations" in known:
        yield Strategy(
            name="activations",
            title="activations in host memory",
            options={"offload_activations": True},
            recompute={"full": {}},
            bytes={},
            offloaded=frozenset(("activations",)),
            added_to=frozenset(("ddp", "deepspeed", "fsdp2", "memory")),
        )
    if config[ModelOptions].model_type == "lora":
        return  # of an adapter there is little to save
    for name, title, options in _UPDATES:
        if not options.keys() <= known:
            continue
        accepting = config
        for option, value in {**_ALONE, **options}.items():
            accepting = accepting.chosen(option, value, "")
        if not problems(accepting):
            yield Strategy(
                name=name, title=title, options=options, recompute=_ANY, bytes={}, added_to=frozenset(("ddp", "fsdp2"))
            )
