"""What every test shares: no settings of the developer's own reach it, and a way to resolve configurations."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
from support.imports import enable_garbage_collection
from support.nodes.fixtures import two_nodes as two_nodes, warm_nodes as warm_nodes
from support.whole import WHOLE

DATA = Path(__file__).parent / "data"
LONGEST_FIRST = (
    "plugins/deepspeed",
    "tests/e2e",
    "tests/contracts",
    "tests/torture/test_torture.py",
    "plugins",
    "tests/install",
)
"""Where tests take longest: begun first, so that no process is left with a long file when the others have done all theirs."""

gc.disable()  # until all tests are imported: what modules make at import is hardly ever garbage
# No test asserts on time, and a loaded machine draws examples slowly.
EXAMPLES = 100 if WHOLE else 25
settings.register_profile("untimed", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C, and so would every process that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((n for n, where in enumerate(LONGEST_FIRST) if item.nodeid.startswith(where)), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()  # to go through all that every time took a quarter of the tests
    enable_garbage_collection()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure as it happens, not only at the end: a run that is cut short has said what it knew."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(
            f"\n{report.nodeid} failed in {report.when} after {report.duration:.0f} s: {crash or report.longrepr}", flush=True
        )


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture
def plugins() -> Plugins:
    """The built-in plugins and the toy family, newly registered, so that a test may add its own."""
    return load_plugins(Selection(only=("toy",)))


@pytest.fixture(scope="session")
def schema() -> Schema:
    """The options of the built-in plugins and the toy family; of trackers and validation, which have free texts and lists."""
    return schema_of(load_plugins(Selection(only=("toy", "trackers", "validation"))))
