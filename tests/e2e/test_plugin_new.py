"""What `smalti plugin new` writes, as its author meets it: installed with pip, listed, tested by its own tests, trained."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from smalti.cli.entry import main
from smalti_testing.new_plugin import KINDS
from support.warm_processes import warm_processes
from support.whole import some

LONGEST = "n" * 24


@dataclass(frozen=True)
class Account:
    """An environment of its own, on top of this one, with one package of each kind in it, named `my_KIND`."""

    python: Path
    site: Path
    packages: Path

    def run(self, *words: object) -> subprocess.CompletedProcess:
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_WARN_CONFLICTS": "0"}  # pip reads 0 as: without
        environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.python, *map(str, words)]
        return subprocess.run(command, env=environment, cwd=self.packages, capture_output=True, text=True, timeout=480)

    def variables(self, home: Path) -> dict[str, str]:
        """Of a process that stands ready, in which the packages are then installed."""
        sources = [self.packages / kind / "src" for kind in KINDS]
        return {"PYTHONPATH": os.pathsep.join(map(str, (self.site, *sources))), "HF_HOME": str(home / "hf")}


def create(folder: Path, name: str, kind: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plugin", "new", name, "--kind", kind, "--to", str(folder)])


@pytest.fixture(scope="module")
def account(tmp_path_factory) -> Account:
    packages, folder = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("account")
    for kind in KINDS:
        create(packages / kind, f"my-{kind}", kind)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    above = [path for path in sys.path if path.endswith("site-packages")]
    (site / "above.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in above))
    account = Account(folder / "bin" / "python", site, packages)
    installed = account.run("-m", "pip", "install", *(word for kind in KINDS for word in ("-e", f"./{kind}[test]")))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return account


def test_pip_install_makes_the_plugins_available(account):
    listing = json.loads(account.run("-m", "smalti", "plugins", "--json").stdout)
    states = {each["name"]: (each["distribution"], each["state"]) for each in listing["plugins"]}
    wanted = {f"my_{kind}": (f"smalti-my-{kind}", "active") for kind in KINDS}
    assert {name: states.get(name) for name in wanted} == wanted
    assert "my_family" in [family["name"] for family in listing["model_families"]]


def test_their_own_tests_pass(account):
    """But for what the kit checks on two processes, where not all cases run: tests/contracts/test_shipped.py has it for others.

    Those of a family: tests/contracts/test_writing_a_plugin.py.
    """
    tested = some([kind for kind in KINDS if kind != "family"], *(kind for kind in KINDS if kind not in ("family", "strategy")))
    files = [account.packages / kind / "tests" for kind in tested]
    chosen = some(["not sharded", ""], "not sharded")[-1]
    done = account.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", chosen, *files)
    assert done.returncode == 0, done.stdout


def test_the_family_trains_resumes_and_samples(account, pictures, tmp_path):
    flags = (
        *("--model_family=my_family", "--my_family_width=16", "--my_family_depth=2", "--resolution=16"),
        *("--resolution_type=pixel", f"--instance_data_dir={pictures}", f"--output_dir={tmp_path / 'run'}"),
        *("--train_batch_size=4", "--learning_rate=1e-3", "--optimizer=my-optimizer", "--validation_prompt=circle number 1"),
        *("--gradient_accumulation_steps=2", "--use_ema", "--use_cpu"),
    )
    for steps in (4, 6):
        code, output = warm_processes().train([*flags, f"--max_train_steps={steps}"], account.variables(tmp_path))
        assert code == 0, output
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [event["step"] for event in map(json.loads, lines) if event["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "samples" / "00000006" / "grid.png").is_file()


def test_the_term_weighs_images_by_its_column(account, pictures, tmp_path):
    losses = []
    for name, keys in (("plain", {}), ("weighed", {"my_term_pixels": 4096})):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"id": "a", "instance_data_dir": str(pictures), **keys}]))
        flags = ("--model_family=toy", "--resolution=16", "--max_train_steps=1", "--train_batch_size=1", "--use_cpu")
        words = [*flags, f"--data_backend_config={tmp_path / name}.json", f"--output_dir={tmp_path / name}"]
        code, output = warm_processes().train(words, account.variables(tmp_path))
        assert code == 0, output
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        losses += [event["loss"] for event in events if event["type"] == "step"]
    assert losses[1] / losses[0] == pytest.approx(32 * 32 / 4096, rel=1e-5)


def test_what_the_family_cannot_do_is_refused_with_what_to_do(account, pictures, tmp_path):
    flags = ("--model_family=my_family", "--model_type=lora", "--max_train_steps=1", f"--instance_data_dir={pictures}")
    refused = account.run("-m", "smalti", "train", *flags, f"--output_dir={tmp_path / 'run'}")
    assert refused.returncode == 2
    assert "--model_type=full" in refused.stderr


@pytest.mark.parametrize("name", some(["q", LONGEST], LONGEST))
def test_the_code_is_formatted_and_sound_whatever_the_name(name, tmp_path):
    for kind in KINDS:
        create(tmp_path / kind, name, kind)
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--isolated", "--diff"], ["check", "--isolated", "--select", "E4,E7,E9,F,I,UP,B,W"]):
        for kind in KINDS:
            done = subprocess.run([*ruff, *words, "."], cwd=tmp_path / kind, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def test_a_family_stays_short(tmp_path):
    create(tmp_path / "family", "short", "family")
    texts = [path.read_text() for path in (tmp_path / "family").glob("src/**/*.py")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 150
