"""Pages of the documentation as tests run them: fenced blocks, an account to type in, output compared with what is shown."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from support.forked_popen import forked_script
from support.nodes.namespaces import can_show

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CHANGING = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00|\b[0-9a-f]{16}\b|(?<=^precision   )\w+$")
"""Times of day and digests of configurations, and what a machine computes in: shown once, and different elsewhere."""


@dataclass(frozen=True)
class Block:
    """One fenced block. A file begins with a comment that names it."""

    kind: str
    text: str

    @property
    def file(self) -> str:
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def body(self) -> str:
        return self.text.partition("\n")[2]

    def commands(self) -> list[tuple[str, tuple[str, ...]]]:
        """The commands of a console block, each with the output that is shown for it. A backslash joins lines."""
        parts = re.split(r"^\$ ", self.text.replace("\\\n", ""), flags=re.MULTILINE)[1:]
        return [(part.splitlines()[0], tuple(part.splitlines()[1:])) for part in parts]


@dataclass(frozen=True)
class Typed:
    """A command of a page, what is shown below it there, and what came of it."""

    command: str
    shown: tuple[str, ...]
    status: int
    output: str

    def as_shown(self) -> bool:
        """Whether the output is what the page shows: line by line, but for spaces; `...` stands for anything.

        A command below which nothing is shown may print what it likes.
        """
        patterns = [r"(?:.*\n)*" if line == "..." else _pattern(line) + r"\n" for line in self.shown]
        printed = "".join(" ".join(line.split()) + "\n" for line in self.output.splitlines())
        return not patterns or re.fullmatch("".join(patterns), printed) is not None


def _pattern(line: str) -> str:
    parts = re.split(r" ?\.\.\. ?", " ".join(_CHANGING.sub("...", line).split()))
    return ".*".join(map(re.escape, parts))


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page of docs/."""
    return [Block(kind, text) for kind, text in _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))]


def commands(page: Sequence[Block]) -> list[str]:
    """All that a reader types, in order."""
    return [command for block in page if block.kind == "console" for command, _ in block.commands()]


def follow(page: Sequence[Block], folder: Path, environment: dict[str, str], *, leave: tuple[str, ...] = ()) -> list[Typed]:
    """Do what a page says, from top to bottom, in `folder`: write its files and type its commands into a shell.

    Of files that begin with one of `leave`, those that a command has created are not written: the page quotes from them.
    """
    typed = []
    for block in page:
        if block.kind == "console":
            for command, shown in block.commands():
                done = subprocess.run(
                    command,
                    shell=True,
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,  # in the order of a terminal
                    text=True,
                    timeout=240,
                )
                typed.append(Typed(command, shown, done.returncode, done.stdout))
        elif block.kind and not (block.file.startswith(leave) and (folder / block.file).exists()):
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
    return typed


def account(folder: Path, *, forked: bool = True) -> dict[str, str]:
    """An environment of its own, on top of this one, in which pip and smalti are found; its variables.

    `smalti` is forked from a process that has made the imports (`support.forked_popen`), if `forked`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    above = [path for path in sys.path if path.endswith("site-packages")]
    (site / "above.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in above))
    for name in ("pip", "pytest", "smalti"):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {name} "$@"\n')
        script.chmod(0o755)
    if forked and can_show():
        (folder / "bin" / "smalti").write_text(forked_script(site))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SMALTI_", "PYTEST_"))}
    return {
        **inherited,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as: without isolation
        "PIP_NO_WARN_CONFLICTS": "0",  # the same way: it does not look for conflicts among all that was there before
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
    }


def photos(folder: Path) -> None:
    """Eight pictures with captions."""
    folder.mkdir()
    for number in range(8):
        path = folder / f"{number}.png"
        Image.new("RGB", (32, 32), (30 * number, 100, 200 - 20 * number)).save(path)
        path.with_suffix(".txt").write_text(f"colour number {number}")
