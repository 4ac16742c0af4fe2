"""The peak of a step as `smalti plan --rehearse` counts it: `python -m gpuday.planned ORDER` writes what a rank needs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from gpuday.steps import Order

_PHASES = ("forward", "backward", "clip", "step", "between")


def main(text: str) -> None:
    """The result: `peak` in bytes without allowances, and without encoders, which the steps have not. An error ends it."""
    order = Order(**json.loads(text))
    from smalti.cli.arguments import CommandLine
    from smalti.config import DataOptions, LaunchOptions, TrainingOptions
    from smalti.parallel import device_models
    from smalti_plan.here import named_device
    from smalti_plan.records import Candidate
    from smalti_plan.rehearsal.rehearse import rehearse

    line = CommandLine.parse(list(order.words))
    config, plugins, ranks = line.config(), line.plugins, line.config()[LaunchOptions].num_processes
    local = ranks // config[LaunchOptions].num_machines
    device = replace(device_models()["h100-80g"], kind="cpu") if order.rehearsed else named_device("detected", local)
    candidate = Candidate(
        micro_batch=config[DataOptions].train_batch_size, accumulation=config[TrainingOptions].gradient_accumulation_steps
    )
    found = rehearse(config, plugins, device, candidate, ranks=ranks, local=local)
    if found.error is not None:
        sys.exit(f"{found.error.message}\n{found.error.where}\n{found.error.traceback}")
    phases = [found.phases[name].device for name in _PHASES if name in found.phases]
    peak = max(each.total - each.frozen for each in phases)
    Path(order.result).write_text(json.dumps({"peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1])
