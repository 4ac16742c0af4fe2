"""The plugin template as its user meets it: installed with pip, listed, trained for a few steps, tested by its own tests."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from standing import standing

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin-template"


@dataclass(frozen=True)
class Account:
    """An environment of its own, on top of this one, in which the template is installed."""

    python: Path
    site: Path

    def run(self, *words: object, folder: Path = TEMPLATE) -> subprocess.CompletedProcess:
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # pip reads 0 as: without isolation
        environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.python, *map(str, words)]
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def account(tmp_path_factory) -> Account:
    folder = tmp_path_factory.mktemp("account")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    above = [path for path in sys.path if path.endswith("site-packages")]
    (site / "above.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in above))
    account = Account(folder / "bin" / "python", site)
    installed = account.run("-m", "pip", "install", "-e", ".")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return account


def test_pip_install_makes_the_family_available(account):
    listing = json.loads(account.run("-m", "smalti", "plugins", "--json").stdout)
    [plugin] = [each for each in listing["plugins"] if each["name"] == "pebble"]
    assert (plugin["distribution"], plugin["state"]) == ("smalti-pebble", "active")
    assert "pebble" in [family["name"] for family in listing["model_families"]]


def test_it_trains_resumes_and_draws(account, pictures, tmp_path):
    flags = (
        *("--model_family=pebble", "--pebble_width=16", "--pebble_depth=2", "--resolution=16", "--resolution_type=pixel"),
        *(
            f"--instance_data_dir={pictures}",
            f"--output_dir={tmp_path / 'run'}",
            "--train_batch_size=4",
            "--learning_rate=1e-3",
        ),
        *("--validation_prompt=circle number 1", "--gradient_accumulation_steps=2", "--use_ema", "--use_cpu"),
    )
    installed = {"PYTHONPATH": os.pathsep.join(map(str, (account.site, TEMPLATE / "src"))), "HF_HOME": str(tmp_path / "hf")}
    for steps in (4, 6):
        code, output = standing().train([*flags, f"--max_train_steps={steps}"], installed)
        assert code == 0, output
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [event["step"] for event in map(json.loads, lines) if event["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "samples" / "00000006" / "grid.png").is_file()


def test_what_it_cannot_do_is_refused_with_what_to_do(account, pictures, tmp_path):
    flags = ("--model_family=pebble", "--model_type=lora", "--max_train_steps=1", f"--instance_data_dir={pictures}")
    refused = account.run("-m", "smalti", "train", *flags, f"--output_dir={tmp_path / 'run'}", folder=tmp_path)
    assert refused.returncode == 2
    assert "pebble has no adapters" in refused.stderr


def test_its_own_tests_pass(account, tmp_path):
    done = account.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", TEMPLATE, TEMPLATE / "tests", folder=tmp_path
    )
    assert done.returncode == 0, done.stdout


def test_it_stays_short():
    texts = [path.read_text() for path in TEMPLATE.glob("src/**/*.py")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 150
