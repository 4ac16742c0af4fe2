"""Which package of this project adds what, so that a message about something missing can say what to install.

This is all that the core knows about the plugins, which cannot be asked while they are not installed. The table is written by
`tests/support/package_table.py` from what the plugins declare, and a test compares it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from smalti.errors import MissingPlugin, Problem

Kind = Literal["options", "commands", "caches", "families", "optimizers", "storages", "dataset_keys", "accelerate", "schemes"]


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package of the project, with the names of what it adds.

    `commands` are those of `smalti`, and with the name of a group before it, those that it adds to a group.
    `folder` is its folder below plugins/, if that is not called as the plugin is. `needs` are the plugins of packages that it
    depends on, which pip does not find by itself while they are on no index.
    `accelerate` has sections of an Accelerate YAML and values of its `distributed_type`. `checkpoints` has (pattern, format):
    files that mark a folder as a checkpoint of that format. `strategy` is the title of its distributed plan. `schemes` are
    those of URLs that it takes in place of paths. `nodes` has (index, count) of variables by which a launcher of several nodes
    says which of how many this is.
    """

    plugin: str
    folder: str = ""
    needs: Sequence[str] = ()
    options: Sequence[str] = ()
    commands: Sequence[str] = ()
    caches: Sequence[str] = ()
    families: Sequence[str] = ()
    optimizers: Sequence[str] = ()
    storages: Sequence[str] = ()
    dataset_keys: Sequence[str] = ()
    accelerate: Sequence[str] = ()
    checkpoints: Sequence[tuple[str, str]] = ()
    strategy: str = ""
    schemes: Sequence[str] = ()
    nodes: Sequence[tuple[str, str]] = ()

    @property
    def distribution(self) -> str:
        return f"smalti-{(self.folder or self.plugin).replace('_', '-')}"

    @property
    def target(self) -> str:
        """What `pip install` takes, as a shell reads it; empty if the package is installed."""
        if installed(self.distribution):
            return ""
        clone, repository, folder = _clone(), _repository(), f"plugins/{self.folder or self.plugin}"
        place = f"{self.distribution} @ {repository}#subdirectory={folder}" if repository else self.distribution
        own = place if clone is None else str(clone / folder)
        return " ".join((quote(own), *filter(None, (PLUGINS[each].target for each in self.needs))))

    def problem(self, message: str, where: str) -> Problem:
        """A problem of the configuration: something needs this package."""
        return Problem(message=message, where=where, fix=self.fix, package=self.distribution, install=self.target)

    def error(self, message: str) -> MissingPlugin:
        """The same as an exception."""
        return MissingPlugin(message, fix=self.fix)

    @property
    def fix(self) -> str:
        """How to get the package."""
        if not self.target:
            return f"the plugin {self.plugin!r} is installed but disabled: remove it from `without`, or add it to `plugins`"
        return f"pip install {self.target}"


PACKAGES = tuple(Package(**entry) for entry in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
PLUGINS = {package.plugin: package for package in PACKAGES}


@cache
def installed(name: str) -> bool:
    """Whether a distribution is installed, active or not."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _installed_from() -> dict[str, Any]:
    """Where pip has installed smalti from; empty for a package index. pip writes it into the installed package (PEP 610)."""
    written = distribution("smalti").read_text("direct_url.json")
    return dict(json.loads(written)) if written else {}


def _repository() -> str:
    """The repository and commit that smalti was installed from, as pip takes it; empty if it was not."""
    source = _installed_from()
    vcs = source.get("vcs_info")
    return f"{vcs['vcs']}+{source['url']}@{vcs['commit_id']}" if vcs else ""


def _clone() -> Path | None:
    """The clone that smalti was installed from, if it is on this machine."""
    source = _installed_from()
    url = urlsplit(source["url"]) if source else None
    if url is None or url.scheme != "file" or "vcs_info" in source:
        return None
    root = Path(unquote(url.path)).parent
    return root if (root / "plugins").is_dir() else None


def package_of(kind: Kind, name: str) -> Package | None:
    """The package that adds what is called so, of this kind.

    An option may be named by an alias, a command is "s3" or "dataset unpack", and "storages" are metadata backends too.
    "accelerate" are sections of an Accelerate YAML and values of its `distributed_type`.
    """
    return next((package for package in PACKAGES if name in getattr(package, kind)), None)


def package_of_topic(word: str) -> Package | None:
    """The package with an option that has a part beginning with this word in its name: "fsdp", "lora"."""
    part = f"_{word.lower().replace('-', '_')}"
    return next((each for each in PACKAGES if any(part in f"_{name}" for name in each.options)), None)


def package_of_family(name: str) -> Package | None:
    """The package that has this model family."""
    return package_of("families", name.lower().replace("-", "_"))


def family_packages() -> str:
    """The families of each package and how to install it, for a machine without any family."""
    return "; or ".join(f"{', '.join(package.families)}: {package.fix}" for package in PACKAGES if package.families)


def package_of_nodes() -> Package:
    """The package that launches on several nodes."""
    return next(package for package in PACKAGES if package.nodes)


def variable_of_nodes(environment: Mapping[str, str]) -> str:
    """The variable by which this process is on one of several nodes, as NAME=COUNT; "" if there is none."""
    for index, count in package_of_nodes().nodes:
        if index in environment and (value := environment.get(count, "")).isdigit() and int(value) > 1:
            return f"{count}={value}"
    return ""


def strategies(types: Iterable[str], distributions: Iterable[str]) -> list[str]:
    """The titles of the strategies with one of these `distributed_type`s or from one of these distributions."""
    found, wanted = frozenset(types), frozenset(distributions)
    candidates = [package for package in PACKAGES if package.strategy]
    return [each.strategy for each in candidates if found.intersection(each.accelerate) or each.distribution in wanted]
