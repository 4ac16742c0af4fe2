"""Real packages for the tests of discovery: small wheels, built here and installed with pip, seen by a process of its own."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.forked_popen import run_forked

GOOD = """
import smalti

class Good:
    @smalti.hookimpl
    def check_config(self, config):
        return []

plugin = Good()
"""

BODIES = {
    "good": GOOD,
    "other": GOOD,
    "noisy": "import pathlib, os\npathlib.Path(os.environ['NOISE']).write_text('imported')\n" + GOOD,
    "missing": "import a_package_that_nobody_has\n",
    "leaving": "import sys\nsys.exit(3)\n",
    "raising": "raise OSError('no licence')\n",
    "mistyped": GOOD.replace("check_config", "check_konfig"),
    "wrong_arguments": GOOD.replace("self, config", "self, settings"),
    "a_class": GOOD.replace("Good()", "Good"),
    "hookless": "plugin = object()\n",
    "nameless": "",
    "commanding": """
import click
import smalti

class Commanding:
    @smalti.hookimpl
    def register_commands(self, commands):
        commands.add_command(click.Command("greet", callback=lambda: click.echo("hello"), help="Say hello."))

plugin = Commanding()
""",
    "deepening": """
import click
import smalti

@click.command()
def greet():
    click.echo("hello")

class Deepening:
    @smalti.hookimpl
    def register_commands(self, commands):
        commands.below("config").add_deferred("smalti_deepening:greet", "Say hello.")
        commands.add_deferred("nowhere:at_all", "Not imported for help.", section="Data")

plugin = Deepening()
""",
    "usurping": """
import click
import smalti

class Usurping:
    @smalti.hookimpl
    def register_commands(self, commands):
        commands.add_command(click.Command("train"))

plugin = Usurping()
""",
    "usurping_below": """
import click
import smalti

class UsurpingBelow:
    @smalti.hookimpl
    def register_commands(self, commands):
        commands.below("config").add_command(click.Command("show"))

plugin = UsurpingBelow()
""",
    "declaring": """
import smalti

class MyOptions(smalti.Options):
    learning_rate: float = smalti.option(1.0, help="Already there.")

class Declaring:
    @smalti.hookimpl
    def declare_options(self):
        return [smalti.OptionGroup(name="mine", title="Mine", options=MyOptions)]

plugin = Declaring()
""",
    "failing": """
import smalti

class Failing:
    @smalti.hookimpl
    def check_config(self, config):
        return 1 / 0

plugin = Failing()
""",
    "claiming": """
import smalti

class Claiming:
    @smalti.hookimpl
    def configure_distributed(self, config):
        return smalti.DistributedPlan(name="claiming", title="Claiming", parallel="nowhere:at_all")

plugin = Claiming()
""",
    "rival": """
import smalti

class Rival:
    @smalti.hookimpl
    def configure_distributed(self, config):
        return smalti.DistributedPlan(name="rival", title="Rival", parallel="nowhere:at_all")

plugin = Rival()
""",
}


def build_wheel(folder: Path, distribution: str, version: str, plugin: str, body: str, requires: str = "") -> Path:
    """A wheel with one module and one entry point in the group of smalti's plugins."""
    module = distribution.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    contents = {
        f"{module}.py": body,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[smalti.plugins]\n{plugin} = {module}:plugin\n",
    }
    lines = []
    for name, text in contents.items():
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text.encode())}")
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in contents.items():
            wheel.writestr(name, text)
    return path


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    error: str

    @property
    def plugins(self) -> dict[str, dict]:
        """The plugins of `smalti plugins --json`, by name and in its order."""
        return {plugin["name"]: plugin for plugin in json.loads(self.out)["plugins"]}


@dataclass(frozen=True)
class Site:
    """Folders with installed packages, and smalti run with some of them on its path."""

    root: Path

    def run(self, packages: str, *words: str, **environment: str) -> Finished:
        """`smalti WORDS` in a process where these packages (separated by blanks) are installed."""
        path = os.pathsep.join(str(self.root / package) for package in packages.split())
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {**inherited, "PYTHONPATH": path, "COLUMNS": "200", **environment}
        done = run_forked([sys.executable, "-m", "smalti", *words], env=own)
        return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    """Every package of BODIES under its own folder, installed by pip; the plugin of `smalti-good` is called good."""
    root, wheels = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("wheels")
    wanted = {name: build_wheel(wheels, f"smalti-{name.replace('_', '-')}", "1.2", name, body) for name, body in BODIES.items()}
    wanted["twin"] = build_wheel(wheels, "smalti-twin", "0.9", "good", GOOD)
    wanted["impostor"] = build_wheel(wheels, "smalti-impostor", "0.9", "console", GOOD)
    wanted["too_new"] = build_wheel(wheels, "smalti-too-new", "7.0", "too_new", GOOD, "smalti>=99")
    wanted["fitting"] = build_wheel(wheels, "smalti-fitting", "7.0", "fitting", GOOD, "smalti<99")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    every = tmp_path_factory.mktemp("every")
    subprocess.run([*install, "--target", str(every), *map(str, wanted.values())], check=True)
    for name, wheel in wanted.items():  # one folder for each, out of what pip has installed
        stem = wheel.name.removesuffix("-py3-none-any.whl")
        (root / name).mkdir()
        for part in (f"{stem.rpartition('-')[0]}.py", f"{stem}.dist-info"):
            (root / name / part).symlink_to(every / part)
    return Site(root)
