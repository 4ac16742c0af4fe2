"""Runs of small Flux, SDXL and SD3 models, by what they vary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

_ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
COMMON: dict[str, object] = {
    "resolution_type": "pixel",
    "learning_rate": 1e-3,
    "max_train_steps": 10,
    "validation_prompt": "a circle",
    "without": "plots",
}
SIZES: dict[str, dict[str, object]] = {
    "flux": {"resolution": 256, "tokenizer_max_length": 64},
    "sd3": {"resolution": 256, "tokenizer_max_length": 64},
    "sdxl": {"resolution": 256},
}


SMALL: dict[str, object] = {"resolution": 64, "tokenizer_max_length": 64}
"""Of the other families."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. `name` of the strategy is as `smalti plan` calls it, without "-offload"."""

    model: str
    strategy: str = "single"
    ranks: int = 1
    lora: bool = False
    bf16: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    micro: int = 1
    accumulation: int = 1
    ema: bool = False
    offload: bool = False
    terms: tuple[str, ...] = ()
    """Flags of terms of the loss."""

    def __str__(self) -> str:
        words = [self.model, "LoRA" if self.lora else "full", "bf16" if self.bf16 else "fp32"]
        words.append(f"{self.strategy} x{self.ranks}" if self.ranks > 1 else self.strategy)
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"batch {self.micro}x{self.accumulation}"] if (self.micro, self.accumulation) != (1, 1) else []
        words += [*(["EMA"] if self.ema else []), *(["offload"] if self.offload else []), *(["terms"] if self.terms else [])]
        return ", ".join(words)

    @property
    def local(self) -> int:
        """Ranks on a node, as far as the planner has to know it."""
        return 2 if self.strategy == "hsdp" else self.ranks

    @property
    def proposed(self) -> str:
        """The name of the strategy that the planner proposes."""
        name = {"hsdp": "hsdp-2", **{key: f"zero-{stage}" for key, stage in _ZERO.items()}}.get(self.strategy, self.strategy)
        return f"{name}-offload" if self.offload else name

    @property
    def options(self) -> dict[str, object]:
        """What the strategy needs."""
        found: dict[str, object] = {"num_processes": self.ranks}
        if self.strategy in _ZERO:
            zero: dict[str, object] = {"stage": _ZERO[self.strategy]}
            if self.offload:
                zero["offload_optimizer"] = {"device": "cpu"}
            found["deepspeed_config"] = json.dumps({"zero_optimization": zero})
        elif self.strategy in ("fsdp2", "hsdp"):
            found |= {"fsdp_enable": "true", "fsdp_shard_size": 2 if self.strategy == "hsdp" else self.ranks}
            if self.offload:
                found["fsdp_cpu_offload"] = "true"
            if self.recompute != "none":
                found |= {"fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_mode": self.recompute}
        if self.recompute == "full" and self.strategy not in ("fsdp2", "hsdp"):
            found["gradient_checkpointing"] = "true"
        return found

    def words(self, pipeline: object, folder: object) -> list[str]:
        """The words of `smalti train` for it."""
        values: dict[str, object] = {
            **COMMON,
            **SIZES.get(self.model, SMALL),
            **self.options,
            "model_family": self.model,
            "pretrained_model_name_or_path": pipeline,
            "instance_data_dir": folder,
            "output_dir": f"{folder}/run",
            "mixed_precision": "bf16" if self.bf16 else "no",
            "train_batch_size": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "use_ema": "true" if self.ema else "false",
        }
        values |= {"model_type": "lora", "lora_rank": 8} if self.lora else {}
        return [*(f"--{name}={value}" for name, value in values.items()), "--use_cpu", *self.terms]
