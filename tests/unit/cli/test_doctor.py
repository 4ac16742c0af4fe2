"""`smalti doctor` as a command: table, JSON, bundle, exit code."""

import json
import zipfile

import pytest
from click.testing import CliRunner

from smalti.cli.doctor.command import doctor
from smalti.errors import UserError


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
