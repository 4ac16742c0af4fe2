"""Python, smalti and its plugins, and the packages that they need."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from smalti import Finding
from smalti.plugins import Plugins
from smalti_doctor.report import Section

_COMPILERS = ("c++", "g++", "clang++")


def installed_packages() -> dict[str, str]:
    """The version of every installed package by its name, sorted."""
    found: dict[str, str] = {}
    for each in distributions():
        name = each.metadata["Name"] if each.metadata is not None else None
        if name and name not in found:  # the first on the path is the one that is imported
            found[name] = each.version
    return dict(sorted(found.items(), key=lambda item: canonicalize_name(item[0])))


def software(plugins: Plugins) -> Section:
    packages = installed_packages()
    own = {name: text for name, text in packages.items() if re.match(r"smalti(-|_|$)", name)}
    findings = [
        Finding(check="python", level="ok", message=f"{platform.python_version()} ({sys.executable})"),
        *_lockstep(own),
        *_plugins(plugins),
        *_requirements(own),
        *_compiler(),
    ]
    facts = {"python": platform.python_version(), "executable": sys.executable, "system": platform.platform()}
    return Section(name="software", facts={**facts, "packages": packages}, findings=findings)


def _lockstep(own: dict[str, str]) -> Iterator[Finding]:
    core = own.get("smalti", "")
    others = {name: text for name, text in own.items() if text != core}
    if others:
        different = ", ".join(f"{name} {text}" for name, text in others.items())
        message = f"smalti is {core}, but {different}: packages of different releases"
        yield Finding(check="smalti", level="warning", message=message, fix="install all packages of the same release")
    else:
        names = ", ".join(name.removeprefix("smalti-") for name in own if name != "smalti")
        yield Finding(check="smalti", level="ok", message=f"{core}{f' with {names}' if names else ''}")


def _plugins(plugins: Plugins) -> Iterator[Finding]:
    for info in plugins.infos.values():
        if info.state in ("broken", "incompatible"):
            message = f"plugin {info.name!r} ({info.source}) is {info.state}: {info.reason}"
            yield Finding(check="plugins", level="warning", message=message, fix=info.origin.workaround)


def _requirements(own: dict[str, str]) -> Iterator[Finding]:
    """Packages that are missing, or have another version than smalti's packages need, directly or through others."""
    waiting, seen, clashes = list(own), set(map(canonicalize_name, own)), 0
    while waiting:
        name = waiting.pop(0)
        for requirement in _needed(name):
            present = _version(requirement.name)
            if present is None or not requirement.specifier.contains(present, prereleases=True):
                clashes += 1
                wanted = f"{requirement.name}{requirement.specifier}"
                message = (
                    f"{name} needs {wanted}, {f'but {present}' if present else 'which'} is {'' if present else 'not '}installed"
                )
                lacks = present is None and name in own
                yield Finding(
                    check="packages", level="error" if lacks else "warning", message=message, fix=f"pip install '{wanted}'"
                )
            if present is not None and (needed := canonicalize_name(requirement.name)) not in seen:
                seen.add(needed)
                waiting.append(needed)
    if not clashes:
        yield Finding(check="packages", level="ok", message=f"{len(seen)} packages, and their versions fit together")


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _needed(name: str) -> Iterator[Requirement]:
    """What an installed package requires on this node, without its extras."""
    for text in distribution(name).requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _compiler() -> Iterator[Finding]:
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    what = "torch.compile (--dynamo_backend) and DeepSpeed's own optimizers need it"
    if found is None:
        message = f"no C++ compiler is installed; {what}"
        yield Finding(check="compiler", level="note", message=message, fix="apt-get install g++, or load its module")
    elif not header.is_file():
        message = f"{found}; {header} is missing, which torch.compile needs on GPUs"
        fix = f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield Finding(check="compiler", level="note", message=message, fix=fix)
    else:
        yield Finding(check="compiler", level="ok", message=found)
