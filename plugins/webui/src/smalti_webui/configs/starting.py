"""Where a draft comes from: a recipe, a file, files of another trainer, or the configuration of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smalti import ConfigError, UserError
from smalti.config import as_toml, draft as draft_of, read_mapping, read_text, refuse_other_trainers
from smalti.plugins import Selection
from smalti.rundir import RunDirectory
from smalti_migrate.commented_toml import as_toml as imported_toml
from smalti_migrate.importing import import_files
from smalti_webui.configs.drafts import Draft, DraftStore, digest
from smalti_webui.configs.schemas import catalog_with, own_environment, schema_for, schema_with
from smalti_webui.configs.toml_text import given, with_values

RECIPES = Path(__file__).with_name("recipes")
LARGEST = 256 * 1024
"""Bytes of a configuration file."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration to begin with. `title` is the first sentence of its first comment."""

    id: str
    title: str
    family: str
    text: str


def recipes() -> list[Recipe]:
    """The recipes, those for a first run first."""
    found = []
    for path in sorted(RECIPES.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        title = text.split("\n", 1)[0].lstrip("# ").split(". ")[0].rstrip(".")
        family = str(read_mapping(path).get("model_family", ""))
        found.append(Recipe(id=path.stem, title=title, family=family, text=text))
    return sorted(found, key=lambda each: (each.id != "first-run", each.id != "empty", each.id))


def from_recipe(store: DraftStore, id: str) -> Draft:
    """Raises UserError if there is no such recipe."""
    recipe = next((each for each in recipes() if each.id == id), None)
    if recipe is None:
        raise UserError(f"there is no recipe {id!r}", fix=f"one of {', '.join(each.id for each in recipes())}")
    return store.new(recipe.text, name=recipe.id, origin=f"recipe {recipe.id}")


def from_file(store: DraftStore, path: Path) -> Draft:
    """A TOML file is edited itself; there is one draft of it. Other files become a new one. Raises UserError."""
    if path.suffix.lower() == ".toml" and not _of_another_trainer(path):
        text = read_text(path)
        read_mapping(path)  # raises if it is not TOML
        base, known = digest(path.read_bytes()), store.opened(str(path))
        if known is None:
            return store.new(text, name=path.stem, target=str(path), base=base, origin="a file")
        if known.is_saved and known.base != base:  # changed by something else, and nothing of the draft is lost
            return store.write(known.id, known.version, text, "the file was read again", base=base)
        return known
    return from_import(store, [path])


def _of_another_trainer(path: Path) -> bool:
    try:
        refuse_other_trainers(path, "options")
    except UserError:
        return True
    return False


def from_import(store: DraftStore, paths: Sequence[Path], family: str = "") -> Draft:
    """Files of another trainer, or a JSON or YAML file of smalti. Raises UserError if they cannot be read or imported."""
    name, origin = paths[0].stem, f"import of {', '.join(path.name for path in paths)}"
    try:
        schema = schema_with(Selection())
        result = import_files(paths, schema, family=family or None, catalog=catalog_with(Selection()))
        return store.new(imported_toml(result, schema), name=name, origin=origin)
    except UserError:
        if len(paths) > 1 or _of_another_trainer(paths[0]):
            raise
        own = _own_file(paths[0])
        if own is None:
            raise
        return store.new(own, name=name, origin=origin)


def _own_file(path: Path) -> str | None:
    """The text of a file of smalti's as TOML; None if it gives no option. Raises UserError with its problems."""
    schema, problems = schema_for(path)
    if path.suffix.lower() == ".toml":
        return read_text(path) if given(read_text(path), schema) else None
    if not any(schema.find(str(key)) for key in read_mapping(path)):
        return None
    config = draft_of(schema, file=path, environment=own_environment())
    if problems := [*problems, *config.problems]:
        raise ConfigError(problems)
    return as_toml(config)


def from_run(store: DraftStore, directory: RunDirectory) -> Draft:
    """The configuration of a run, with a directory of its own. Raises UserError if the run has none."""
    text = read_text(directory.config_file)
    schema, _ = schema_for(directory.config_file)
    folder = directory.path
    used = next(path for number in range(2, 10_000) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())
    return store.new(with_values(text, schema, {"output_dir": str(used)}), name=used.name, origin=f"run {folder.name}")


def from_draft(store: DraftStore, draft: Draft) -> Draft:
    """A copy, which is not saved to the same file."""
    return store.new(draft.text, name=f"{draft.name}-copy", origin=f"copy of {draft.name}")
