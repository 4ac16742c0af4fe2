"""The contracts as pytest classes: inherit from one, say what is to be checked, and every check is a test of its own.

    class TestMyFamily(FamilyContract):
        def family(self):
            return MyFamily(width=8)

The checks themselves cannot be overridden; a test watches over that. What a plugin cannot do for a good reason goes into
`exempt`, by the name of the check, and is shown as skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from smalti.checkpoint import Source
from smalti.data import MetadataSource, Storage
from smalti.models import ModelFamily
from smalti.plugins import Cache
from smalti_testing.caches import CACHE, CacheSubject
from smalti_testing.commands import COMMAND, CommandSubject
from smalti_testing.contract import Contract
from smalti_testing.families import FAMILY
from smalti_testing.family_subject import CAPTIONS, FamilySubject
from smalti_testing.formats import CHECKPOINT_FORMAT, FormatSubject
from smalti_testing.metadata import METADATA, MetadataSubject
from smalti_testing.optimizers import OPTIMIZER, OptimizerSubject
from smalti_testing.plugins import PLUGIN, PluginSubject
from smalti_testing.ranks import RankProcesses, two_processes
from smalti_testing.storages import STORAGE, StorageSubject
from smalti_testing.strategies import STRATEGY, run_check

S = TypeVar("S")
C = TypeVar("C", bound="type[ContractTests]")


class ContractTests:
    """What all of the classes have in common."""

    contract: ClassVar[Contract]  # type: ignore[type-arg]
    exempt: ClassVar[Mapping[str, str]] = {}
    """Checks that do not apply, by name, each with the reason."""

    def run_check(self, name: str, folder: Path) -> None:
        """Run one check; `folder` is empty and goes away."""
        raise NotImplementedError

    def test_no_check_is_overridden(self) -> None:
        """A check that is replaced checks nothing. Take your test's name away, or give a reason in `exempt`."""
        home = next(base for base in type(self).__mro__ if "contract" in vars(base))
        names = [f"test_{name}" for name in self.contract.checks]
        changed = [name for name in names if getattr(type(self), name) is not vars(home)[name]]
        assert not changed, f"overridden: {', '.join(changed)}"
        unknown = sorted(set(self.exempt) - set(self.contract.checks))
        assert not unknown, f"exempt names no check of this contract: {', '.join(unknown)}"


def _with_tests(cls: C) -> C:
    """Class decorator: one test for each check, under the check's name and with its docstring."""
    for name, check in cls.contract.checks.items():
        setattr(cls, f"test_{name}", _test_of(name, check.__doc__))
    return cls


def _test_of(name: str, about: str | None) -> Callable[[ContractTests, Path], None]:
    def test(self: ContractTests, tmp_path: Path) -> None:
        if reason := self.exempt.get(name):
            pytest.skip(reason)
        self.run_check(name, tmp_path)

    test.__name__, test.__doc__ = f"test_{name}", about
    return test


@_with_tests
class PluginContract(ContractTests):
    """Set `plugin` to the name of the entry point. The package must be installed (`pip install -e .`)."""

    contract = PLUGIN
    plugin: ClassVar[str]
    _subject: ClassVar[PluginSubject]

    @classmethod
    def setup_class(cls) -> None:
        cls._subject = PluginSubject(cls.plugin)

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, self._subject)


@_with_tests
class StorageContract(ContractTests):
    """Define `make`; set `writes` to False for a storage that can only be read."""

    contract = STORAGE
    writes: ClassVar[bool] = True

    def make(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        """A storage that holds exactly these files. `folder` is new and empty, for storages that need one."""
        raise NotImplementedError

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, StorageSubject(make=self.make, root=folder, writes=self.writes))


@_with_tests
class MetadataContract(ContractTests):
    """Define `make`."""

    contract = METADATA

    def make(self, folder: Path) -> MetadataSource:
        """The source of at least two samples. `folder` is empty at first; the source lists the same ones each time."""
        raise NotImplementedError

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, MetadataSubject(make=lambda: self.make(folder)))


@_with_tests
class CheckpointFormatContract(ContractTests):
    """Define `open`, which is the factory, and `checkpoint`."""

    contract = CHECKPOINT_FORMAT

    def open(self, path: Path) -> Source:
        """Open the checkpoint in this folder."""
        raise NotImplementedError

    def checkpoint(self, folder: Path) -> Path:
        """Write a sound checkpoint below the empty folder `folder`; returns where it is."""
        raise NotImplementedError

    def run_check(self, name: str, folder: Path) -> None:
        room = folder / "room"
        room.mkdir()
        self.contract.run(name, FormatSubject(open=self.open, checkpoint=self.checkpoint(folder), folder=room))


@_with_tests
class CacheContract(ContractTests):
    """Define `make` and `fill`."""

    contract = CACHE

    def make(self, folder: Path) -> Cache:
        """Open the cache, for which there is an empty folder."""
        raise NotImplementedError

    def fill(self, cache: Cache) -> None:
        """Put something into it."""
        raise NotImplementedError

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, CacheSubject(make=lambda: self.make(folder), fill=self.fill))


@_with_tests
class FamilyContract(ContractTests):
    """Define `family`; set `captions` for a family with a closed vocabulary."""

    contract = FAMILY
    captions: ClassVar[tuple[str, str]] = CAPTIONS[:2]
    """Two captions that the family tells apart from each other and from the empty one."""

    def family(self) -> ModelFamily:
        """A small version of the family, with random weights; called once for each check."""
        raise NotImplementedError

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, FamilySubject(self.family(), (*self.captions, "")))


@_with_tests
class ParallelContract(ContractTests):
    """Set `plugin` to the name of the strategy's plugin and `flags` to the options that switch it on.

    The processes are started once for the class. `seconds` is how long one check may take.
    """

    contract = STRATEGY
    plugin: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[int] = 2
    seconds: ClassVar[float] = 60.0
    _processes: ClassVar[RankProcesses]

    @classmethod
    def setup_class(cls) -> None:
        cls._processes = two_processes(ranks=cls.ranks, group=False, seconds=cls.seconds)

    @classmethod
    def teardown_class(cls) -> None:
        cls._processes.close()

    def run_check(self, name: str, folder: Path) -> None:
        run_check(self._processes, name, self.plugin, self.flags, folder)


@_with_tests
class OptimizerContract(ContractTests):
    """Set `plugin` to the name of the entry point, `optimizer` to that of the optimizer, `flags` to options of its own."""

    contract = OPTIMIZER
    plugin: ClassVar[str]
    optimizer: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, OptimizerSubject(self.plugin, self.optimizer, self.flags, folder))


@_with_tests
class CommandContract(ContractTests):
    """Set `plugin` to the name of the entry point. All commands that it registers are checked.

    `refused` are command lines, without `smalti`, that must end with exit code 2, as do those with an unknown option.
    """

    contract = COMMAND
    plugin: ClassVar[str]
    refused: ClassVar[tuple[tuple[str, ...], ...]] = ()
    _subject: ClassVar[CommandSubject]

    @classmethod
    def setup_class(cls) -> None:
        cls._subject = CommandSubject(cls.plugin, cls.refused)

    def run_check(self, name: str, folder: Path) -> None:
        self.contract.run(name, self._subject)
