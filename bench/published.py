"""Memory of runs that others have published, and what smalti's formulas say of the same settings: rows of bench/plan.md.

The models are those that smalti-diffusers ships the configurations of. No weights and no device are needed.
`python bench/published.py [WORD]` counts all rows, or those with this word.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

GIB, GB = 2**30, 10**9


class Row(NamedTuple):
    """`published` is in bytes. `recompute` and `strategy` are what the planner calls them."""

    title: str
    published: float
    family: str
    resolution: int
    strategy: str
    recompute: str
    micro_batch: int = 1
    ranks: int = 1
    flags: tuple[str, ...] = ()


LORA = ("--model_type=lora", "--lora_rank=16")
FACTOR = ("--optimizer=adafactor",)
ROWS = (
    Row("SD3 LoRA, 1024 px, b1, no recomputation", 34.6 * GIB, "sd3", 1024, "single", "none", flags=LORA),
    Row("SD3 LoRA, 1024 px, b1, recomputed by layer", 7.7 * GIB, "sd3", 1024, "single", "full", flags=LORA),
    Row("SDXL LoKr, 1024 px, b1, no recomputation", 13.0 * GIB, "sdxl", 1024, "single", "none", flags=LORA),
    Row("SDXL LoKr, 1024 px, b1, recomputed by layer", 6.5 * GIB, "sdxl", 1024, "single", "full", flags=LORA),
    Row("SDXL full, 1024 px, b8, ZeRO 2 offloaded", 13102 * 2**20, "sdxl", 1024, "zero-2-offload", "full", 8),
    Row("SDXL full, 128 px, b8, ZeRO 2 offloaded", 9237 * 2**20, "sdxl", 128, "zero-2-offload", "full", 8),
    Row("SDXL full, Adafactor fused, fp32", 16.4 * GB, "sdxl", 1024, "single", "full", flags=FACTOR),
    Row("SDXL full, Adafactor fused, bf16 weights", 10 * GB, "sdxl", 1024, "single", "full", flags=FACTOR),
    Row("SDXL full, 4 cards, ZeRO 3", 24 * GB, "sdxl", 1024, "zero-3", "full", 1, 4),
    Row("SDXL full, 8 cards, ZeRO 2", 24 * GB, "sdxl", 1024, "zero-2", "full", 1, 8),
    Row("FLUX.1 LoRA, 512 px, b1, bf16, compiled", 24.7 * GB, "flux", 512, "single", "full", flags=LORA),
    Row("FLUX.1 full, one 80 GB card", 80 * GB, "flux", 1024, "single", "full"),
    Row("FLUX.1 full, 4 x 80 GB, ZeRO 3", 80 * GB, "flux", 1024, "zero-3", "full", 1, 4),
    Row("FLUX.1 full, 8 x 96 GB, FSDP, b4", 78.4 * GIB, "flux", 1024, "fsdp2", "full", 4, 8),
)


def planned(row: Row, folder: Path) -> Any:
    """The row's way to train, by formulas, on H100s."""
    from smalti.cli.arguments import CommandLine
    from smalti.parallel import device_models
    from smalti.types import World
    from smalti_plan.choices import estimate, strategies_for
    from smalti_plan.counted import facts_of
    from smalti_plan.formulas.run_facts import RunFacts

    given = {
        "model_family": row.family,
        "resolution": row.resolution,
        "resolution_type": "pixel",
        "mixed_precision": "bf16",
        "train_batch_size": row.micro_batch,
        "num_processes": row.ranks,
        "output_dir": folder / "run",
        "max_train_steps": 1,
    }
    command_line = CommandLine.parse([*(f"--{name}={value}" for name, value in given.items()), *row.flags])
    config, plugins = command_line.config(), command_line.plugins
    device, world = device_models()["h100-80g"], World(size=row.ranks, local_size=row.ranks, device="cuda")
    [strategy] = [each for each in strategies_for(config, plugins, world) if each.name == row.strategy]
    run, model = RunFacts.of(config, plugins, "cuda"), facts_of(config, plugins, "cuda")
    return estimate(model, run, strategy, row.recompute, row.micro_batch, device, world)  # type: ignore[arg-type]


def main() -> None:
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if not all(word in row.title for word in words):
                continue
            found = planned(row, Path(folder))
            peak = found.counted.peak
            parts = ", ".join(
                f"{name} {getattr(peak, name) / GIB:.1f}"
                for name in ("parameters", "gradients", "optimizer", "activations", "gathered", "temporaries")
                if getattr(peak, name) > 0.05 * GIB
            )
            least, most = found.fit.least / GIB, found.fit.most / GIB
            print(f"| {row.title} | {row.published / GIB:.1f} | {least:.1f} to {most:.1f} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
