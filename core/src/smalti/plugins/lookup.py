"""The family, strategy, optimizer or place that a configuration chooses among the registered ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from smalti.config import Config, ModelOptions, OptimizerOptions, family_packages, package_of, package_of_family
from smalti.errors import BrokenPlugin, MissingPlugin, UserError, did_you_mean
from smalti.hookspecs import HookSpecs
from smalti.plugins.factories import create
from smalti.plugins.registry import Plugins
from smalti.types import DistributedPlan, FamilyEntry, OptimizerEntry, Registered

if TYPE_CHECKING:
    from smalti.checkpoint import RunPlace
    from smalti.models import ModelFamily

E = TypeVar("E", bound=Registered)


def find_entry(name: str, entries: Iterable[E]) -> E | None:
    """The entry called `name` or "plugin:name", in any case, with dashes or underscores; None if there is none.

    Raises UserError for a name that several plugins have registered: none of them is preferred.
    """
    wanted, others = _folded(name), []
    for entry in entries:
        own = entry.name.rpartition(":")[2]
        if wanted in (_folded(entry.name), _folded(f"{entry.origin.plugin}:{own}")):
            return entry
        others += [entry] if wanted == _folded(own) else []
    if others:
        sources = " and ".join(str(entry.origin) for entry in others)
        choices = " or ".join(entry.name for entry in others)
        raise UserError(f"{others[0].kind} {name!r} is registered by {sources}", fix=f"choose {choices}")
    return None


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def family_entry(config: Config, plugins: Plugins) -> FamilyEntry:
    """The entry that `--model_family` names. Raises UserError with the known families or the package to install."""
    entries = known_families(plugins)
    name = config[ModelOptions].model_family
    if name is not None and (entry := find_entry(name, entries.values())) is not None:
        return entry
    message = f"Unknown model_family '{name}'."
    if name is not None and (package := package_of_family(name)):
        raise package.error(message)
    if not entries:
        raise MissingPlugin("no model family installed", fix=family_packages())
    if name is None:
        raise UserError("no model family given", fix=f"--model_family=NAME; known: {', '.join(entries)}")
    raise UserError(message, fix=f"{did_you_mean(name, entries, count=3)} known: {', '.join(entries)}".lstrip())


def known_families(plugins: Plugins) -> dict[str, FamilyEntry]:
    """The registered families by name."""
    return {entry.name: entry for entry in plugins.gather(HookSpecs.register_model_families)}


def find_family(config: Config, plugins: Plugins) -> ModelFamily:
    """The family that `--model_family` names. Raises UserError with the known ones, or if it has no adapters; BrokenPlugin for
    one that does not inherit from `ModelFamily`, lacks what every family has, or misspells it.
    """
    entry = family_entry(config, plugins)
    created = create(entry, entry.factory, config)

    from smalti.models import family_problems

    if problems := family_problems(created):
        raise BrokenPlugin(
            f"{entry.kind} {entry.name!r} of {entry.origin} cannot be used: {type(created).__name__} {'; '.join(problems)}",
            fix=f"inherit from smalti.models.ModelFamily and see docs/reference/protocols.md; {entry.origin.workaround}",
        )
    family = cast("ModelFamily", created)
    if config[ModelOptions].model_type == "lora" and not family.adaptable:
        raise UserError(f"the model family {family.name} does not support LoRA", fix="--model_type=full")
    return family


def choose_distributed(config: Config, plugins: Plugins) -> DistributedPlan:
    """The plan of the strategy that the options ask for. Raises UserError if they ask for two."""
    plans = plugins.gather(HookSpecs.configure_distributed, config=config)
    wanted = [plan for plan in reversed(plans) if not plan.fallback]  # the last registered first, as in every decide hook
    if len(wanted) > 1:
        raise UserError(
            f"{', '.join(plan.title for plan in wanted[:-1])} and {wanted[-1].title} cannot be enabled simultaneously.",
            fix="disable one of them, in the flags, the configuration file or the Accelerate YAML",
        )
    chosen = wanted[0] if wanted else next(plan for plan in plans if plan.fallback)
    if chosen.name != chosen.origin.plugin:
        message = f"{chosen.origin} returned a plan with the name {chosen.name!r}; a plan has the name of its plugin"
        raise BrokenPlugin(message, fix=chosen.origin.workaround)
    return chosen


def find_optimizer(name: str, entries: Sequence[OptimizerEntry]) -> OptimizerEntry:
    """The optimizer of this name (`find_entry`). Raises UserError with similar names, or with the package to install."""
    if (entry := find_entry(name, entries)) is not None:
        return entry
    wanted, known = _folded(name), [entry.name for entry in entries]
    message = f"Unknown optimizer '{name}'."
    if package := package_of("optimizers", wanted):
        raise package.error(message)
    fix = f"{did_you_mean(wanted, known, count=3)} known: {', '.join(sorted(known))}".lstrip()
    migrate = package_of("commands", "config import")
    if migrate is not None and migrate.target:
        fix += f"; {migrate.distribution} knows the names of other trainers: {migrate.fix}"
    raise UserError(message, fix=fix)


def check_strategy(plan: DistributedPlan, config: Config, plugins: Plugins) -> None:
    """Raises UserError for an unknown optimizer, and for one that does not work on the parameters of this strategy."""
    entries = plugins.gather(HookSpecs.register_optimizers)
    chosen = find_optimizer(config[OptimizerOptions].optimizer, entries)

    def works(entry: OptimizerEntry) -> bool:
        return (entry.shards or not plan.shards) and (entry.flat or not plan.flattens_parameters)

    if not works(chosen):
        parts = "flat slices" if plan.flattens_parameters else "parts"
        others = ", ".join(entry.name for entry in entries if works(entry))
        raise UserError(
            f"{chosen.title} does not work under {plan.title}, where a rank holds {parts} of parameters",
            fix=f"--optimizer=adamw, or another one of {others}",
        )


def is_url(place: str) -> bool:
    """Whether a place is not a path."""
    return "://" in place


def open_run(url: str, plugins: Plugins, config: Config | None = None) -> RunPlace:
    """The run at a URL, from the plugin that registered its scheme. Sends nothing.

    Raises MissingPlugin if that plugin is not installed, and UserError for a scheme that no plugin knows.
    """
    scheme = url.partition("://")[0]
    entries = plugins.gather(HookSpecs.register_storage)
    opening = [entry for entry in entries if scheme in entry.schemes]
    if len(opening) > 1:
        message = f"{url} is opened by {' and by '.join(str(entry.origin) for entry in opening)}"
        raise UserError(message, fix=f"disable one of them, for example with --without {opening[-1].origin.plugin}")
    if opening:
        return cast("RunPlace", create(opening[0], opening[0].open_run, url, config))
    if package := package_of("schemes", scheme):
        raise package.error(f"{url} needs a plugin")
    known = ", ".join(f"{each}://" for entry in entries for each in entry.schemes)
    raise UserError(f"no plugin opens {url}", fix=f"give a path, or a URL of {known}" if known else "give a path")
