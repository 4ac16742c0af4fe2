"""Which model family a configuration means. Imports no torch before a family itself is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, cast

from smalti.config import Config, ModelOptions, package_of_family, packages_with_families
from smalti.errors import BrokenPlugin, MissingPlugin, UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins.factories import create
from smalti.plugins.registry import Plugins
from smalti.types import FamilyEntry

if TYPE_CHECKING:
    from smalti.models import ModelFamily


def family_entry(config: Config, plugins: Plugins) -> FamilyEntry:
    """The entry that `--model_family` names. Raises UserError with the known ones, or with what to install if there is none."""
    entries = known_families(plugins)
    name = config[ModelOptions].model_family
    if name is not None and (entry := entries.get(name.lower().replace("-", "_"))) is not None:
        return entry
    message = f"Unknown model_family '{name}'."
    if name is not None and (package := package_of_family(name)):
        raise package.error(message)
    if not entries:
        raise MissingPlugin("no model family installed", fix=packages_with_families())
    if name is None:
        raise UserError("no model family given", fix=f"--model_family=NAME; known: {', '.join(entries)}")
    near = get_close_matches(name, entries, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(message, fix=f"{hint}known: {', '.join(entries)}")


def known_families(plugins: Plugins) -> dict[str, FamilyEntry]:
    """The families on offer, by name."""
    return {entry.name: entry for entry in plugins.gather(HookSpecs.register_model_families)}


def find_family(config: Config, plugins: Plugins) -> ModelFamily:
    """The family that `--model_family` names. Raises UserError with the known ones, or if it has no adapters; BrokenPlugin for
    one that lacks what every family has.
    """
    entry = family_entry(config, plugins)
    created = create(entry, entry.factory, config)

    from smalti.models import Adaptable, lacking

    if missing := lacking(created):
        raise BrokenPlugin(
            f"{entry.kind} {entry.name!r} of {entry.origin} is a {type(created).__name__} without {', '.join(missing)}",
            fix=f"see smalti.models.family.ModelFamily; {entry.origin.way_round}",
        )
    family = cast("ModelFamily", created)
    if config[ModelOptions].model_type == "lora" and not isinstance(family, Adaptable):
        raise UserError(f"the model family {family.name} does not support LoRA", fix="--model_type=full")
    return family
