"""Which model family a configuration means. Imports no torch before a family itself is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from smalti.config import Config
from smalti.errors import MissingPlugin, UserError
from smalti.packages import package_of_family
from smalti.plugins import Plugins
from smalti.settings import ModelOptions
from smalti.types import FamilyEntry

if TYPE_CHECKING:
    from smalti.models.family import ModelFamily


def family_entry(config: Config, plugins: Plugins) -> FamilyEntry:
    """The entry that `--model_family` names. Raises UserError with the known ones."""
    entries = {entry.name: entry for entry in plugins.gather("register_model_families", FamilyEntry)}
    name = config[ModelOptions].model_family
    if name is None:
        raise UserError("no model family is given", fix=f"--model_family=NAME; known: {', '.join(entries)}")
    entry = entries.get(name.lower().replace("-", "_"))
    if entry is not None:
        return entry
    message = f"Unknown model_family '{name}'."
    if package := package_of_family(name):
        raise MissingPlugin(message, fix=f"pip install {package}")
    near = get_close_matches(name, entries, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(message, fix=f"{hint}known: {', '.join(entries)}")


def find_family(config: Config, plugins: Plugins) -> ModelFamily:
    """The family that `--model_family` names. Raises UserError with the known ones, or if it has no adapters."""
    family = cast("ModelFamily", resolve_name(family_entry(config, plugins).factory)(config))

    from smalti.models.family import Adaptable

    if config[ModelOptions].model_type == "lora" and not isinstance(family, Adaptable):
        raise UserError(f"the family {family.name} has no adapters", fix="--model_type=full")
    return family
