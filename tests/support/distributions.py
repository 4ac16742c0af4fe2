"""Builds the wheel and the sdist of every package from the last commit, and tries them: `make dist`.

`python tests/support/distributions.py [--address=URL] [--build-only]` builds into dist/. Everything is built twice, in two
folders and with two umasks, and must be the same bytes. The wheel is made from the sdist. With the address of the repository,
the packages state it and the links of their READMEs lead there; without, those links become plain text, since an index has no
such files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def projects(tree: Path) -> list[Path]:
    """The folders of the packages."""
    return [tree / "core", *sorted(file.parent for file in tree.glob("plugins/*/pyproject.toml"))]


def commit_time(root: Path = ROOT) -> str:
    """Of the last commit, in seconds since 1970."""
    return _git(root, "log", "-1", "--format=%ct").decode().strip()


def export(tree: Path, address: str, root: Path = ROOT) -> None:
    """The files of the last commit, with READMEs and projects as an index shows them."""
    tree.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", tree], input=_git(root, "archive", "HEAD", "core", "plugins"), check=True)
    for folder in projects(tree):
        readme, project = folder / "README.md", folder / "pyproject.toml"
        below = folder.relative_to(tree)
        readme.write_text(for_index(readme.read_text(encoding="utf-8"), below, address), encoding="utf-8")
        if address:
            urls = f'\n[project.urls]\nRepository = "{address}"\nIssues = "{address}/issues"\n'
            project.write_text(project.read_text(encoding="utf-8") + urls, encoding="utf-8")


def for_index(text: str, folder: Path, address: str) -> str:
    """A README of a folder of the repository whose links lead to the address, or are plain text if there is none."""

    def link(found: re.Match[str]) -> str:
        words, target, place = found.groups()
        if not address:
            return words
        return f"[{words}]({address}/blob/HEAD/{os.path.normpath(folder / target)}{place or ''})"

    return LINK.sub(link, text)


def build(folder: Path, to: Path, *, seconds: str, umask: int = 0o022) -> None:
    """The sdist of a package, and the wheel of what the sdist has. Raises CalledProcessError with what hatchling said."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}

    def hatchling(kind: str, source: Path, place: Path) -> None:
        words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(place)]
        done = subprocess.run(words, cwd=source, env=environment, umask=umask, capture_output=True, text=True)
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        hatchling("sdist", folder, place)
        (sdist,) = place.glob("*.tar.gz")
        with tarfile.open(sdist) as tar:
            tar.extractall(place / "source", filter="data")
        (source,) = (place / "source").iterdir()
        hatchling("wheel", source, place)
        to.mkdir(parents=True, exist_ok=True)
        for made in (sdist, *place.glob("*.whl")):
            shutil.copyfile(made, to / made.name)


def differences(one: Path, other: Path) -> list[str]:
    """Names of the files that are not the same bytes in both folders."""
    names = sorted({path.name for folder in (one, other) for path in folder.iterdir()})
    contents = {
        name: [(each / name).read_bytes() if (each / name).is_file() else None for each in (one, other)] for name in names
    }
    return [name for name, (first, second) in contents.items() if first != second]


def missing(folder: Path, wheel: Path) -> list[str]:
    """Files below src/ that the wheel has not, and the licence if it has none."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    wanted = {path.relative_to(folder / "src").as_posix() for path in (folder / "src").rglob("*") if path.is_file()}
    licence = [] if any(name.endswith(".dist-info/licenses/LICENSE") for name in names) else ["LICENSE"]
    return [*sorted(wanted - names), *licence]


def build_all(to: Path, address: str) -> list[str]:
    """Build every package twice. What is wrong, in lines; [] if nothing is."""
    seconds, wrong = commit_time(), []
    with tempfile.TemporaryDirectory() as name:
        trees = {Path(name) / "a": 0o022, Path(name) / "another": 0o077}
        for tree in trees:
            export(tree, address)
        work = [(folder, tree / "made", umask) for tree, umask in trees.items() for folder in projects(tree)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda each: build(each[0], each[1], seconds=seconds, umask=each[2]), work))
        first, second = (tree / "made" for tree in trees)
        wrong += [f"{each}: two builds differ" for each in differences(first, second)]
        for folder in projects(first.parent):
            (wheel,) = first.glob(f"{_module(folder)}-*.whl")
            wrong += [f"{wheel.name}: lacks {each}" for each in missing(folder, wheel)]
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(first, to)
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(to.iterdir()))], capture_output=True, text=True
    )
    if checked.returncode != 0:
        wrong.append(f"twine check:\n{checked.stdout}{checked.stderr}")
    return wrong


def sizes(folder: Path) -> Iterator[str]:
    """A line for each package: kB of its wheel and of its sdist."""
    yield f"{'package':<24}{'wheel':>10}{'sdist':>10}"
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _ = wheel.name.split("-", 2)
        sdist = folder / f"{name}-{version}.tar.gz"
        yield f"{name + ' ' + version:<24}{wheel.stat().st_size / 1000:>7.0f} kB{sdist.stat().st_size / 1000:>7.0f} kB"


def _module(folder: Path) -> str:
    (module,) = (each.name for each in (folder / "src").iterdir() if each.is_dir())
    return module


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, install and try. The exit code: 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="", help="of the repository: https://HOST/OWNER/NAME")
    parser.add_argument("--build-only", action="store_true", help="install and try nothing")
    options = parser.parse_args(arguments)
    wrong = build_all(DIST, options.address.rstrip("/"))
    print(*sizes(DIST), sep="\n")
    if _git(ROOT, "status", "--porcelain"):
        print("note: files that are not committed are not in them")
    print(
        *wrong or ["Built twice: the same bytes. Every source file and the licence are in the wheels; twine finds nothing."],
        sep="\n",
    )
    if wrong or options.build_only:
        return 1 if wrong else 0
    import installs

    return installs.try_all(DIST)


if __name__ == "__main__":
    sys.exit(main())
