"""The contract kit: what plugins, and what they register, must do, as checks.

    check_plugin("my_plugin")                     it loads, declares and registers as the core expects
    check_storage(make)                           a place where datasets live
    check_family(MyFamily())                      a model family
    check_parallel("my_plugin", "--my_enable")    a distribution strategy, on two real processes
    check_optimizer("my_plugin", "my_optimizer")  an optimizer by its name
    check_commands("my_plugin")                   the commands that it adds
    check_metadata_backend(make)                  a metadata backend over some samples
    check_checkpoint_format(open, path, folder)   the reader of a checkpoint format
    check_cache(make, fill)                       a cache of `smalti cache`

Each raises `BrokenContract`, or what the checked code raised, with a note that says what the check is for and how to mend
it. `smalti_testing.pytest` has the same checks as classes to inherit from, one test a check. `two_processes` runs any function
on several ranks; `seaweed` and `juicefs` start real object stores, and `FaultProxy` injects faults before them by `Rule`s;
`MemoryStorage` and `TinyFamily` are small implementations that keep the contracts, for tests that need one.

Importing this module imports neither torch nor pytest. It is for tests; nothing in a run uses it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti_testing.caches import check_cache
    from smalti_testing.commands import check_commands
    from smalti_testing.contract import BrokenContract, Contract
    from smalti_testing.families import check_family
    from smalti_testing.fault_proxy import Exchange, FaultProxy, Rule
    from smalti_testing.formats import check_checkpoint_format
    from smalti_testing.memory import MemoryStorage
    from smalti_testing.metadata import check_metadata_backend
    from smalti_testing.object_store import ObjectStore, juicefs, seaweed
    from smalti_testing.optimizers import check_optimizer
    from smalti_testing.plugins import check_plugin
    from smalti_testing.ranks import RankFailed, RankProcesses, two_processes
    from smalti_testing.storages import check_storage
    from smalti_testing.strategies import check_parallel
    from smalti_testing.tiny import TinyFamily

__all__ = [
    "BrokenContract",
    "Contract",
    "Exchange",
    "FaultProxy",
    "MemoryStorage",
    "ObjectStore",
    "RankFailed",
    "RankProcesses",
    "Rule",
    "TinyFamily",
    "check_cache",
    "check_checkpoint_format",
    "check_commands",
    "check_family",
    "check_metadata_backend",
    "check_optimizer",
    "check_parallel",
    "check_plugin",
    "check_storage",
    "juicefs",
    "seaweed",
    "two_processes",
]

_HOMES = {
    "smalti_testing.caches": ("check_cache",),
    "smalti_testing.commands": ("check_commands",),
    "smalti_testing.contract": ("BrokenContract", "Contract"),
    "smalti_testing.families": ("check_family",),
    "smalti_testing.fault_proxy": ("Exchange", "FaultProxy", "Rule"),
    "smalti_testing.formats": ("check_checkpoint_format",),
    "smalti_testing.memory": ("MemoryStorage",),
    "smalti_testing.metadata": ("check_metadata_backend",),
    "smalti_testing.object_store": ("ObjectStore", "juicefs", "seaweed"),
    "smalti_testing.optimizers": ("check_optimizer",),
    "smalti_testing.plugins": ("check_plugin",),
    "smalti_testing.ranks": ("RankFailed", "RankProcesses", "two_processes"),
    "smalti_testing.storages": ("check_storage",),
    "smalti_testing.strategies": ("check_parallel",),
    "smalti_testing.tiny": ("TinyFamily",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that checking a storage does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
