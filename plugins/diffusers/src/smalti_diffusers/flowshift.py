"""How far the pipeline's scheduler moves times towards noise. For families of rectified flow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from smalti.diffusion import ConstantShift, ResolutionShift, Shift


def scheduler_shift(scheduler: Mapping[str, object]) -> Shift:
    """The shift that a scheduler's configuration, as its file has it, gives images of each size.

    What is not said is what diffusers takes then. A schedule that is stretched to
    end above 0 (`shift_terminal`) trains as one that is not: how it ends is a matter of the number of steps.
    """

    def said(name: str, default: float) -> float:
        value = scheduler.get(name)
        return default if value is None else cast(float, value)

    if not scheduler.get("use_dynamic_shifting"):
        # The name is another one in the schedulers of multistep solvers, which Sana has.
        return ConstantShift(value=said("shift", said("flow_shift", 1.0)))
    return ResolutionShift(
        base_tokens=int(said("base_image_seq_len", 256)),
        base_mu=said("base_shift", 0.5),
        max_tokens=int(said("max_image_seq_len", 4096)),
        max_mu=said("max_shift", 1.15),
        exponential=scheduler.get("time_shift_type") != "linear",
    )
