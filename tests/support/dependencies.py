"""Runs the tests with other versions of dependencies, for a weekly job: the newest ones, or the lowest that are declared.

`python tests/support/dependencies.py newest [--hold torch] [--tests tests/unit/config]` works in a clone of the last commit, in
an environment of its own. There the newest versions may be beyond the declared bounds. It says which versions were installed;
if tests fail, it names the packages with which alone they fail too. The exit code is 1 if tests fail.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
UPPER = re.compile(r'("(?!smalti)[A-Za-z0-9_.-]+>=[\d.]+),<[\d.]+"')
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "hypothesis", "playwright", "axe-playwright-python")
"""What tests themselves need: a newer one says nothing of smalti."""
FAILURES = 40
"""Failed tests that are tried again, at most."""


def requirements(project: Path) -> list[Requirement]:
    """All that a package asks for: to run, with its extras, and to be built."""
    read = tomllib.loads(project.read_text(encoding="utf-8"))
    stated = read["project"]
    groups = (stated["dependencies"], *stated.get("optional-dependencies", {}).values(), read["build-system"]["requires"])
    return [Requirement(each) for group in groups for each in group]


def declared(root: Path) -> dict[str, SpecifierSet]:
    """The bounds of each package of others, by its canonical name."""
    projects = (root / "core" / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml")))
    needs = [need for project in projects for need in requirements(project)]
    return {canonicalize_name(need.name): need.specifier for need in needs if not need.name.startswith("smalti")}


def pins(text: str) -> dict[str, str]:
    """Exact versions in lines such as those of constraints.txt and `pip freeze`, by canonical name."""
    found = (line.partition("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): number.partition("+")[0].strip() for name, _, number in found}


def is_tested(name: str) -> bool:
    """Whether the version of constraints.txt is installed, with all of whose names and defaults ours are compared."""
    return version(name) == pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))[name]


def lowest(bounds: SpecifierSet) -> str:
    """The lower bound."""
    return next(each.version for each in bounds if each.operator == ">=")


def planned(which: str, bounds: Mapping[str, SpecifierSet], tested: Mapping[str, str], hold: Sequence[str]) -> dict[str, str]:
    """The constraints of an environment: what is held, the tools, and, for the lowest versions, everything else too."""
    if which == "newest":
        return {name: number for name, number in tested.items() if name in (*hold, *TOOLS)}
    low = {name: lowest(each) for name, each in bounds.items() if name not in (*hold, *TOOLS)}
    return {**{name: number for name, number in tested.items() if name in (*hold, *TOOLS)}, **low}


def loosen(root: Path) -> None:
    """Remove the upper bounds of packages of others."""
    for project in (root / "core" / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")):
        project.write_text(UPPER.sub(r'\1"', project.read_text(encoding="utf-8")), encoding="utf-8")


class Clone:
    """A clone of the last commit with an environment of its own."""

    def __init__(self, place: Path, tests: Sequence[str]) -> None:
        self.place, self.tests = place, list(tests)
        subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)

    def install(self, constraints: Mapping[str, str]) -> bool:
        """Install everything within these constraints. Whether they go together."""
        loosen(self.place)
        lines = "".join(f"{name}=={number}\n" for name, number in constraints.items())
        (self.place / "constraints.txt").write_text(lines, encoding="utf-8")
        installed = subprocess.run(["make", ".venv/dev.done"], cwd=self.place, check=False).returncode == 0
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=self.place, check=True)  # tests read the files of the commit
        for done in self.place.glob(".venv/*.done"):
            done.touch()
        return installed

    def versions(self) -> dict[str, str]:
        """Of what is installed."""
        words = [self.place / ".venv/bin/python", "-m", "pip", "freeze", "--exclude-editable"]
        return pins(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    def passes(self, tests: Sequence[str] = ()) -> bool:
        """Whether these tests pass; without any, those of the command line, or all."""
        chosen = tests or self.tests
        quick = ("-o", ".venv/compiled.done") if chosen else ()
        words = ["make", *quick, "test", f"ARGS={' '.join(['--maxfail=0', *map(_quoted, chosen)])}"]
        return subprocess.run(words, cwd=self.place, check=False).returncode == 0

    def failed(self) -> list[str]:
        """Tests that failed in the last run."""
        file = self.place / ".pytest_cache/v/cache/lastfailed"
        return list(json.loads(file.read_text(encoding="utf-8")))[:FAILURES] if file.is_file() else []


def _quoted(word: str) -> str:
    return "'" + word.replace("$", "$$") + "'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, test, and name what broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("newest", "lowest"))
    parser.add_argument("--hold", nargs="*", default=[], metavar="PACKAGE", help="keep the version of constraints.txt")
    parser.add_argument("--tests", nargs="*", default=[], metavar="PATH", help="not all tests but these")
    options = parser.parse_args(arguments)
    bounds, tested = declared(ROOT), pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    hold = [canonicalize_name(name) for name in options.hold]
    with tempfile.TemporaryDirectory() as place:
        clone = Clone(Path(place) / "smalti", options.tests)
        if not clone.install(planned(options.which, bounds, tested, hold)):
            print(f"The {options.which} versions cannot be installed together; pip's words are above.")
            return 1
        found = clone.versions()
        changed = {name: found[name] for name in bounds if name in found and found[name] != tested.get(name)}
        for name, number in sorted(changed.items()):
            beyond = "" if Version(number) in bounds[name] else f", beyond the declared {bounds[name]}"
            print(f"{name}: {tested.get(name, 'not tested')} -> {number}{beyond}")
        if clone.passes():
            print(f"All tests pass with the {options.which} versions.")
            return 0
        _name_culprits(clone, changed, tested, bounds)
        return 1


def _name_culprits(clone: Clone, changed: Mapping[str, str], tested: Mapping[str, str], bounds: Collection[str]) -> None:
    """Try the failed tests with each changed package alone, and print which of them fail."""
    failed = clone.failed()
    print("Failed:", *failed or ["nothing that pytest could name"], sep="\n  ")
    broke = []
    for name, number in changed.items() if failed else ():
        alone = {each: tested[each] for each in tested if each in (*bounds, *TOOLS)}  # with what goes with it of its own needs
        installed = clone.install({**alone, name: number})
        if not installed or not clone.passes(failed):
            broke.append(f"{name} {number}" + ("" if installed else " (does not go with the other tested versions)"))
    print("Packages with which alone they fail:", *broke or ["none: it takes several"], sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
