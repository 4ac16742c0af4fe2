"""The options that a configuration may have: those of the core and of the plugins that it selects."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from smalti import Problem, UserError, problems_in
from smalti.config import PREFIX, Schema
from smalti.data import Catalog, catalog_of
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, Selection, known_families, load_plugins, schema_of, selection_of


@lru_cache(maxsize=8)
def schema_with(selection: Selection) -> Schema:
    """The options of the core and of the plugins that are selected. Plugins that cannot be loaded are left out."""
    return schema_of(_loaded(selection))


def catalog_with(selection: Selection) -> Catalog:
    """The storages and metadata backends of the same plugins."""
    return catalog_of(_loaded(selection))


@lru_cache(maxsize=8)
def _loaded(selection: Selection) -> Plugins:
    return load_plugins(selection, strict=False)


def suggestions_for(file: Path) -> dict[str, tuple[tuple[str, str], ...]]:
    """By option, values that plugins have added to those that it accepts, each with a title."""
    try:
        plugins = _loaded(selection_of((), file, os.environ))
    except UserError:
        plugins = _loaded(Selection())
    optimizers = plugins.gather(HookSpecs.register_optimizers)
    return {
        "model_family": tuple((name, entry.title) for name, entry in known_families(plugins).items()),
        "optimizer": tuple((entry.name, "") for entry in optimizers),
    }


def models() -> dict[str, str]:
    """What `smalti config new --model` takes of the installed families, each with a title."""
    found = {}
    for name, entry in known_families(_loaded(Selection())).items():
        for flavour, weights in entry.flavours.items() or [("", "")]:
            gated = ", needs a login" if weights in entry.gated else ""
            found[f"{name}/{flavour}".rstrip("/")] = f"{entry.title}{f': {flavour}' if flavour else ''}{gated}"
    return found


def schema_for(file: Path) -> tuple[Schema, list[Problem]]:
    """The options for a configuration file, which may select plugins; and what is wrong with that selection."""
    try:
        selection = selection_of((), file, os.environ)
        return schema_with(selection), []
    except UserError as error:
        return schema_with(Selection()), list(problems_in(error))


def own_environment() -> dict[str, str]:
    """The environment without variables that are options: those of the server's user are not part of a configuration."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
