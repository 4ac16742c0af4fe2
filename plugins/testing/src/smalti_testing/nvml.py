"""GPUs without GPUs: a `libnvidia-ml.so.1` that reports what a text file says, for the real NVML bindings.

    fake = FakeNvml(folder)           # compiles the library with gcc, about a second
    fake.set("count 2", "temp.1 93")  # what the driver reports from now on
    subprocess.run(["smalti", "health"], env={**os.environ, **fake.environment})

The keys are listed in `nvml.c` beside this file.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

VARIABLE = "FAKE_NVML"
_SOURCE = Path(__file__).with_suffix(".c")


class FakeNvml:
    """Keeps the library and its control file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "libnvidia-ml.so.1"
        self.control = folder / "nvml.txt"
        if not self.library.exists():
            command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(self.library), str(_SOURCE)]
            subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1", "-lpthread"], check=True)
        self.set("count 1")

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to use it in place of a driver."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        return {"LD_LIBRARY_PATH": f"{self.library.parent}:{before}".rstrip(":"), VARIABLE: str(self.control)}

    def load(self) -> None:
        """Use it in this process, where no NVML was loaded before."""
        os.environ[VARIABLE] = str(self.control)
        ctypes.CDLL(str(self.library))

    def set(self, *lines: str) -> None:
        """Replace what the driver reports, in one step."""
        new = self.control.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.control)
