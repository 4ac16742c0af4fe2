"""In which precision a run computes. `--mixed_precision=auto` is bf16 where the device computes it natively, fp32 elsewhere.

The launcher decides once, before anything is planned, so that all ranks have the same and a run keeps it, wherever it is
resumed. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

from smalti.config import AUTOMATIC, Config, LaunchOptions, TrainingOptions
from smalti.errors import UserError
from smalti.parallel.devices import accelerator_kind, native_bf16
from smalti.rundir import RunDirectory
from smalti.system import load_json, read_regular

NAME = "mixed_precision"
Products = Literal["bf16", "tf32", "fp32"]
"""In what a device multiplies matrices. TF32 has the range of fp32, and 10 of its 23 bits of mantissa."""
_COST = "a matrix product takes up to 35 times as long as in fp32"
"""Measured on a processor with AVX2 only: 1.3 GFLOP/s a core against 44."""


def in_bf16(config: Config, kind: str | None = None) -> bool:
    """Whether the model computes in bf16. The same on all ranks of a run, for which it is decided.

    Where it is still "auto", devices of this kind decide; by default those that this machine would train on.
    """
    wanted = config[TrainingOptions].mixed_precision
    return native_bf16(kind or accelerator_kind(config)).native if wanted == "auto" else wanted == "bf16"


@cache
def is_rocm() -> bool:
    """Whether the torch that is installed is one for AMD's accelerators; found out without importing it."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return file is not None and file.is_file() and re.search(r"^hip\b.*=\s*['\"]", file.read_text(), re.MULTILINE) is not None


def products(config: Config, kind: str) -> Products:
    """How devices of this kind compute the matrix products of the trained model. Those without TF32 compute in fp32 instead.

    torch for ROCm takes TF32 from hipBLASLt only where a variable allows it.
    """
    if in_bf16(config, kind):
        return "bf16"
    lacking = is_rocm() and os.environ.get("HIPBLASLT_ALLOW_TF32") != "1"
    return "tf32" if kind == "cuda" and config[TrainingOptions].allow_tf32 and not lacking else "fp32"


def choose_precision(config: Config, kind: str, directory: RunDirectory) -> Config:
    """The configuration with "auto" replaced: by what the run in this directory has, else by what devices of this kind want."""
    if config[TrainingOptions].mixed_precision != "auto":
        return config
    if (earlier := _of_run(directory, several=config[LaunchOptions].num_machines > 1)) is not None:
        return config.chosen(NAME, earlier, "as this run has had it so far")
    return config.chosen(NAME, "bf16" if in_bf16(config, kind) else "no", native_bf16(kind).why)


def _of_run(directory: RunDirectory, *, several: bool) -> str | None:
    """What a run that has made steps was launched with; what machine 0 has decided, of one that has not; else None."""
    if directory.latest("step") is not None and directory.launch_file.exists():
        try:
            return cast(str, load_json(read_regular(directory.launch_file))["values"][NAME])
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{directory.launch_file} does not say in which precision the run computes: {error!r}"
            raise UserError(message, fix="--mixed_precision=bf16, or =no: as the run has had it so far") from error
    record = directory.record() if several else None
    return record.mixed_precision if record is not None else None


def describe(config: Config, kind: str) -> str:
    """The precision of a decided configuration with the reason: "bf16: this CPU computes it natively (amx_bf16)"."""
    source = config.source(NAME)
    why = source.removeprefix(AUTOMATIC) if source.startswith(AUTOMATIC) else f"from {source}"
    names = {"bf16": "bf16", "tf32": "fp32 with TF32 products", "fp32": "fp32"}
    return f"{names[products(config, kind)]}: {why}"


def cost_of(config: Config, kind: str) -> list[str]:
    """A notice if the run computes in bf16 where that is emulated."""
    if not in_bf16(config, kind) or (found := native_bf16(kind)).native:
        return []
    return [f"bf16 is emulated here: {found.why}, and {_COST}; --mixed_precision=no computes in fp32"]
