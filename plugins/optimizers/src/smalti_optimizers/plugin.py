"""The names of the optimizers of this package, and where each works."""

from __future__ import annotations

from smalti import OptimizerEntry, hookimpl


class Optimizers:
    """Registers them; `smalti.training` builds the one that `--optimizer` names."""

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        return [
            OptimizerEntry(
                name="adamw8bit",
                title="AdamW with its state in 8 bits",
                state_bytes=2.1,
                factory="smalti_optimizers.adamw8bit:AdamW8bit",
                flat=False,
            ),
            OptimizerEntry(
                name="stableadamw",
                title="StableAdamW, AdamW with the update clipping of Adafactor",
                state_bytes=8,
                factory="smalti_optimizers.stable_adamw:StableAdamW",
                flat=False,
            ),
            OptimizerEntry(
                name="prodigy",
                title="Prodigy, Adam that finds its learning rate",
                state_bytes=16,
                factory="smalti_optimizers.prodigy:Prodigy",
                accepts=("betas", "eps"),
                flat=False,
            ),
            OptimizerEntry(
                name="lion",
                title="Lion",
                state_bytes=4,
                factory="smalti_optimizers.lion:Lion",
                accepts=("betas", "weight_decay"),
            ),
        ]


plugin = Optimizers()
