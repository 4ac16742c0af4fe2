"""Finding and loading plugins: entry points, selection and versions, in the same order on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from traceback import extract_tb

from smalti.config import PLUGINS
from smalti.errors import BrokenPlugin, MissingPlugin, UserError, did_you_mean
from smalti.plugins.registry import PluginInfo, Plugins, State
from smalti.system import plugin_output

GROUP = "smalti.plugins"

BUILT_IN = {
    "core": "smalti.builtin.core",
    "commands": "smalti.cli.commands",
    "ddp": "smalti.builtin.ddp",
    "events": "smalti.builtin.run_directory",
    "console": "smalti.builtin.console",
}
ESSENTIAL = frozenset({"core", "commands", "ddp", "events"})


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which plugins to use. An empty `only` means all installed plugins. "all" in `without` disables all but the built-in ones.

    What the package of a plugin in `only` depends on is used too. Raises UserError if a plugin is both selected and disabled.
    """

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        third_party = [name for name in self.only if name not in BUILT_IN]
        both = [name for name in self.only if name in self.without] or (third_party if "all" in self.without else [])
        if both:
            raise UserError(
                f"plugin {both[0]!r} is both selected and disabled", fix="remove it from --plugin or from --without"
            )

    def excludes(self, name: str) -> State | None:
        """The state of a third-party plugin that is not selected; None if it is selected."""
        if name in self.without or "all" in self.without:
            return "blocked"
        needed = {need for each in self.only if each in PLUGINS for need in PLUGINS[each].needs}
        return "not selected" if self.only and name not in self.only and name not in needed else None


def load_plugins(selection: Selection | None = None, *, strict: bool = True) -> Plugins:
    """The built-in and the selected installed plugins, in the same order on every machine.

    With `strict`, one that cannot be imported, does not fit this version or is in two packages stops with its name, package,
    version, the reason and the way round. Without, it is only listed as such (for `smalti plugins`).
    """
    selection = selection or Selection()
    plugins = Plugins()
    _register_built_ins(plugins, selection)
    installed = _installed(tuple(sys.path))
    _check_names(selection, set(installed))
    for name, found in installed.items():
        entries = [replace(each, info=replace(each.info)) for each in found]
        info = plugins.infos.setdefault(name, entries[0].info)
        if name in BUILT_IN:
            _refuse(info, f"{entries[0].info.source} has a plugin of the same name", entries, strict=strict)
        elif (state := selection.excludes(name)) is not None:
            info.state = state
        elif len(entries) > 1:
            info.state = "broken"
            sources = " and ".join(each.info.source for each in entries)
            _refuse(info, f"two packages provide it: {sources}", entries, strict=strict)
        else:
            _load(plugins, entries[0], strict=strict)
    return plugins


def _register_built_ins(plugins: Plugins, selection: Selection) -> None:
    own = version("smalti")
    if blocked := ESSENTIAL.intersection(selection.without):
        raise UserError(f"{', '.join(sorted(blocked))} cannot be disabled: nothing would train", fix="remove it from --without")
    for name, module in BUILT_IN.items():
        info = plugins.infos[name] = PluginInfo(name=name, distribution="smalti", version=own, built_in=True)
        if name in selection.without:
            info.state = "blocked"
        else:
            plugins.register(info, import_module(module).plugin)


@dataclass(frozen=True)
class _Installed:
    """An entry point, and what is needed of its package's metadata: importlib parses them whenever it is asked for one."""

    entry: EntryPoint
    info: PluginInfo
    requires: Sequence[str]


@cache
def _installed(path: tuple[str, ...]) -> dict[str, list[_Installed]]:
    """Third-party entry points by name, sorted: the order on disk differs between machines.

    They are kept for each `path` on which modules are looked for: `sys.path`, which can change. One package that is found twice
    on it, as an editable install can be, counts once.
    """
    found: dict[str, dict[str, _Installed]] = {}
    for entry in entry_points(group=GROUP):
        assert entry.dist is not None, "an entry point that was discovered has a distribution"
        metadata = entry.dist.metadata
        info = PluginInfo(name=entry.name, distribution=metadata["Name"], version=metadata["Version"])
        each = _Installed(entry, info, entry.dist.requires or ())
        found.setdefault(entry.name, {}).setdefault(info.distribution, each)
    return {name: [entries[package] for package in sorted(entries)] for name, entries in sorted(found.items())}


def _refuse(info: PluginInfo, reason: str, entries: Sequence[_Installed], *, strict: bool) -> None:
    """Report a name that two packages use."""
    info.reason = reason
    if strict:
        workaround = "" if info.name in BUILT_IN else f", or disable both with --without {info.name}"
        raise UserError(f"plugin {info.name!r}: {reason}", fix=f"pip uninstall {entries[-1].info.distribution}{workaround}")


def _check_names(selection: Selection, installed: set[str]) -> None:
    known = installed | set(BUILT_IN)
    for name in (*selection.only, *selection.without):
        may_be_missing = name in selection.without and (name == "all" or name in PLUGINS)
        if name not in known and not may_be_missing:
            raise unknown_plugin(name, known)


def unknown_plugin(name: str, known: Iterable[str]) -> UserError:
    """The error for a plugin that is not installed, with the package to install or similar names."""
    if name in PLUGINS:
        return PLUGINS[name].error(f"the plugin {name!r} is not installed")
    hint = did_you_mean(name, sorted({*known, *PLUGINS}), count=3) or f"installed: {', '.join(sorted(known))}"
    return MissingPlugin(f"unknown plugin {name!r}", fix=hint)


def _load(plugins: Plugins, installed: _Installed, *, strict: bool) -> None:
    info = installed.info
    workaround = f"disable it with --without {info.name}"
    if (mismatch := _version_mismatch(installed, plugins.infos["core"].version)) is not None:
        info.state, info.reason = "incompatible", mismatch
        if strict:
            raise UserError(f"plugin {info.name!r}: {mismatch}", fix=f"pip install -U {info.distribution}, or {workaround}")
        return
    try:
        with plugin_output():
            plugins.register(info, installed.entry.load())
    except (Exception, SystemExit) as error:
        info.state, info.reason = "broken", _what_happened(error)
        if strict:
            message = f"plugin {info.name!r} ({info.source}) cannot be loaded: {info.reason}"
            raise BrokenPlugin(message, fix=f"fix or update {info.distribution}, or {workaround}") from error


def _what_happened(error: BaseException) -> str:
    """The error in one line, with its place in the plugin."""
    text = (
        f"exits at import with status {error.code!r}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    )
    own = str(Path(__file__).parent)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(("<frozen", own))]
    places = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{text} (at {places[-1].filename}:{places[-1].lineno})" if places else text


def _version_mismatch(installed: _Installed, own: str) -> str | None:
    """The version of smalti that a package requires, if this is another one: pip's --no-deps and -e do not check it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in (each for each in installed.requires if each.lower().startswith("smalti")):  # to parse the others takes longer
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ours = applies and canonicalize_name(requirement.name) == "smalti"
        if ours and not requirement.specifier.contains(own, prereleases=True):
            return f"{installed.info.source} needs smalti {requirement.specifier}, found {own}"
    return None
