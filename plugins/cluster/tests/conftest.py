"""Options of nodes among those of the core, and nodes that are namespaces."""

import pytest

from smalti.config.options import Schema
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import Plugins
from smalti.plugins.schema import schema_of
from support.fixtures import (
    configure as configure,
    no_settings_from_outside as no_settings_from_outside,
    smalti as smalti,
    write as write,
)
from support.nodes.fixtures import two_nodes as two_nodes, warm_nodes as warm_nodes


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(Selection(only=("toy", "cluster")))


@pytest.fixture(scope="session")
def schema() -> Schema:
    return schema_of(load_plugins(Selection(only=("toy", "cluster"))))
