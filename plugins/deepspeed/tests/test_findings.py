"""What `smalti doctor` says about what DeepSpeed compiles."""

import pytest
import torch

from smalti.config import resolve
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_deepspeed.checks import has_libaio
from smalti_deepspeed.findings import cuda_of, toolkit_problems
from smalti_deepspeed.plugin import plugin

SCHEMA = schema_of(load_plugins(Selection(only=("deepspeed", "toy"))))


@pytest.fixture
def problems(tmp_path):
    """(CUDA of torch, CUDA of nvcc): what is wrong with a toolkit of the one beside a torch for the other."""

    def find(torch: str | None, nvcc: str | None) -> list[str]:
        version = tmp_path / "version.py"
        version.write_text(f"cuda: str | None = {torch!r}\nhip: str | None = None\n")
        tool = tmp_path / "bin/nvcc"
        if nvcc is not None:
            tool.parent.mkdir()
            tool.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc}, V{nvcc}.1\n")
            tool.chmod(0o755)
        return [message for message, _ in toolkit_problems(cuda_of(version), str(tmp_path))]

    return find


def test_a_toolkit_of_another_cuda_than_torch_is_named(problems):
    [message] = problems("12.8", "11.8")
    assert "is of CUDA 11.8, and torch is built for CUDA 12.8" in message


def test_a_missing_toolkit_matters_only_to_a_torch_for_cuda(problems):
    assert problems(None, None) == []
    assert "no nvcc was found" in problems("12.8", None)[0]


def test_a_toolkit_of_the_same_major_version_is_right(problems):
    assert problems("12.8", "12.4") == []


def test_libaio_may_lie_in_a_folder_with_a_space_in_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "é x"
    folder.mkdir()
    (folder / "libaio.so").symlink_to(torch._C.__file__)
    monkeypatch.setenv("LIBRARY_PATH", str(folder), prepend=":")
    assert has_libaio()


def test_a_run_without_deepspeed_has_no_finding():
    config = resolve(SCHEMA, ["--accelerate_config=none"], environment={})
    assert plugin.diagnose(config) == []
    assert all(each.level in ("ok", "note") for each in plugin.diagnose(None))
