"""`smalti doctor` as a command: table, JSON, bundle, exit code."""

import json
import zipfile

import pytest
from click.testing import CliRunner

from smalti.errors import UserError
from smalti.rundir import RunDirectory
from smalti_doctor.command import doctor


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object):
        done = CliRunner().invoke(doctor, [str(each) for each in arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done

    return run


def test_a_run_is_checked_and_described_without_its_secrets(call, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuv")
    monkeypatch.setenv("MY_PASSWORD", "correct horse battery")
    (tmp_path / "bad.toml").write_text('model_family = "toy"\noutput_dir = "run"\nseed = -5\n')
    done = call("bad.toml", "--json", "--bundle=report.zip")
    report = json.loads(done.stdout)
    assert done.return_value == report["exit_code"] == 3
    assert {"software", "devices", "processor", "memory", "storage", "host", "processes"} <= report["facts"].keys()
    wrong = [each for each in report["findings"] if each["check"] == "config"]
    assert all(each["level"] == "error" and each["fix"] for each in wrong)
    assert any("seed" in each["message"] for each in wrong)
    with zipfile.ZipFile("report.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"doctor.json", "packages.txt", "config.toml"} <= texts.keys()
    assert json.loads(texts["doctor.json"])["facts"]["environment"]["HF_TOKEN"] == "***"
    assert not any(secret in text for text in texts.values() for secret in ("hf_abcdefg", "correct horse"))


def test_a_bundle_never_replaces_a_file(call, tmp_path):
    (tmp_path / "report.zip").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        call("--bundle=report.zip")
    assert (tmp_path / "report.zip").read_text() == "mine"


def test_a_run_that_failed_before_it_had_a_configuration_is_described_without_torch(call, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    record = {"kind": "smalti-run", "schema": 1, "id": "x", "name": "x", "created": 1.0, "config_digest": "", "world_size": 1}
    directory.record_file.write_text(json.dumps({**record, "started": 2.0}))
    event = {
        "type": "state",
        "t": 3.0,
        "step": None,
        "state": "failed",
        "exit_code": 3,
        "message": "No captions found\n  fix: x",
    }
    directory.events_file.write_text(json.dumps(event) + "\n")
    done = call("run", "--bundle=report.zip")
    output = done.stdout
    assert (done.return_value, "torch cannot be imported: ImportError: libcudart is missing" in output) == (3, True)
    assert "run has ended with exit code 3: No captions found\n" in output
    assert "config" not in [line.split()[0] for line in output.splitlines() if line.strip()]
    with zipfile.ZipFile("report.zip") as archive:
        assert set(archive.namelist()) == {"doctor.json", "packages.txt", "config.toml", "run/run.json", "run/events.jsonl"}
