"""Importing files of other trainers."""

import tomllib

import pytest

from smalti.config import Schema
from smalti.data import Catalog, catalog_of
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti_migrate.commented_toml import as_toml
from smalti_migrate.importing import import_files
from support.fixtures import write as write


@pytest.fixture(scope="module")
def everything() -> Schema:
    """The options of all installed plugins."""
    return schema_of(load_plugins())


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    """The data sources of all installed plugins."""
    return catalog_of(load_plugins())


@pytest.fixture
def imported(everything, catalog, write):
    """imported({name: text}, family) -> (the file that is written, as values; what is left, by its place; the text)."""

    def convert(files: dict[str, str], family: str | None = None) -> tuple[dict, dict, str]:
        result = import_files([write(name, text) for name, text in files.items()], everything, family=family, catalog=catalog)
        text = as_toml(result, everything)
        return tomllib.loads(text), {each.place: each for each in result.left}, text

    return convert
