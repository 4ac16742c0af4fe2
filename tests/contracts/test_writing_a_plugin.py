"""The page on writing a plugin, followed from top to bottom: files written, commands typed, output compared."""

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-plugin.md"
EXCERPTS = "examples/plugin-template/"
PAGE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class PageBlock:
    """One fenced block. A file begins with a comment that names it."""

    kind: str
    text: str

    @property
    def file(self) -> str:
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def body(self) -> str:
        return self.text.partition("\n")[2]


@dataclass(frozen=True)
class Typed:
    """A command of the page, what is shown below it there, and what came of it."""

    command: str
    shown: tuple[str, ...]
    status: int
    output: str


BLOCKS = [PageBlock(kind, text) for kind, text in PAGE_BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


def commands(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """The commands of a console block, each with the output that is shown for it."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [(part.splitlines()[0], tuple(part.splitlines()[1:])) for part in parts]


def account(folder: Path) -> dict[str, str]:
    """An environment of its own, on top of this one, in which pip and smalti are found; its variables."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    above = [path for path in sys.path if path.endswith("site-packages")]
    (site / "above.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in above))
    for name in ("pip", "pytest", "smalti"):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {name} "$@"\n')
        script.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SMALTI_", "PYTEST_"))}
    return {
        **inherited,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as: without isolation
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
    }


def photos(folder: Path) -> None:
    """A folder of pictures with captions, and the same in a zip file."""
    (folder / "photos").mkdir()
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for number in range(8):
            path = folder / "photos" / f"{number}.png"
            Image.new("RGB", (32, 32), (30 * number, 100, 200 - 20 * number)).save(path)
            path.with_suffix(".txt").write_text(f"colour number {number}")
            archive.write(path, path.name)
            archive.write(path.with_suffix(".txt"), f"{number}.txt")


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> dict[str, Typed]:
    """Every command of the page by its text; a command that is typed twice counts the second time."""
    folder = tmp_path_factory.mktemp("cookbook")
    environment = account(tmp_path_factory.mktemp("account"))
    photos(folder)
    typed = {}
    for block in BLOCKS:
        if block.kind == "console":
            for command, shown in commands(block.text):
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
                )
                typed[command] = Typed(command, shown, done.returncode, done.stdout + done.stderr)
        elif not block.file.startswith(EXCERPTS):
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
    return typed


COMMANDS = dict.fromkeys(command for block in BLOCKS if block.kind == "console" for command, _ in commands(block.text))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_does_what_the_page_shows(followed, command):
    typed = followed[command]
    assert typed.status == 0, typed.output
    printed = [" ".join(line.split()) for line in typed.output.splitlines()]
    for line in typed.shown:
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        assert any(re.fullmatch(pattern.replace(r"\ .*", r".*"), each) for each in printed), f"{line!r} not in:\n{typed.output}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file.startswith(EXCERPTS)], ids=lambda block: block.file)
def test_an_excerpt_stands_in_the_template(block):
    assert block.body in (ROOT / block.file).read_text(encoding="utf-8")


def test_every_block_of_the_page_is_a_file_or_commands():
    strange = [block.text for block in BLOCKS if block.kind not in ("python", "toml", "console")]
    assert strange == []
    assert all(re.fullmatch(r"[\w./-]+\.(py|toml)", block.file) for block in BLOCKS if block.kind != "console")


def test_every_hook_that_the_page_names_exists():
    from smalti.hookspecs import HookSpecs

    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:on|register|declare|check|configure|detect|wrap|build|save|load|log)_[a-z_]+)`", text))
    helpers = {"build_model", "check_plugin"}
    assert sorted(named - set(vars(HookSpecs)) - helpers) == []
