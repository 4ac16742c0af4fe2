"""`python -m smalti_plan.probe` prints name, memory and free memory of the first accelerator as JSON; {} without one."""

from __future__ import annotations

import json


def accelerator() -> dict[str, object]:
    """Its name, and its memory and free memory in bytes; empty without one."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {}
    module = torch.get_device_module(device.type)
    properties = module.get_device_properties(0)
    memory = int(properties.total_memory)
    free = module.mem_get_info(0)[0] if hasattr(module, "mem_get_info") else memory
    return {"name": properties.name, "memory": memory, "free": int(free)}


if __name__ == "__main__":
    print(json.dumps(accelerator()))
