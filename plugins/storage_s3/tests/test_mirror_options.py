"""The options of mirrors: a URL as the run directory, and what is refused before a run starts."""

from __future__ import annotations

import pytest

from smalti.config import RunOptions
from smalti.config.resolution import draft
from smalti.plugins import Selection, load_plugins, plugin_problems, schema_of
from smalti_storage_s3.mirror.options import MirrorOptions

S3 = load_plugins(Selection(only=("storage_s3",)))
WITHOUT = load_plugins(Selection(without=("all",)))


def resolved(*flags: str, plugins=S3):
    return draft(schema_of(plugins), flags, environment={})


def problems(*flags: str, plugins=S3) -> str:
    config = resolved(*flags, plugins=plugins)
    return "\n".join(map(str, [*config.problems, *plugin_problems(config, plugins)]))


def test_a_url_as_the_run_directory_is_a_folder_of_this_node_and_a_mirror(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = resolved("--output_dir=s3://bucket/runs/first/")
    assert config.problems == ()
    assert config[RunOptions].output_dir == tmp_path / "smalti" / "runs" / "bucket%2Fruns%2Ffirst"
    assert config[MirrorOptions].checkpoint_mirror == "s3://bucket/runs/first/"
    assert any(str(tmp_path) in notice for notice in config.notices)
    assert resolved("--output_dir=s3://bucket/other")[RunOptions].output_dir != config[RunOptions].output_dir


def test_a_url_and_another_mirror_contradict_each_other():
    assert "checkpoint_mirror: is '/mnt/nas'" in problems("--output_dir=s3://bucket/first", "--checkpoint_mirror=/mnt/nas")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--output_dir=gs://bucket/first",), "'gs://bucket/first' is not the place of a mirror"),
        (("--output_dir=runs/a", "--checkpoint_mirror=s3://"), "'s3://' is not the place of a mirror"),
        (("--output_dir=runs/a", "--no_shared_output_dir", "--num_machines=2"), "need a place to meet"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(flags, expected):
    assert expected in problems(*flags)


def test_without_the_plugin_a_url_names_the_package_and_is_never_a_folder():
    refused = problems("--output_dir=s3://bucket/first", plugins=WITHOUT)
    assert "output_dir is a URL of the scheme 's3'" in refused
    assert "storage_s3" in refused
    assert "fix: --output_dir=FOLDER" in problems("--output_dir=gs://bucket/first", plugins=WITHOUT)
