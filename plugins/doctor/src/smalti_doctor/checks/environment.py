"""Environment variables that change what torch, NCCL and others do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping

import psutil

from smalti import Finding
from smalti_doctor.masking import Mask
from smalti_doctor.report import Section

_SHOWN = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|HIP|ROCR|HSA|RCCL|MIOPEN|OMP|MKL|KMP|GOMP|ATEN|ONEDNN"
    r"|DNNL|DS|DEEPSPEED|TRITON|HF|HUGGINGFACE|TRANSFORMERS|DIFFUSERS|ACCELERATE|SMALTI|SLURM|PYTHON|MALLOC|LD|AWS|UCX|FI)_\w+"
    r"|PYTHONPATH|PYTHONHOME|(?i:https?_proxy|no_proxy)|TMPDIR|XDG_CACHE_HOME|LANG|LC_ALL|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE"
)
_QUIET = re.compile(r"(SLURM|SMALTI|HF|AWS)_\w+|XDG_CACHE_HOME|TMPDIR|LANG|LC_ALL|PYTHON\w+")
"""In the facts, and in no finding: they are set on purpose, or change nothing in training."""


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


_WARNINGS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "CUDA_LAUNCH_BLOCKING": (_is_on, "every kernel is waited for, which makes steps much slower"),
    "NCCL_P2P_DISABLE": (_is_on, "GPUs of this node exchange data through host memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (_is_on, "GPUs of this node exchange data through the network stack"),
    "NCCL_IB_DISABLE": (_is_on, "nodes exchange data over sockets instead of InfiniBand"),
    "NCCL_BLOCKING_WAIT": (_is_on, "collective operations block the host"),
    "TORCH_NCCL_BLOCKING_WAIT": (_is_on, "collective operations block the host"),
    "TORCH_DISTRIBUTED_DEBUG": (
        lambda value: value.strip().upper() == "DETAIL",
        "each collective operation is checked, slowly",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_is_on, "each tensor is a call to the driver, which makes steps much slower"),
    "TORCH_SHOW_CPP_STACKTRACES": (_is_on, "errors are slow and long"),
    "AMD_SERIALIZE_KERNEL": (_is_on, "every kernel is waited for, which makes steps much slower"),
    "PYTHONHOME": (bool, "Python may load the library of another installation"),
}
"""Settings that are left over from a search for an error, or make training slow: when they count, and what they do."""


def environment(mask: Mask, values: Mapping[str, str] = os.environ) -> Section:
    shown = {name: mask.variable(name, value) for name, value in sorted(values.items()) if _SHOWN.fullmatch(name)}
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        if values.get(name):
            shown[name] = mask.variable(name, values[name])
    findings = [*_warnings(values), *_interfaces(values)]
    named = {finding.message.partition("=")[0] for finding in findings}
    listed = [f"{name}={value}" for name, value in shown.items() if name not in named and not _QUIET.fullmatch(name)]
    if listed:
        findings.append(Finding(check="environment", level="note", message=f"set: {', '.join(listed)}"))
    return Section(name="environment", facts=shown, findings=findings)


def _warnings(values: Mapping[str, str]) -> Iterator[Finding]:
    for name, (counts, what) in _WARNINGS.items():
        if name in values and counts(values[name]):
            message = f"{name}={values[name]}: {what}"
            yield Finding(check="environment", level="warning", message=message, fix=f"unset {name}")


def _interfaces(values: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that name network interfaces which this node does not have."""
    present = psutil.net_if_addrs()
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = values.get(name, "").strip()
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or not name.startswith("NCCL")
        wanted = [each.strip() for each in value.removeprefix("=").split(",") if each.strip()]
        missing = [each for each in wanted if not any(own == each if exact else own.startswith(each) for own in present)]
        if len(missing) == len(wanted) or (missing and exact):
            message = f"{name}={value}: this node has no interface {', '.join(missing)}, only {', '.join(sorted(present))}"
            yield Finding(
                check="environment", level="error", message=message, fix=f"unset {name}: smalti chooses the interface"
            )
