"""torch, the driver and the devices: whether they fit together."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from smalti import Finding, FindingLevel
from smalti.system import format_bytes
from smalti_doctor.child import ChildResult, run_in_child
from smalti_doctor.report import Section

SECONDS = 120.0
"""For importing torch and computing on each device; a network file system takes a minute."""
_TOOL_SECONDS = 20.0
_QUERY = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version", "mig.mode.current")
_RESERVED = 2 << 30
"""Nothing is computed on a GPU with less free memory than this: a run may need it."""
_INSTALL = "see docs/install.md for the build that fits to the driver"


@dataclass(frozen=True, kw_only=True)
class NvidiaGpu:
    """A line of nvidia-smi. Memory is in bytes."""

    index: int
    name: str
    uuid: str
    memory: int
    used: int
    driver: str
    mig: bool


@dataclass(frozen=True, kw_only=True)
class NvidiaDriver:
    """What nvidia-smi says: the GPUs, and the newest CUDA that the driver can run. `error` if it does not answer."""

    gpus: tuple[NvidiaGpu, ...] = ()
    cuda: str = ""
    error: str = ""

    @property
    def version(self) -> str:
        return self.gpus[0].driver if self.gpus else ""


def nvidia_driver() -> NvidiaDriver | None:
    """None if nvidia-smi is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        listed = _output(tool, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
        head = _output(tool)
    except subprocess.TimeoutExpired:
        return NvidiaDriver(error=f"nvidia-smi did not return within {_TOOL_SECONDS:g} s: the driver hangs")
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().splitlines()
        return NvidiaDriver(error=said[0] if said else f"nvidia-smi ended with status {error.returncode}")
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", head)
    return NvidiaDriver(gpus=tuple(_gpus(listed)), cuda=cuda[1] if cuda else "")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout


def _gpus(text: str) -> Iterator[NvidiaGpu]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_QUERY) and row[0].isdecimal():
            index, name, uuid, memory, used, driver, mig = row
            yield NvidiaGpu(
                index=int(index),
                name=name,
                uuid=uuid.removeprefix("GPU-"),
                memory=_mebibytes(memory),
                used=_mebibytes(used),
                driver=driver,
                mig=mig == "Enabled",
            )


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def devices(*, use_cpu: bool = False, seconds: float = SECONDS, root: Path = Path("/")) -> Section:
    """`use_cpu`: the run trains on the CPU on purpose. `root` is where /dev is."""
    driver = nvidia_driver()
    busy = [gpu.uuid for gpu in driver.gpus if 0 < gpu.memory < gpu.used + _RESERVED] if driver else []
    child = run_in_child("smalti_doctor.torch_facts", busy, seconds=seconds)
    facts = {"torch": dict(child.values), "nvidia": asdict(driver) if driver else None}
    return Section(name="devices", facts=facts, findings=device_findings(child, driver, use_cpu=use_cpu, root=root))


def device_findings(
    child: ChildResult, driver: NvidiaDriver | None, *, use_cpu: bool = False, root: Path = Path("/")
) -> list[Finding]:
    """What follows from what torch (`smalti_doctor.torch_facts`) and nvidia-smi say."""
    facts, findings = child.values, list(_of_torch(child))
    if driver is not None and driver.error:
        message = f"the NVIDIA driver does not answer: {driver.error}"
        fix = "check the driver (dmesg), or restart the node"
        findings.append(Finding(check="devices", level="note" if use_cpu else "error", message=message, fix=fix))
    if "kind" in facts:
        findings += _of_precision(facts)
        if facts["kind"] == "cpu":
            findings += _without(facts, driver, root, use_cpu=use_cpu)
        else:
            findings += _of_devices(facts, driver)
    return findings


def _of_torch(child: ChildResult) -> Iterator[Finding]:
    facts = child.values
    if child.state == "hung":
        message = f"importing torch or using its devices hangs: {child.error}"
        fix = "check the driver (nvidia-smi, dmesg), or restart the node; on a slow network file system start it again"
        yield Finding(check="torch", level="error", message=message, fix=fix)
    elif child.state == "failed":
        message = f"torch cannot be used: {child.error}"
        yield Finding(check="torch", level="error", message=message, fix=f"install torch again; {_INSTALL}")
    elif facts.get("missing"):
        yield Finding(check="torch", level="error", message="torch is not installed", fix=f"pip install torch; {_INSTALL}")
    elif reason := facts.get("broken"):
        message = f"torch cannot be imported: {reason}"
        yield Finding(check="torch", level="error", message=message, fix=f"install torch again; {_INSTALL}")
    else:
        yield Finding(check="torch", level="ok", message=f"{facts['version']}, {_build(facts)}")


def _build(facts: Mapping[str, object]) -> str:
    if facts.get("cuda"):
        return f"for CUDA {facts['cuda']}"
    return f"for ROCm {facts['hip']}" if facts.get("hip") else "a build for CPUs"


def _of_precision(facts: Mapping[str, object]) -> Iterator[Finding]:
    bf16 = cast(Mapping[str, object], facts["bf16"])
    chosen = "bf16" if bf16["native"] else "fp32"
    message = f"--mixed_precision=auto is {chosen}: {bf16['why']}"
    yield Finding(check="precision", level="ok" if bf16["native"] else "note", message=message)


def _without(facts: Mapping[str, object], driver: NvidiaDriver | None, root: Path, *, use_cpu: bool) -> Iterator[Finding]:
    """Why torch sees no accelerator."""
    level: FindingLevel = "note" if use_cpu else "error"
    nvidia = len(driver.gpus) if driver else len(list((root / "dev").glob("nvidia[0-9]*")))
    amd = root / "dev/kfd"
    if nvidia:
        yield _nvidia_unused(facts, driver, nvidia, level)
    elif amd.exists():
        yield _amd_unused(facts, amd, level)
    elif not (driver and driver.error):
        yield Finding(check="devices", level="note", message="no accelerator was found: training runs on the CPU")


def _nvidia_unused(facts: Mapping[str, object], driver: NvidiaDriver | None, count: int, level: FindingLevel) -> Finding:
    name = driver.gpus[0].name if driver and driver.gpus else "NVIDIA GPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    has = f"this node has {count} x {name}"
    if not facts.get("cuda"):
        message, fix = f"{has}, but torch {facts['version']} is {_build(facts)}", f"install torch for CUDA; {_INSTALL}"
    elif visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        message, fix = f"{has}, but CUDA_VISIBLE_DEVICES={visible!r} hides all of them", "unset CUDA_VISIBLE_DEVICES"
    elif driver and driver.cuda and _number(driver.cuda)[0] < _number(facts["cuda"])[0]:
        message = f"the driver {driver.version} runs CUDA {driver.cuda} at most, and torch is built for CUDA {facts['cuda']}"
        fix = f"update the driver, or install torch for CUDA {_number(driver.cuda)[0]}; {_INSTALL}"
    elif driver and any(gpu.mig for gpu in driver.gpus):
        message = f"{has}, and torch sees none: MIG is enabled"
        fix = "create instances (nvidia-smi mig -cgi ... -C), or disable MIG (nvidia-smi -mig 0)"
    else:
        said = [str(each) for each in cast(Sequence[object], facts["warnings"])]
        message = f"{has}, and torch sees none{f': {said[0]}' if said else ''}"
        fix = "check the driver (nvidia-smi) and, in a container, the NVIDIA container toolkit (docker run --gpus=all)"
    return Finding(check="devices", level=level, message=message, fix=fix)


def _amd_unused(facts: Mapping[str, object], device: Path, level: FindingLevel) -> Finding:
    if not facts.get("hip"):
        message = f"this node has an AMD GPU, but torch {facts['version']} is {_build(facts)}"
        return Finding(check="devices", level=level, message=message, fix=f"install torch for ROCm; {_INSTALL}")
    if not os.access(device, os.R_OK | os.W_OK):
        fix = "add the user to the groups render and video; in a container --device=/dev/kfd --device=/dev/dri"
        return Finding(check="devices", level=level, message=f"{device} cannot be opened: torch sees no AMD GPU", fix=fix)
    message = "this node has an AMD GPU, and torch sees none"
    return Finding(check="devices", level=level, message=message, fix="check the driver (rocm-smi) and HIP_VISIBLE_DEVICES")


def _of_devices(facts: Mapping[str, object], driver: NvidiaDriver | None) -> Iterator[Finding]:
    found = cast(Sequence[Mapping[str, Any]], facts["devices"])
    for each in found:
        yield _of_device(facts, each)
    if pairs := cast(Sequence[Sequence[int]], facts.get("without_peer_access", ())):
        possible = len(found) * (len(found) - 1) // 2
        which = "no two GPUs can" if len(pairs) == possible else f"{len(pairs)} of {possible} pairs of GPUs cannot"
        message = f"{which} read each other's memory: they exchange data through host memory"
        yield Finding(
            check="devices", level="note", message=message, fix="usual without NVLink; else see `nvidia-smi topo -p2p r`"
        )
    if driver is None or facts["kind"] != "cuda" or facts.get("hip"):
        return
    if len(driver.gpus) > len(found) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        seen = {each.get("uuid") for each in found}
        lost = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in driver.gpus if gpu.uuid not in seen)
        message = f"nvidia-smi lists {len(driver.gpus)} GPUs, and torch sees {len(found)}; not GPU {lost}"
        fix = "check `nvidia-smi -q` and dmesg for errors of these GPUs; cgroups of the job or container may hide them"
        yield Finding(check="devices", level="warning", message=message, fix=fix)
    if any(gpu.mig for gpu in driver.gpus):
        message = "MIG is enabled: a process uses one instance, and NCCL does not connect instances"
        yield Finding(check="devices", level="warning", message=message, fix="nvidia-smi -mig 0, to train on the whole GPU")


def _of_device(facts: Mapping[str, object], each: Mapping[str, Any]) -> Finding:
    name = f"{facts['kind']}:{each['index']} {each['name']}"
    if (error := each.get("error")) and "out of memory" in str(error).lower():
        fix = "end the programs that hold its memory; nvidia-smi lists them"
        return Finding(check="devices", level="warning", message=f"{name} has no free memory: {error}", fix=fix)
    if error:
        fix = "check the device (nvidia-smi, rocm-smi); leave it out with CUDA_VISIBLE_DEVICES"
        return Finding(check="devices", level="error", message=f"{name} cannot compute: {error}", fix=fix)
    if not runs_on(str(each.get("capability", "")), [str(name) for name in facts.get("compiled_for", ())]):  # type: ignore[attr-defined]
        message = f"{name} has compute capability {each['capability']}, for which torch {facts['version']} is not compiled"
        return Finding(check="devices", level="error", message=message, fix=f"install another build of torch; {_INSTALL}")
    memory = format_bytes(each["memory"]) if "memory" in each else "memory unknown"
    free = f", {format_bytes(each['free'])} free" if "free" in each else ""
    capability = f", compute capability {each['capability']}" if "capability" in each else ""
    in_use = "; in use, so nothing was computed on it" if each.get("in_use") else ""
    return Finding(check="devices", level="ok", message=f"{name}, {memory}{free}{capability}{in_use}")


def runs_on(capability: str, compiled_for: Sequence[str]) -> bool:
    """Whether binaries for these architectures ("sm_90", "compute_90") run on a device of this capability ("9.0").

    A binary runs on devices of its major version from its minor version on; an intermediate one ("compute") on later devices.
    Unknown names are taken to run.
    """
    if not capability or not compiled_for:
        return True
    device = _number(capability)
    for name in compiled_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            return True
        kind, built = match[1], (int(match[2]), int(match[3]))
        if kind == "compute" and not match[4] and built <= device:
            return True
        if kind == "sm" and built[0] == device[0] and built <= device:
            return True
    return False


def _number(text: object) -> tuple[int, int]:
    major, _, minor = str(text).partition(".")
    return int(major or 0), int(minor.split(".")[0] or 0)
