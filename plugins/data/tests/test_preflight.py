"""Datasets are checked before ranks start, also where the ranks scan them; and when that is."""

import json

import pytest

from smalti.config.resolution import resolve
from smalti.data import ranks_scan
from smalti.errors import UserError
from smalti.launch.preflight import Preparation
from smalti.plugins import load_plugins, schema_of


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"instance_data_dir": "gone"}, "gone is not a folder"),
        ({"metadata_backend": "json", "json": {}}, "metadata.jsonl cannot be read"),
        ({"metadata_backend": "csv", "csv": {"caption_column": "tags"}}, "has no column 'tags'"),
        ({"metadata_backend": "webdataset", "webdataset": {"ending": "jpg"}}, "unknown key 'ending'"),
        (
            {"type": "csv", "csv_file": "pictures/metadata.csv", "csv_cache_dir": "web", "csv_url_column": "link"},
            "has no column 'link'",
        ),
    ],
)
def test_data_that_all_ranks_scan_is_checked_before_they_start(tmp_path, monkeypatch, entry, message):
    """No image is opened and no storage is listed for it."""
    plugins = load_plugins()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/metadata.csv").write_text("filename,caption,url\n1.png,one,http://127.0.0.1:9/1.png\n")
    entry = {"id": "pets", "instance_data_dir": "pictures"} | entry
    (tmp_path / "data.json").write_text(json.dumps([entry]))
    flags = ("--model_family=toy", "--max_train_steps=1", "--use_cpu", "--num_processes=2", "--data_scan=ranks")
    flags = (*flags, "--data_backend_config=data.json", f"--output_dir={tmp_path / 'run'}")
    config = resolve(schema_of(plugins), flags, environment={})
    with pytest.raises(UserError, match=message):
        Preparation.of(config, plugins, write=True)


@pytest.mark.parametrize(
    ("flags", "remote", "scanned", "ranks"),
    [
        ((), True, False, True),
        ((), True, True, False),
        ((), False, False, False),
        (("--data_scan=launcher",), True, False, False),
        (("--data_scan=ranks",), False, True, True),
        (("--data_scan=ranks", "--num_processes=1"), True, False, False),
    ],
)
def test_hook_configure_scan_leaves_new_remote_data_to_the_ranks_of_a_launch(tmp_path, flags, remote, scanned, ranks):
    plugins = load_plugins()
    place = {"type": "huggingface", "dataset_name": "ann/cats"} if remote else {"instance_data_dir": str(tmp_path)}
    (tmp_path / "data.json").write_text(json.dumps([{"id": "pets"} | place]))
    if scanned:
        (tmp_path / "pets.arrow").write_bytes(b"")
    words = ("--num_processes=2", f"--data_backend_config={tmp_path / 'data.json'}", *flags)
    assert ranks_scan(resolve(schema_of(plugins), words, environment={}), plugins, tmp_path) is ranks
