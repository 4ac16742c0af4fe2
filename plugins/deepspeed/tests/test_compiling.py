"""What is compiled on first use is compiled in turn, and nobody waits for a process that was killed while it compiled."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest
import torch.utils.cpp_extension as extension

from smalti import UserError
from smalti_deepspeed.compiling import compiled_one_at_a_time

SOURCE = 'extern "C" int answer() { return 42; }'
SLOW_COMPILER = """#!/bin/sh
touch {folder}/started
while [ ! -e {folder}/go ]; do sleep 0.05; done
exec c++ "$@"
"""
COMPILE = """
import sys
import torch.utils.cpp_extension as extension
from smalti_deepspeed.compiling import compiled_one_at_a_time
with compiled_one_at_a_time():
    extension.load("answer", [sys.argv[1]], build_directory=sys.argv[2], is_python_module=False)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def built(tmp_path):
    folder = tmp_path / "built"
    folder.mkdir()
    return folder


def load(source, built):
    with compiled_one_at_a_time():
        extension.load("answer", [str(source)], build_directory=str(built), is_python_module=False)


def answer(built) -> int:
    return ctypes.CDLL(str(built / "answer.so")).answer()


def test_nobody_waits_for_a_process_that_was_killed_while_it_compiled(source, built, tmp_path):
    compiler = tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", COMPILE, source, built]
    with subprocess.Popen(command, env={**os.environ, "CXX": str(compiler)}) as killed:
        while not (tmp_path / "started").exists():
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    assert (built / "lock").exists()
    with subprocess.Popen(command) as second:
        (tmp_path / "go").touch()  # the compiler that the first has started goes on by itself
        assert second.wait(timeout=120) == 0
    assert answer(built) == 42
    assert not (built / "lock").exists()


def test_two_that_need_it_at_once_compile_it_once(source, built):
    command = [sys.executable, "-c", COMPILE, source, built]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [each.wait(timeout=120) for each in both] == [0, 0]
    assert answer(built) == 42
    commands = (built / ".ninja_log").read_text().splitlines()[1:]
    assert len(commands) == 2  # one object, one library


def test_another_program_that_compiles_is_waited_for(source, built):
    mark = built / "lock"
    mark.touch()
    threading.Timer(0.5, mark.unlink).start()
    load(source, built)
    assert answer(built) == 42


def test_a_mark_that_another_program_has_left_is_named_and_stays(source, built):
    mark = built / "lock"
    mark.touch()
    os.utime(mark, (0, 0))
    with pytest.raises(UserError, match=f"rm {mark}"):
        load(source, built)
    assert mark.exists()


def test_who_waits_for_the_compiler_is_told(source, built, tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("smalti_deepspeed.compiling._SILENT_SECONDS", 0.0)

    def let_go_once_told() -> None:
        while not caplog.records:
            time.sleep(0.05)
        (tmp_path / "go").touch()

    threading.Thread(target=let_go_once_told, daemon=True).start()
    load(source, built)
    assert caplog.messages == ["compiling built for DeepSpeed, once on this node; it takes a minute or two"]


def test_what_the_compiler_says_is_told(source, built):
    source.write_text("int answer( { return 42; }")
    with pytest.raises(UserError, match=r"answer\.cpp:1:15: error: (?s:.*)g\+\+"):
        load(source, built)
    source.write_text(SOURCE)
    load(source, built)


def test_torch_may_lie_in_a_folder_with_a_space_in_its_name(source, built, tmp_path, monkeypatch):
    library = tmp_path / "é x" / "lib"
    library.parent.mkdir()
    library.symlink_to(extension.TORCH_LIB_PATH)
    monkeypatch.setattr(extension, "TORCH_LIB_PATH", str(library))
    load(source, built)
    [file] = built.glob("answer*.so")  # torch numbers those of one process
    assert ctypes.CDLL(str(file)).answer() == 42


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        ("", "CUDA_HOME does not exist"),
        ("Cuda compilation tools, release 9.1, V9.1.85", "Installed CUDA version 9.1 does not match"),
    ],
    ids=["missing", "another version"],
)
def test_a_cuda_toolkit_that_is_missing_or_another_is_an_error_with_a_fix(tmp_path, monkeypatch, nvcc, reason):
    """DeepSpeed's own checks, of a torch that was built for CUDA 12.8."""
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

    home = tmp_path if nvcc else None
    if home is not None:
        (home / "bin").mkdir()
        (home / "bin/nvcc").write_text(f"#!/bin/sh\necho '{nvcc}'\n")
        (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(extension, "CUDA_HOME", home and str(home))
    monkeypatch.setattr("torch.version.cuda", "12.8")
    with pytest.raises(UserError, match=reason) as refused, compiled_one_at_a_time():
        assert_no_cuda_mismatch("async_io")
    assert refused.value.fix.startswith("set CUDA_HOME to a CUDA toolkit (with nvcc) of version 12.8,")


def test_the_processor_is_asked_for_once():
    with compiled_one_at_a_time():
        from cpuinfo import get_cpu_info

        assert get_cpu_info() is get_cpu_info()
