"""`smalti config import-accelerate` and `export-accelerate` with FSDP in the file, as a user meets them."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from support.commands import commands

DATA = Path(__file__).parents[3] / "tests" / "data"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run("config", ...) -> (exit code, output, errors), with the plugins of options and commands alone."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("SMALTI_PLUGINS", "fsdp2,cluster")
    return commands(capsys, "config")


def test_what_is_imported_means_what_the_file_means(run, tmp_path):
    for file in sorted(DATA.glob("accelerate-fsdp*.yaml")):
        target = tmp_path / f"{file.stem}.toml"
        assert run("import-accelerate", str(file), "--to", str(target))[0] == 0
        digests = {json.loads(run("show", str(source), "--json")[1])["digest"] for source in (file, target)}
        assert len(digests) == 1, file


def test_values_that_are_defaults_here_are_imported_too(run):
    values = tomllib.loads(run("import-accelerate", str(DATA / "accelerate-fsdp.yaml"))[1])
    assert (values["fsdp_version"], values["fsdp_reshard_after_forward"], values["mixed_precision"]) == (2, True, "bf16")


def test_a_remark_tells_what_the_file_leaves_to_accelerate(run):
    code, text, _ = run("import-accelerate", str(DATA / "accelerate-fsdp-early.yaml"))
    assert (code, "# fsdp_config in " in text, "which is 1 to Accelerate" in text) == (0, True, True)


def test_what_is_exported_is_imported_again(run, tmp_path):
    original, again = DATA / "accelerate-fsdp-hybrid.yaml", tmp_path / "again.yaml"
    assert run("export-accelerate", str(original), "--to", str(again))[0] == 0
    assert yaml.safe_load(again.read_text()) == yaml.safe_load(original.read_text())


def test_flags_alone_can_be_exported(run):
    code, text, _ = run("export-accelerate", "--fsdp_enable", "--num_processes=4", "--fsdp_auto_wrap_policy=no_wrap", "--json")
    exported = json.loads(text)
    assert (code, exported["distributed_type"], exported["fsdp_config"]["fsdp_auto_wrap_policy"]) == (0, "FSDP", "NO_WRAP")


def test_what_cannot_be_launched_is_not_exported(run):
    code, text, told = run("export-accelerate", "--context_parallel_size=2", "--no_fsdp_enable")
    assert (code, text, "Context parallelism requires FSDP2." in told) == (2, "", True)
