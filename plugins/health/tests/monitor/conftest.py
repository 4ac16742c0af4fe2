"""The fake driver, compiled once, for this process and those that it starts."""

import pytest

from smalti_testing.nvml import VARIABLE, FakeNvml


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(compiled, monkeypatch):
    """Reports one GPU that is well, until it is set to something else."""
    for name, value in compiled.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VARIABLE, str(compiled.control))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    compiled.set("count 1")
    return compiled


@pytest.fixture
def loaded(fake):
    """The same in this process."""
    fake.load()
    return fake
