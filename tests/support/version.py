"""The version, which all packages of this repository share, and their bounds: those of 0.2.3 need `>=0.2,<0.3` of each other.

`make version VERSION=0.3.0` writes it wherever it stands; tests/meta/test_packaging.py finds a place that was missed.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r'(?m)^((?:__version__ = |version = |version: )"?)\d+\.\d+\.\d+("?)$')
BOUNDS = re.compile(r"\b(smalti(?:-[a-z0-9-]+)?(?:\[[a-z0-9,]+\])?)>=\d+\.\d+,<\d+\.\d+")
STATING = ("core/pyproject.toml", "core/src/smalti/__init__.py", "plugins/*/pyproject.toml", "CITATION.cff")
"""Files that state the version."""
TELLING = ("docs/**/*.md", "plugins/testing/**/*.py", "plugins/testing/**/METADATA")
"""Files with bounds for plugins of others."""


def current(root: Path = ROOT) -> str:
    """The version of the core, which is that of all packages."""
    project = tomllib.loads((root / "core" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def bounds(version: str) -> str:
    """What a package of this version requires of another: `>=0.2,<0.3`."""
    major, minor, _ = version.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def rewritten(version: str, root: Path = ROOT) -> dict[Path, str]:
    """The files that a version changes, with their new text."""
    texts = {}
    for pattern in (*STATING, *TELLING):
        for path in sorted(root.glob(pattern)):
            before = path.read_text(encoding="utf-8")
            after = BOUNDS.sub(rf"\g<1>{bounds(version)}", before)
            if pattern in STATING:
                after = VERSION.sub(rf"\g<1>{version}\g<2>", after)
            if after != before:
                texts[path] = after
    return texts


def main(version: str) -> None:
    """Write the version into all files, or print it if none is given. Exits if it is no version of three numbers."""
    if not version:
        print(current())
        return
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version!r} is no version of three numbers\n  fix: make version VERSION=0.3.0")
    for path, text in rewritten(version).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
