"""Our options in the words of Accelerate: the part of a launch's YAML that is about DeepSpeed."""

from __future__ import annotations

from smalti import Config
from smalti.config import LaunchOptions
from smalti_deepspeed.accelerate_import import KEYS
from smalti_deepspeed.config import resolved
from smalti_deepspeed.parsing import section


def fragment(config: Config) -> dict[str, object]:
    """What a DeepSpeed run puts into the user's Accelerate YAML; None takes a key out.

    Accelerate then starts the ranks with torch's launcher, one `smalti train` on each node; the rest of the section tells
    people and other tools what is trained.
    """
    document = resolved(config, world_size=config[LaunchOptions].num_processes)
    zero = section(document, "zero_optimization")
    offload = {
        "offload_optimizer": section(zero, "offload_optimizer"),
        "offload_param": section(zero, "offload_param"),
    }
    settings: dict[str, object] = dict.fromkeys(sorted(KEYS))
    settings |= {
        "zero_stage": zero.get("stage"),
        "gradient_accumulation_steps": document["gradient_accumulation_steps"],
        "gradient_clipping": document["gradient_clipping"],
        "zero3_init_flag": False,
        "deepspeed_multinode_launcher": "standard",
    }
    for name, each in offload.items():
        settings[f"{name}_device"] = each.get("device", "none")
        settings[f"{name}_nvme_path"] = each.get("nvme_path")
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": settings}
