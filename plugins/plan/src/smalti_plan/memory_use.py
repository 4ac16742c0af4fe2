"""What filled the memory of a device when an allocation failed, and what a run can do about it: text from a small record.

Importing this module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_FRAGMENTED = 0.1
"""Fraction of torch's memory that is unused but fragmented: reported from here on."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device, as one rank knows them; None for what it cannot know.

    `phase` is what it was doing; `images` of `size` were in the micro-batch, 0 if there was none. `weights` train, `frozen`
    ones do not. `allocated` is all that torch uses, `idle` what it keeps and cannot use, `total` the device's. `replicated`:
    every rank holds the whole state. `recomputes`: the model can compute activations again. `expandable`: torch's allocator
    joins pieces already. `options` are the values of those that could help, as far as the run has them.
    """

    device: str
    phase: str
    requested: int | None = None
    images: int = 0
    size: str = ""
    weights: int = 0
    frozen: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    ema: int = 0
    allocated: int | None = None
    idle: int | None = None
    total: int | None = None
    ranks: int = 1
    replicated: bool = True
    recomputes: bool = False
    expandable: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def state(self) -> int:
        """What strategies can spread over ranks."""
        return self.weights + self.frozen + self.gradients + self.optimizer_state + self.ema

    @property
    def rest(self) -> int | None:
        """The rest: mostly activations."""
        return None if self.allocated is None else max(0, self.allocated - self.state)


def amounts(message: str) -> dict[str, int]:
    """What an error of torch's allocators says: `requested`, `allocated`, `idle` and `total`, as far as it does."""
    patterns = {
        "requested": rf"[Tt]ried to allocate {_AMOUNT}",
        "total": rf"total capacity of {_AMOUNT}",
        "allocated": rf"{_AMOUNT} is allocated by PyTorch",
        "idle": rf"{_AMOUNT} is reserved by PyTorch but unallocated",
    }
    found = {name: re.search(pattern, message) for name, pattern in patterns.items()}
    return {name: int(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match is not None}


def out_of_memory_message(use: MemoryUse) -> str:
    """What happened and what the memory was used for, over several lines."""
    asked = f" for {readable(use.requested)} more" if use.requested else ""
    batch = f", with {use.images} image{'s' * (use.images != 1)} of {use.size}" if use.images else ""
    lines = [f"out of memory on {use.device}: no room{asked} in the {use.phase}{batch}"]
    rows = {
        "weights that train": use.weights,
        "frozen weights": use.frozen,
        "gradients": use.gradients,
        "optimizer state": use.optimizer_state,
        "EMA": use.ema,
        "activations and all else": use.rest,
        "kept by torch, not usable": use.idle,
        "total of the device": use.total,
    }
    shown = {name: readable(size) for name, size in rows.items() if size}
    width = max((len(size) for size in shown.values()), default=0)
    lines += [f"    {name:<26}{size:>{width}}" for name, size in shown.items()]
    if use.weights and not use.gradients:
        lines.append(
            f"    still to come             {readable(use.weights):>{width}} of gradients, and then the optimizer state"
        )
    return "\n".join(lines)


def remedies(use: MemoryUse) -> str:
    """What would save how much, the largest first, each with what to type."""
    found = [text for _, text in sorted(_remedies(use), key=lambda each: -each[0])]
    found += _limits(use)
    return "any of these\n" + "\n".join(f"    {text}" for text in found) if found else "a device with more memory"


def readable(size: int | None) -> str:
    size = size or 0
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _limits(use: MemoryUse) -> Iterator[str]:
    """The memory of the accelerator as a limit, or a tenth less where a limit was given and was too much."""
    if use.total is None or use.device == "cpu" or "fit" not in use.options:
        return
    size = use.total if use.options["fit"] is None else use.total * 9 // 10
    yield (
        f"--fit={size // 10**9}GB: chooses what is fastest within that of streaming, sharding, recomputation, batches and the "
        "precision of frozen weights, where you set none of them"
    )


def _remedies(use: MemoryUse) -> Iterator[tuple[int, str]]:
    """Bytes that are saved, about, and the words."""
    if use.phase in ("forward pass", "backward pass"):
        yield from _for_activations(use)
    elif use.phase in ("sampling of validation images", "evaluation"):
        yield from _for_judging(use)
    yield from _for_state(use)
    if use.idle and not use.expandable and use.idle > _FRAGMENTED * (use.idle + (use.allocated or 0)):
        text = f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: {readable(use.idle)} lie idle in pieces"
        yield use.idle, text


def _for_activations(use: MemoryUse) -> Iterator[tuple[int, str]]:
    rest, options = use.rest or 0, use.options
    much = f"most of {readable(rest)}" if rest else "most of the activations"
    recomputed = options.get("gradient_checkpointing") or options.get("fsdp_activation_checkpointing")
    if use.recomputes and not recomputed:
        name = "gradient_checkpointing" if use.replicated else "fsdp_activation_checkpointing"
        if name in options:
            yield rest, f"--{name}: saves {much}, steps take about a third longer"
    if recomputed and options.get("offload_activations") is False:
        yield rest // 2, "--offload_activations: inputs of blocks wait in host memory, copied beside computation"
    batch, accumulation = options.get("train_batch_size"), options.get("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(accumulation, int) and batch > 1:
        smaller = batch // 2 if batch % 2 == 0 else 1
        times = batch // smaller
        saves = f"about {readable(rest - rest // times)}" if rest else f"{times - 1}/{times} of the activations"
        flags = f"--train_batch_size={smaller} --gradient_accumulation_steps={accumulation * times}"
        yield rest - rest // times, f"{flags}: saves {saves}, and the effective batch stays"


def _for_judging(use: MemoryUse) -> Iterator[tuple[int, str]]:
    batch = use.options.get("validation_batch_size")
    if isinstance(batch, int) and batch > 1:
        rest = use.rest or 0
        yield rest // 2, f"--validation_batch_size={batch // 2}: saves about half of what the images take"


def _flattened(options: Mapping[str, object]) -> bool:
    """Whether the strategy gives the optimizer flat slices of parameters."""
    with_deepspeed = options.get("deepspeed_config") not in (None, "none")
    return with_deepspeed or (bool(options.get("fsdp_enable")) and options.get("fsdp_version") == 1)


def _for_state(use: MemoryUse) -> Iterator[tuple[int, str]]:
    options = use.options
    if use.ema and options.get("ema_device") == "accelerator":
        yield use.ema, f"--ema_device=cpu: saves {readable(use.ema)}, each step copies the weights to the host"
    if options.get("optimizer") == "adamw" and use.weights and not _flattened(options):
        saved = (use.optimizer_state or 2 * use.weights) * 3 // 4
        yield saved, f"--optimizer=adamw8bit: saves {readable(saved)} of optimizer state, which starts empty"
    trained = use.weights + use.gradients + use.optimizer_state
    if "fsdp_enable" in options and use.replicated and trained:
        if use.ranks > 1:
            saved = use.state - use.state // use.ranks
            yield saved, f"--fsdp_enable: shards the state over {use.ranks} ranks, saves {readable(saved)} on each"
        else:
            yield use.state // 2, f"--fsdp_enable --num_processes=N: shards {readable(use.state)} of state over N devices"
    if options.get("fsdp_enable") and options.get("fsdp_cpu_offload") is False:
        yield trained, f"--fsdp_cpu_offload: saves up to {readable(trained)}, much slower"
    if options.get("model_type") == "lora":
        if use.frozen and use.replicated and options.get("base_model_precision") == "no_change":
            for precision, saved in (("int8-torchao", use.frozen // 2), ("nf4-torchao", use.frozen * 3 // 4)):
                yield saved, f"--base_model_precision={precision}: saves up to {readable(saved)} of frozen weights"
    elif options.get("model_type") == "full" and "lora_rank" in options:
        saved = use.gradients + use.optimizer_state + use.ema
        yield saved, f"--model_type=lora: trains an adapter, saves almost all of {readable(saved)}"
