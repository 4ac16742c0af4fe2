"""The contract of a plugin: what the core and its users rely on before any run. Imports no torch; `factories` are imported.

It looks at the plugin as it is installed, so install it first (`pip install -e .`), then check it by the name of its entry
point.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import distribution
from inspect import signature
from typing import Concatenate, ParamSpec, TypeVar, cast, get_args

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from smalti import CacheEntry, CheckpointFormat, ColumnEntry, FamilyEntry, MetadataEntry, OptimizerEntry, StorageEntry
from smalti.config import Config, Level, Option, Schema, resolve
from smalti.hookspecs import PROJECT, HookSpecs
from smalti.plugins import BUILT_IN, PluginInfo, Plugins, Selection, load_plugins, schema_of
from smalti.system import load_json
from smalti_testing.contract import BrokenContract, Contract, expect

P = ParamSpec("P")
R = TypeVar("R")
Entry = FamilyEntry | StorageEntry | MetadataEntry | ColumnEntry | OptimizerEntry | CheckpointFormat | CacheEntry

FACTORIES: tuple[Callable[[HookSpecs], Sequence[Entry]], ...] = (
    HookSpecs.register_model_families,
    HookSpecs.register_storage,
    HookSpecs.register_metadata_backends,
    HookSpecs.register_columns,
    HookSpecs.register_optimizers,
    HookSpecs.register_checkpoint_formats,
    HookSpecs.register_caches,
)
"""The hooks whose entries name a factory."""
HOOKS = frozenset(name for name in vars(HookSpecs) if not name.startswith("_"))


@dataclass(frozen=True)
class PluginSubject:
    """One plugin by the name of its entry point, loaded beside the built-in ones and without any other."""

    name: str

    @property
    def selection(self) -> Selection:
        return Selection(without=("all",)) if self.name in BUILT_IN else Selection(only=(self.name,))

    @cached_property
    def plugins(self) -> Plugins:
        return load_plugins(self.selection, strict=False)

    @property
    def info(self) -> PluginInfo:
        return self.plugins.infos[self.name]

    @cached_property
    def implementation(self) -> object:
        """What the entry point names."""
        if self.name in BUILT_IN:
            return import_module(BUILT_IN[self.name]).plugin
        return next(entry for entry in distribution(self.info.distribution).entry_points if entry.name == self.name).load()

    @cached_property
    def config(self) -> Config:
        """A configuration in which nothing is given."""
        return resolve(schema_of(self.plugins), environment={"HF_HOME": os.devnull})

    def answer(self, hook: Callable[Concatenate[HookSpecs, P], R | None], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What this plugin alone returns from a gather or notify hook; None when it does not implement it."""
        return self.plugins.call_one(self.name, hook, *args, **kwargs)

    @cached_property
    def start(self) -> dict[str, object]:
        """What `smalti_testing.start` saw of this plugin in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "smalti_testing.start", self.name],
            env=environment_for(self.name),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise BrokenContract(f"set-up in a new process ended with status {done.returncode}:\n{done.stderr}")
        return cast(dict[str, object], load_json(done.stdout.splitlines()[-1]))


def environment_for(name: str) -> dict[str, str]:
    """The environment of a process in which smalti loads this plugin beside the built-in ones, and no other."""
    chosen = {"SMALTI_WITHOUT": "all"} if name in BUILT_IN else {"SMALTI_PLUGINS": name}
    return {key: value for key, value in os.environ.items() if not key.startswith("SMALTI_")} | chosen


def check_plugin(name: str) -> None:
    """Every check of the plugin contract, for the plugin of this name. It must be installed."""
    PLUGIN.run_all(PluginSubject(name))


PLUGIN: Contract[PluginSubject] = Contract("plugin")


@PLUGIN.check
def it_is_installed_and_active(subject: PluginSubject) -> None:
    """`smalti plugins` must list it as active.

    Not listed at all: the entry point in `[project.entry-points."smalti.plugins"]` is missing, or the package was not installed
    again after it was added. Broken or incompatible: the reason is below.
    """
    expect(subject.name in subject.plugins.infos, f"no plugin {subject.name!r} is installed")
    expect(subject.info.state == "active", f"{subject.name} is {subject.info.state}: {subject.info.reason}")


@PLUGIN.check
def its_package_says_which_smalti_it_needs(subject: PluginSubject) -> None:
    """Without bounds, a later smalti that has dropped a hook would load this plugin and fail in the middle of something.

    Write `dependencies = ["smalti>=0.2,<0.3"]`: from the oldest that you test with to the next one that may break you.
    """
    if subject.name in BUILT_IN:
        return
    requirements = [Requirement(text) for text in distribution(subject.info.distribution).requires or ()]
    found = [str(each.specifier) for each in requirements if canonicalize_name(each.name) == "smalti" and not each.marker]
    expect(bool(found), f"{subject.info.distribution} does not require smalti")
    bounds, package = "".join(found), subject.info.distribution
    expect("<" in bounds or "==" in bounds or "~=" in bounds, f"{package} takes any later smalti ({bounds!r})")


@PLUGIN.check
def every_hook_that_it_defines_is_marked(subject: PluginSubject) -> None:
    """A function that is named like a hook and not marked is never called, and nothing says so.

    Put `@hookimpl` above it, or give it another name.
    """
    unmarked = [
        name
        for name in sorted(HOOKS)
        if callable(found := getattr(subject.implementation, name, None))
        and not hasattr(found, f"{PROJECT}_impl")
        and getattr(found, "__func__", None) is not vars(HookSpecs)[name]
    ]
    expect(not unmarked, f"not marked with @hookimpl: {', '.join(unmarked)}")


@PLUGIN.check
def its_hooks_take_arguments_of_the_right_names(subject: PluginSubject) -> None:
    """Hooks are called by name, so an argument must be called as in `smalti.hookspecs`. It may be left out.

    An argument with a default value is never filled in: take the default away.
    """
    for name in subject.info.hooks:
        known = set(signature(vars(HookSpecs)[name]).parameters) - {"self"}
        taken = signature(getattr(subject.implementation, name)).parameters.values()
        strange = sorted({each.name for each in taken} - known)
        expect(not strange, f"{name} takes {', '.join(strange)}; the hook has {', '.join(sorted(known)) or 'no arguments'}")
        defaults = [each.name for each in taken if each.default is not each.empty]
        expect(not defaults, f"{name} has default values for {', '.join(defaults)}")


@PLUGIN.check
def it_sets_up_without_torch(subject: PluginSubject) -> None:
    """`smalti --help` loads every plugin; torch alone would take seconds, and a login node may not have it at all.

    Import torch, and whatever imports it, inside the functions that need it or in the module that a factory names. For
    annotations, import under `if TYPE_CHECKING`.
    """
    heavy = cast(list[str], subject.start["heavy"])
    expect(not heavy, f"loading and setting up this plugin has imported {', '.join(heavy)}")


@PLUGIN.check
def the_help_still_works(subject: PluginSubject) -> None:
    """A plugin that fails here takes its commands away, and with its options the command line of everyone who has it.

    `smalti --help` and `smalti train --help-all` run its `register_commands` and `declare_options`.
    """
    for call, status in cast(dict[str, int], subject.start["help"]).items():
        expect(status == 0, f"smalti {call} ends with status {status}: {subject.start['said']}")
    said = str(subject.start["said"])
    expect("smalti: warning:" not in said, said)


@PLUGIN.check
def its_options_are_declared_well(subject: PluginSubject) -> None:
    """Flag, file key, environment name, reference page and web form all come from the declaration.

    Each option has a lower_case name, a sentence of help with a full stop, a default that passes its checks and a level that
    exists. `when` names another option, alone, with "== value" or with "> number".
    """
    schema = schema_of(subject.plugins)
    for group in subject.answer(HookSpecs.declare_options) or ():
        expect(bool(group.title), f"the group {group.name!r} has no title")
        expect(_is_word(group.name), f"the group {group.name!r} is not named in lower case with underscores")
        group.options()
        for option in Schema((group,)).options.values():
            problem = _wrong_with(option, schema)
            expect(not problem, f"option {option.name!r}: {problem}")


def _wrong_with(option: Option, schema: Schema) -> str:
    if not _is_word(option.name):
        return "its name is not in lower case with underscores"
    if not option.help.rstrip('"').endswith((".", "...", "?")):
        return "its help is not a sentence with a full stop"
    if option.level not in get_args(Level):
        return f"its level {option.level!r} is none of {', '.join(get_args(Level))}"
    condition = option.when.partition(" ")[0]
    if condition and condition not in schema.options:
        return f"it says when={option.when!r}, and there is no option {condition!r}"
    return ""


@PLUGIN.check
def it_registers_nothing_twice(subject: PluginSubject) -> None:
    """Two families, storages, options or commands of one name cannot both be meant; a run that names one refuses to choose.

    Take a name that says whose it is: prefix options with the plugin's own word.
    """
    schema_of(subject.plugins)
    for hook in FACTORIES:
        for entry in subject.plugins.gather(hook):
            expect(":" not in entry.name, f"{hook.__name__}: smalti has the name of {entry.name!r} itself")


@PLUGIN.check
def what_it_registers_can_be_found_and_imported(subject: PluginSubject) -> None:
    """A name that is looked up in lower case, and a factory "module:callable" that exists, or nobody can choose it.

    The factory's module is where torch may be imported.
    """
    for hook in FACTORIES:
        for entry in subject.answer(hook) or ():
            what = f"{hook.__name__}: {entry.name!r}"
            dashes = isinstance(entry, CacheEntry | CheckpointFormat)
            expect(
                _is_word(entry.name.replace("-", "_") if dashes else entry.name),
                f"{what} is not in lower case with underscores",
            )
            expect(bool(entry.title), f"{what} has no title")
            if not isinstance(entry, CacheEntry) or entry.factory or not (entry.encoder or entry.order):
                _import(entry.factory, what)
            if isinstance(entry, StorageEntry) and (entry.schemes or entry.open_run):
                expect(bool(entry.schemes), f"{what}: open_run is never called without schemes")
                _import(entry.open_run, f"{what}: open_run")
            if isinstance(entry, CacheEntry) and entry.encoder:
                _import(entry.encoder, f"{what}: encoder")
            if isinstance(entry, CacheEntry) and entry.order:
                _import(entry.order, f"{what}: order")


@PLUGIN.check
def its_optimizers_can_be_built(subject: PluginSubject) -> None:
    """`--optimizer` calls a factory with groups of (name, parameter) pairs, `lr`, and the settings that its entry `accepts`.

    Those are `betas`, `eps` and `weight_decay` unless the entry names fewer; name in `accepts` what your factory takes. It is
    a `torch.optim.Optimizer` over all of the parameters that it gets.
    """
    entries = subject.answer(HookSpecs.register_optimizers)
    if not entries:
        return
    import torch

    from smalti.training import build_registered, matrices, parameter_groups

    for entry in entries:
        model = torch.nn.Linear(3, 2)
        config = resolve(schema_of(subject.plugins), (f"--optimizer={entry.name}",), environment={"HF_HOME": os.devnull})
        optimizer = build_registered(parameter_groups(model, 0.01, matrices(model)), config, entries)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        expect(held == set(map(id, model.parameters())), f"{entry.name} does not hold the parameters that it was given")


@PLUGIN.check
def it_finds_its_way_in_a_configuration_that_says_nothing(subject: PluginSubject) -> None:
    """All plugins are asked about every configuration, together, so that the user sees all problems at once.

    `check_config` gives a list of `Problem`s, each with a message and a fix, and raises nothing: any value may be None.
    """
    for problem in subject.answer(HookSpecs.check_config, config=subject.config) or ():
        expect(bool(problem.message) and bool(problem.fix), f"check_config returned {problem!r}, without a message or a fix")


@PLUGIN.check
def it_claims_no_run_that_did_not_ask_for_it(subject: PluginSubject) -> None:
    """Installing a package must not change how anyone's runs are distributed.

    `configure_distributed` answers None unless an option of yours is set. The plan carries the plugin's own name, by which its
    other hooks are found.
    """
    plan = subject.answer(HookSpecs.configure_distributed, config=subject.config)
    if plan is not None:
        expect(plan.fallback, f"with no option set, it claims the run as {plan.title!r}")
        expect(plan.name == subject.name, f"the plan carries the name {plan.name!r}, the plugin is called {subject.name!r}")
        _import(plan.parallel, "the plan's parallel")


def _is_word(name: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) is not None


def _import(address: str, context: str) -> None:
    module, colon, attributes = address.partition(":")
    expect(bool(colon), f"{context}: {address!r} is not of the form module:callable")
    found: object = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    expect(callable(found), f"{context}: there is no callable {address!r}")
