"""What DeepSpeed compiles, for `smalti doctor`: toolkit, libraries, tools. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from smalti import Config, Finding, FindingLevel
from smalti.config import LaunchOptions
from smalti_deepspeed.checks import has_libaio, platform_problem
from smalti_deepspeed.options import enabled

_CHECK = "deepspeed"
_SECONDS = 10.0
_GPU_PARTS = "DeepSpeed's own optimizers on GPUs"


def deepspeed_findings(config: Config | None) -> list[Finding]:
    """For a run under DeepSpeed, or without a configuration: then what is missing is a note, because few runs need it."""
    if config is not None and not enabled(config):
        return []
    level: FindingLevel = "note" if config is None else "warning"
    if (platform := platform_problem()) is not None:
        return [Finding(check=_CHECK, level="note" if config is None else "error", message=platform.message, fix=platform.fix)]
    on_cpu = config is not None and config[LaunchOptions].use_cpu
    missing = [
        *([] if on_cpu else toolkit_problems(torch_cuda(), os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "")),
        *_tools(),
    ]
    found = [Finding(check=_CHECK, level=level, message=message, fix=fix) for message, fix in missing]
    return found or [Finding(check=_CHECK, level="ok", message="what DeepSpeed compiles can be compiled here")]


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for; None for other builds, and without torch."""
    spec = find_spec("torch")
    return cuda_of(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else None


def cuda_of(version_file: Path) -> str | None:
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return match[1] if match else None


def toolkit_version(tool: str) -> str | None:
    """The version of a CUDA toolkit by its nvcc; None if it does not say."""
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", said)
    return match[1] if match else None


def toolkit_problems(wanted: str | None, home: str = "") -> Iterator[tuple[str, str]]:
    """What is wrong with the CUDA toolkit for a torch that is built for the CUDA version `wanted`, with the fix.

    `home` is the value of CUDA_HOME. Without it, DeepSpeed takes the nvcc on the path, or that in /usr/local/cuda.
    """
    if wanted is None:
        return
    tool = (
        shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    )
    fix = f"install a CUDA toolkit of version {wanted} and set CUDA_HOME to it"
    if tool is None:
        yield f"no nvcc was found: {_GPU_PARTS} and offload to nvme on GPUs cannot be compiled", fix
    elif (version := toolkit_version(tool)) is None:
        yield f"{tool} does not say its version", fix
    elif version.partition(".")[0] != wanted.partition(".")[0]:
        yield f"{tool} is of CUDA {version}, and torch is built for CUDA {wanted}: {_GPU_PARTS} cannot be compiled", fix


def _tools() -> Iterator[tuple[str, str]]:
    if not has_libaio():
        fix = "install libaio with its headers (libaio-dev, libaio-devel)"
        yield "libaio is not installed: offload to nvme does not work", fix
    if find_spec("ninja") is None and shutil.which("ninja") is None:
        yield "ninja is not installed: nothing of DeepSpeed can be compiled", "pip install ninja"
    if shutil.which(os.environ.get("CXX") or "c++") is None and shutil.which("g++") is None:
        yield "no C++ compiler is installed: nothing of DeepSpeed can be compiled", "apt-get install g++"
