"""Imports without the collector, and what the checks before a launch do without."""

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from smalti.system import imports
from smalti.system.imports import importing as importing_block


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """At the end all that was imported is looked through again, but for what the tests had put aside before."""
    before = imports._kept
    gc.unfreeze()
    yield
    imports._kept = before
    gc.unfreeze()
    gc.freeze()


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "a_module_with_objects.py").write_text("OBJECTS = [[] for _ in range(100_000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_module_with_objects"
    sys.modules.pop("a_module_with_objects", None)


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_during_imports_and_everything_works_as_before_afterwards(module, nothing_kept):
    with importing_block():
        before = collections()
        with importing_block():  # as where one import leads to another
            __import__(module)
        assert collections() == before
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0, "this process is not smalti's own"


def test_a_process_of_its_own_does_not_look_through_imports_again(module, nothing_kept):
    imports.keep_imports()
    with importing_block():
        pass
    assert gc.get_freeze_count() == 0, "nothing was imported"
    with importing_block():
        __import__(module)
    frozen = gc.get_freeze_count()
    assert frozen > 100_000
    later = [[] for _ in range(10)]  # weights, say
    with importing_block():
        __import__(module)
    assert gc.get_freeze_count() <= frozen
    assert any(each is later for each in gc.get_objects())


def test_a_collector_that_was_off_stays_off(nothing_kept):
    gc.disable()
    try:
        with importing_block(), pytest.raises(ImportError), importing_block():
            __import__("there_is_no_such_module")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_launcher_that_checks_a_run_does_not_import_what_trains_it(tmp_path):
    (tmp_path / "pictures").mkdir()
    words = ["--model_family=toy", f"--instance_data_dir={tmp_path / 'pictures'}", f"--output_dir={tmp_path / 'run'}"]
    words += ["--max_train_steps=1", "--num_processes=2", "--use_cpu"]
    code = """
        import sys
        from smalti.cli.arguments import CommandLine
        from smalti.launch.preflight import Preparation
        from smalti.launch.checks import check_run
        command_line = CommandLine.parse(sys.argv[1:])
        check_run(command_line.draft(), command_line.plugins)
        assert "torch" in sys.modules
        big = {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy", "pyarrow.compute"}
        print(*({"smalti.training.build_run", *big} & set(sys.modules)))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *words], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
