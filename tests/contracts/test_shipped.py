"""Everything that is shipped keeps its contract: plugins, storages, families, strategies, optimizers, commands, and the fakes.

Plugins are enumerated: one that is added to the core or under plugins/ is under test before anyone writes a test for it.
"""

import tomllib
from functools import cache
from pathlib import Path

import pytest

from smalti.data.storage.local import LocalStorage
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import BUILT_IN
from smalti_testing import MemoryStorage, TinyFamily
from smalti_testing.commands import COMMAND, CommandSubject
from smalti_testing.optimizers import OPTIMIZER, OptimizerSubject
from smalti_testing.plugins import PLUGIN, PluginSubject
from smalti_testing.pytest import FamilyContract, StorageContract
from smalti_toy.family import ToyFamily, ToyShape
from support.forked_ranks import ForkedContract, forked_processes

ROOT = Path(__file__).parents[2]


def shipped() -> list[str]:
    """The built-in plugins, and the entry points of all packages of this repository."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return [*BUILT_IN, *(name for project in projects for name in project.get("entry-points", {}).get("smalti.plugins", ()))]


@cache
def subject(name: str) -> PluginSubject:
    return PluginSubject(name)


@pytest.mark.parametrize("check", PLUGIN.checks)
@pytest.mark.parametrize("name", shipped())
def test_a_shipped_plugin_keeps_the_contract(name, check):
    PLUGIN.run(check, subject(name))


OPTIMIZERS = [
    (name, entry.name)
    for name in shipped()
    if name != "deepspeed"  # its entries only hold the groups, until DeepSpeed makes the optimizer itself
    for entry in subject(name).answer(HookSpecs.register_optimizers) or ()
]


@pytest.fixture(scope="module")
def ranks():
    with forked_processes() as pair:
        yield pair


@pytest.mark.parametrize("check", OPTIMIZER.checks)
@pytest.mark.parametrize(("plugin", "optimizer"), OPTIMIZERS)
def test_a_shipped_optimizer_keeps_the_contract(plugin, optimizer, check, tmp_path, ranks):
    OPTIMIZER.run(check, OptimizerSubject(plugin, optimizer, folder=tmp_path, ranks=ranks))


REFUSED = {
    "commands": (("no-such-command",), ("config", "no-such-command"), ("train",), ("config", "explain", "no_such_option")),
    "cache": (("cache", "clear", "no-such-cache"),),
    "testing": (("plugin", "new", "Not A Name", "--kind=family"),),
}


@cache
def commands(plugin: str) -> CommandSubject:
    return CommandSubject(plugin, REFUSED.get(plugin, ()))


@pytest.mark.parametrize("check", COMMAND.checks)
@pytest.mark.parametrize(
    "plugin", ["commands", *(name for name in shipped() if "register_commands" in subject(name).info.hooks)]
)
def test_shipped_commands_keep_the_contract(plugin, check):
    COMMAND.run(check, commands(plugin))


class TestLocalStorage(StorageContract):
    def make(self, files, folder):
        for key, data in files.items():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return LocalStorage(folder)


class TestMemoryStorage(StorageContract):
    def make(self, files, folder):
        return MemoryStorage(files)


class TestToyFamily(FamilyContract):
    def family(self):
        return ToyFamily(ToyShape(width=16, depth=2, heads=2))


class TestTinyFamily(FamilyContract):
    def family(self):
        return TinyFamily()


class TestOneProcess(ForkedContract):
    plugin = "ddp"
    ranks = 1


class TestReplicas(ForkedContract):
    plugin = "ddp"
