"""Compile what tests need compiled, before the tests: `PYTHONPATH=tests python -m support.compile_extensions`.

The devices of tests/accelerators. What DeepSpeed compiles when it is first needed: steps of optimizers in host memory, and
swapping to a drive, which needs libaio; where that is not installed, Debian's packages are unpacked below the virtual
environment, for which nobody has to be root. Where there are none either, the tests of swapping are skipped.
TORCH_EXTENSIONS_DIR says where what was compiled goes.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder

LIBAIO = Path(sys.prefix) / "libaio"
RUNTIMES = ("libaio1t64", "libaio1")
"""What the library itself is called in newer and in older releases."""


def main() -> None:
    from smalti_deepspeed.checks import has_libaio

    if not has_libaio() and unpack_libaio():
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the loader looks for folders of libraries when a process starts
    from smalti_plan.rehearsal.devices.fake_cuda import library

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops.op_builder as builders

    made = [builders.AsyncIOBuilder(), builders.PinMemoryBuilder(), builders.CPUAdamBuilder()]
    made += [builders.CPUAdagradBuilder(), builders.CPULionBuilder()] if os.environ.get("TEST_CASES") == "whole" else []
    # quick-c++ makes one compilation of each, so that several are compiled at a time. A forked process has the imports done.
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=compile_one, args=(builder,)) for builder in made if builder.is_compatible(verbose=False)]
    for process in running:
        process.start()
    library()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        sys.exit("an extension of DeepSpeed could not be compiled")


def compile_one(builder: OpBuilder) -> None:
    from smalti_deepspeed.compiling import compiled_one_at_a_time

    print(f"compiling DeepSpeed's {builder.name}", file=sys.stderr, flush=True)
    with compiled_one_at_a_time():
        builder.load(verbose=False)


def unpack_libaio() -> bool:
    """Into LIBAIO/include and LIBAIO/lib, where the Makefile has compiler and loader look. Whether it came there just now."""
    if LIBAIO.exists():
        return False
    with TemporaryDirectory() as name:
        place = Path(name)
        if not (fetched("libaio-dev", place) and any(fetched(runtime, place) for runtime in RUNTIMES)):
            print("libaio cannot be had here: swapping to a drive is not tested", file=sys.stderr)
            return False
        (LIBAIO / "lib").mkdir(parents=True)
        (LIBAIO / "include").mkdir()
        shutil.copy(place / "usr/include/libaio.h", LIBAIO / "include")
        [library] = (path for path in place.rglob("libaio.so.1.*") if not path.is_symlink())
        shutil.copy(library, LIBAIO / "lib/libaio.so.1")
        (LIBAIO / "lib/libaio.so").symlink_to("libaio.so.1")
    return True


def fetched(package: str, place: Path) -> bool:
    """Whether a package of Debian's could be unpacked there."""
    script = f"apt-get -q download {package} && dpkg-deb -x {package}_*.deb ."
    try:
        done = subprocess.run(["sh", "-c", script], cwd=place, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    main()
