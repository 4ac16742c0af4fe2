"""The registered plugins: how hooks are called, and which plugin an exception comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from types import CodeType
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import pluggy

from smalti.errors import UserError, did_you_mean
from smalti.hookspecs import PROJECT, HookSpecs
from smalti.plugins.factories import ORIGIN_NOTE, add_origin_note
from smalti.plugins.returns import ANSWERS, checked
from smalti.system import record_hook
from smalti.types import DistributedPlan, Origin, Registered

State = Literal["active", "blocked", "broken", "incompatible", "not selected"]


class Named(Protocol):
    @property
    def name(self) -> str: ...


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Named)
Hook = Callable[Concatenate[HookSpecs, ...], object]
"""A function of `HookSpecs`, which stands for the hook."""
RegisterHook = Callable[[HookSpecs], Sequence[Registered]]
"""A hook in which plugins register entries."""
ROLES: frozenset[Hook] = frozenset({HookSpecs.wrap_model, HookSpecs.save_checkpoint, HookSpecs.load_checkpoint})
"""The backend roles: called for the chosen backend, and for plugins that are no backend."""


@dataclass(kw_only=True)
class PluginInfo:
    """One line of `smalti plugins`."""

    name: str
    distribution: str
    version: str
    built_in: bool = False
    state: State = "active"
    hooks: tuple[str, ...] = ()
    reason: str = ""

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def origin(self) -> Origin:
        return Origin(plugin=self.name, distribution=self.distribution, version=self.version, built_in=self.built_in)


class _Manager(pluggy.PluginManager):
    """Looks for hooks in no attribute that any object has, which are most of those of a plugin."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


@dataclass(kw_only=True)
class Plugins:
    """The registered plugins: calls their hooks, and notes on an exception which plugin raised it."""

    infos: dict[str, PluginInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._manager.add_hookcall_monitoring(lambda *_: None, self._attribute)

    # --- registering ------------------------------------------------------------------------------------------------

    def register(self, info: PluginInfo, plugin: object) -> None:
        """Add a loaded plugin. Built-in plugins come first, because in a decide hook the last one registered is called first.

        Raises TypeError, and leaves everything as it was, for an object that is no plugin: a class, no hooks, unknown hooks or
        unknown arguments.
        """
        if inspect.isclass(plugin):
            raise TypeError(f"{plugin.__qualname__} is a class; a plugin is an object of it, or a module")
        try:
            self._manager.register(plugin, info.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._forget(plugin)
            raise TypeError(_mismatch(plugin, error)) from error
        info.hooks = tuple(sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ()))
        if not info.hooks:
            self._forget(plugin)
            raise TypeError("it implements no hook; mark its functions with @smalti.hookimpl")
        self._watch_calls(plugin, info)
        self.infos[info.name] = info

    def _watch_calls(self, plugin: object, info: PluginInfo) -> None:
        """Wrap the hooks of this plugin: each call is recorded, and what it returns is checked."""
        origin = info.origin
        fix = "" if origin.built_in else origin.workaround
        for caller in self._manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    call = record_hook(implementation.function, f"hook {caller.name!r} of {origin}", fix=fix)
                    if caller.name in ANSWERS:
                        call = checked(call, caller.name, origin)
                    implementation.function = call  # type: ignore[misc]  # pluggy reads it from the plugin only once

    def _forget(self, plugin: object) -> None:
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    # --- calling ----------------------------------------------------------------------------------------------------
    #
    # One method for each kind of hook. `hook` is the function of `HookSpecs`, so a type checker knows its arguments and result:
    # `plugins.decide(HookSpecs.detect_blocks, model=model, family=family, config=config)`.

    def decide(self, hook: Callable[Concatenate[HookSpecs, P], R | None], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The first result of a decide hook that is not None, or None. For backend roles use `backend(plan).decide`."""
        return cast(R | None, self._caller(hook)(**_by_name(hook, args, kwargs)))

    def gather(
        self, hook: Callable[Concatenate[HookSpecs, P], Sequence[T] | T | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """All entries that plugins return from a gather hook, sorted by `name`.

        Registered entries of several plugins with one name are named "plugin:name" instead (`smalti.plugins.find_entry`).
        Raises UserError for a name that one plugin gives twice, and for two groups of options with one name.
        """
        owners: dict[str, list[Origin]] = {}
        merged: list[T] = []
        for plugin, answer in self.answers(hook, *args, **kwargs).items():
            origin = self.infos[plugin].origin
            for each in cast(list[T], answer if isinstance(answer, list) else [answer]):
                others = owners.setdefault(each.name, [])
                if others and (origin in others or not isinstance(each, Registered)):
                    raise UserError(
                        f"{each.name!r} is provided twice: by {others[0]} and by {origin}",
                        fix=f"disable one of them, for example with --without {plugin}",
                    )
                others.append(origin)
                merged.append(replace(each, origin=origin) if isinstance(each, Registered) else each)
        for index, each in enumerate(merged):
            if isinstance(each, Registered) and len(owners[each.name]) > 1:
                merged[index] = replace(each, name=f"{each.origin.plugin}:{each.name}")
        return sorted(merged, key=lambda each: each.name)

    def notify(self, hook: Callable[Concatenate[HookSpecs, P], None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a notify hook of every plugin. The first exception ends it; `notify_each` isolates plugins."""
        self._caller(hook)(**_by_name(hook, args, kwargs))

    def answers(
        self, hook: Callable[Concatenate[HookSpecs, P], R | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R]:
        """The results of a gather hook that are not None, by plugin, in the order of registration."""
        found = {name: self.call_one(name, hook, *args, **kwargs) for name in self.infos}
        return {name: answer for name, answer in found.items() if answer is not None}

    def call_one(
        self, plugin: str, hook: Callable[Concatenate[HookSpecs, P], R | None], /, *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """What one plugin returns from a gather or notify hook; None if it does not implement it."""
        if hook.__name__ not in self.infos[plugin].hooks:
            return None
        answers = cast(list[R], self._caller(hook, {plugin})(**_by_name(hook, args, kwargs)))
        return answers[0] if answers else None

    def backend(self, plan: DistributedPlan) -> Backend:
        """The backend with this plan, to call its roles. Raises UserError for a plan that is not named like a plugin."""
        if plan.name not in self.infos:
            raise UserError(f"the plan {plan.title!r} carries the name {plan.name!r}, which is not the name of a plugin")
        return Backend(plugins=self, name=plan.name)

    def implementers(self, hook: Hook) -> list[str]:
        """Names of the active plugins that implement a hook, in the order in which they are called."""
        implementations = reversed(self._caller(hook).get_hookimpls())
        return [each.plugin_name for each in implementations if hook.__name__ in self.infos[each.plugin_name].hooks]

    def disable(self, plugin: str, hook: Hook) -> None:
        """Do not call this plugin for a hook again: how failing trackers are isolated."""
        info = self.infos[plugin]
        info.hooks = tuple(name for name in info.hooks if name != hook.__name__)

    def _caller(self, hook: Hook, names: Collection[str] | None = None) -> pluggy.HookCaller:
        """The pluggy caller of a hook, for all plugins or for those of these names."""
        if names is None:
            return cast(pluggy.HookCaller, getattr(self._manager.hook, hook.__name__))
        others = [self._manager.get_plugin(name) for name in self.infos if name not in names]
        return self._manager.subset_hook_caller(hook.__name__, [plugin for plugin in others if plugin is not None])

    # --- describing ---------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[str, ...]:
        """The active plugins as "name distribution version", as written into checkpoints and compared between ranks."""
        return tuple(f"{info.name} {info.source}" for info in self.infos.values() if info.state == "active")

    @property
    def summary(self) -> str:
        """The version of smalti and the active plugins of other packages, in one line."""
        own = self.infos["core"].version
        others = [info for info in self.infos.values() if info.state == "active" and not info.built_in]
        names = [info.name if info.version == own else f"{info.name} {info.version}" for info in others]
        return f"version {own}, plugins: {', '.join(names) or 'only built-in ones'}"

    def _attribute(
        self, outcome: pluggy.Result[object], hook: str, implementations: Sequence[pluggy.HookImpl], arguments: object
    ) -> None:
        """Note on an exception which plugin raised it: the innermost implementation on its traceback."""
        if (error := outcome.exception) is None:
            return
        owners = {_code_of(each.function): each.plugin_name for each in implementations}
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            if (name := owners.get(frame.f_code)) is not None:
                origin = self.infos[name].origin
                if origin.built_in and isinstance(error, UserError):
                    return  # what the user can fix is no fault of the core
                added = add_origin_note(error, f"{ORIGIN_NOTE}{origin} in hook {hook!r}")
                if added and not origin.built_in and not isinstance(error, UserError):
                    error.add_note(f"fix: {origin.workaround}")
                return


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The plugin whose plan was chosen for the run: calls backend roles without the other backends."""

    plugins: Plugins
    name: str

    def decide(self, role: Callable[Concatenate[HookSpecs, P], R | None], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The first result that is not None, of plugins that are no backend, this backend, and the core."""
        assert role in ROLES, f"{role.__name__} is not a backend role"
        others = {*self.plugins.implementers(HookSpecs.configure_distributed)} - {self.name}
        asked = {name for name in self.plugins.infos if name not in others}
        return cast(R | None, self.plugins._caller(role, asked)(**_by_name(role, args, kwargs)))


def _by_name(hook: Hook, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call by their names, which is how pluggy passes them on. Raises TypeError for wrong ones."""
    arguments = inspect.signature(hook).bind(None, *args, **kwargs).arguments
    del arguments["self"]
    return arguments


def _code_of(function: Callable[..., object]) -> CodeType | None:
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)


def _mismatch(plugin: object, error: pluggy.PluginValidationError) -> str:
    """Why pluggy refused a plugin, with a similar name for a hook that does not exist."""
    known = [name for name in vars(HookSpecs) if not name.startswith("_")]
    for name in sorted(name for name in dir(plugin) if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl")):
        if name not in known:
            return "; ".join(filter(None, (f"there is no hook {name!r}", did_you_mean(name, known))))
    for name in sorted(name for name in known if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl")):
        offered = [each for each in inspect.signature(vars(HookSpecs)[name]).parameters if each != "self"]
        strange = sorted(set(inspect.signature(getattr(plugin, name)).parameters) - set(offered))
        if strange:
            return f"{name} takes {', '.join(strange)}; this hook is given: {', '.join(offered) or 'nothing'}"
    return str(error).partition("\n")[0]
