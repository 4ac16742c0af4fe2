"""The day of a GPU in a process whose children are forked: what its checks compute, without the time of the imports."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from support.nodes import forked_commands

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
PATHS = (ROOT / "tests", ROOT / "plugins/diffusers/tests")
IMPORTS = (
    *forked_commands.HEAVY[:-1],
    "smalti_plan.rehearsal.stage",
    "smalti_plan.command",
    "smalti_plan.rehearsal.child",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "tiny",
)
_begun: list[bool] = []


def day(words: Sequence[str], variables: Mapping[str, str], nvml: Path) -> tuple[int, str]:
    """`python -m gpuday --rehearse WORDS` with these variables: the exit code and what was printed.

    `nvml` is the folder in which `FakeNvml` has made a driver.
    """
    if not _begun:
        ctypes.CDLL(str(nvml / "libnvidia-ml.so.1"))  # where it lies would count only when a process starts
        forked_commands.FORKED |= {"gpuday", "smalti_plan"}
        forked_commands.start_children_from_fork()
        _begun.append(True)
    sys.path.insert(0, str(BENCH))
    from gpuday.__main__ import main

    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with redirect_stdout(StringIO()) as output:
            code = main(["--rehearse", *words])
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.path.remove(str(BENCH))
    return code, output.getvalue()
