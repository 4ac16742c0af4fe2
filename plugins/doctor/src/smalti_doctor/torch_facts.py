"""What torch says about itself and its devices, as JSON. Runs in a child process: `python -m smalti_doctor.torch_facts`.

Arguments are UUIDs of GPUs that are in use: nothing is computed on them, because that takes memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from smalti.system import die_with_parent

if TYPE_CHECKING:
    from types import ModuleType

_SIZE = 64


def torch_facts(in_use: Collection[str] = ()) -> dict[str, object]:
    """The facts. If torch cannot be imported: `missing`, or `broken` with the reason."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return {"missing": True}
        return {"broken": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001 - whatever a library raises that does not fit to this node
        return {"broken": f"{type(error).__name__}: {error}"}
    from smalti.parallel import native_bf16

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = device.type if device is not None else "cpu"
        bf16 = native_bf16(kind)
    facts: dict[str, object] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "file": torch.__file__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kind": kind,
        "bf16": {"native": bf16.native, "why": bf16.why},
        "warnings": [str(each.message).strip().splitlines()[0] for each in said],
        "devices": [_device(torch, kind, index, in_use) for index in range(_count(torch, kind))],
    }
    if kind == "cuda":
        facts["without_peer_access"] = _without_peer_access(torch)
    if torch.version.cuda:
        facts["compiled_for"] = list(torch.cuda.get_arch_list())
        with suppress(RuntimeError, AttributeError):
            facts["driver_cuda"] = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        with suppress(RuntimeError, AttributeError):
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


def _count(torch: ModuleType, kind: str) -> int:
    return 0 if kind == "cpu" else int(torch.accelerator.device_count())


def _without_peer_access(torch: ModuleType) -> list[list[int]]:
    """The pairs of devices that cannot read each other's memory."""
    count, found = _count(torch, "cuda"), []
    with suppress(AttributeError, RuntimeError, AssertionError):
        for first in range(count):
            for second in range(first + 1, count):
                if not torch.cuda.can_device_access_peer(first, second):
                    found.append([first, second])
    return found


def _device(torch: ModuleType, kind: str, index: int, in_use: Collection[str]) -> dict[str, object]:
    module = torch.get_device_module(kind)
    facts: dict[str, object] = {"index": index, "name": kind}
    with suppress(AttributeError, RuntimeError):
        facts["name"] = str(module.get_device_name(index))
    with suppress(AttributeError, RuntimeError):
        properties = module.get_device_properties(index)
        facts["memory"] = int(properties.total_memory)
        if uuid := getattr(properties, "uuid", None):
            facts["uuid"] = str(uuid)
    with suppress(AttributeError, RuntimeError):
        facts["capability"] = ".".join(map(str, module.get_device_capability(index)))
    if facts.get("uuid") in in_use:
        return {**facts, "in_use": True}
    try:
        ones = torch.ones(_SIZE, _SIZE, device=f"{kind}:{index}")
        total = float((ones @ ones).sum().item())
        if total != _SIZE**3:
            facts["error"] = f"a product of matrices is wrong: {total:g} instead of {_SIZE**3}"
        with suppress(AttributeError, RuntimeError):
            facts["free"] = int(module.mem_get_info(index)[0])
    except (RuntimeError, AssertionError) as error:
        facts["error"] = str(error).strip().splitlines()[0]
    return facts


if __name__ == "__main__":
    die_with_parent()
    print(json.dumps(torch_facts(sys.argv[1:])))
