"""`python -m smalti_plan.probe` prints name and memory of this node's first accelerator as JSON; {} if there is none."""

from __future__ import annotations

import json


def _accelerator() -> dict[str, object]:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {}
    module = torch.get_device_module(device.type)
    properties = module.get_device_properties(0)
    return {"name": properties.name, "memory": int(properties.total_memory)}


if __name__ == "__main__":
    print(json.dumps(_accelerator()))
