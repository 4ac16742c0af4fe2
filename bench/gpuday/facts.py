"""The hardware of this node, in a process of its own: `python -m gpuday.facts` prints it as JSON."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("smalti", "torch", "diffusers", "accelerate", "deepspeed", "torchao", "triton")


def facts() -> dict[str, object]:
    """`device`, `gpus`, `memory` of each in GiB, `driver`, `cuda`, and the versions of packages."""
    import torch

    found: dict[str, object] = {"device": "cpu", "gpus": 0, "memory": 0.0, "driver": None, "cuda": torch.version.cuda}
    found |= {"python": platform.python_version(), "host": platform.node()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "gpus": torch.cuda.device_count(), "memory": properties.total_memory / 2**30}
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        answer = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # noqa: BLE001 - whatever a driver's package raises is what the report says of it
        return f"unknown: {error}"
    return answer.decode() if isinstance(answer, bytes) else str(answer)


if __name__ == "__main__":
    print(json.dumps(facts()))
