"""Optimizers, each with one fault: what the contract of optimizers has to find."""

from smalti import OptimizerEntry, hookimpl

NAMES = (
    "sound",
    "first_group",
    "uphill",
    "own_rate",
    "one_decay",
    "demanding",
    "random",
    "objects",
    "counting",
    "typed",
    "normed",
    "alone",
)


class FaultyOptimizers:
    @hookimpl
    def register_optimizers(self):
        return [
            OptimizerEntry(name=name, title=name, factory=f"smalti_faulty_steps:{name}", accepts=("weight_decay",))
            for name in NAMES
        ]


plugin = FaultyOptimizers()
