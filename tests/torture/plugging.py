"""G: plugins that break, quit, do not fit, come twice, or were not asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from .subject import Report

BODIES = {
    "cannot-import": "import a_package_that_nobody_has\n",
    "quits": "import sys\nsys.exit(0)\n",
    "quits-hard": "raise KeyboardInterrupt\n",
    "raises": "raise OSError('no licence')\n",
    "mistyped": "import smalti\nclass P:\n    @smalti.hookimpl\n    def on_stepp_end(self): ...\nplugin = P()\n",
    "nameless": "",
    "syntax": "def broken(:\n",
}
CANARY = "import os, pathlib\npathlib.Path(os.environ['CANARY']).touch()\nplugin = object()\n"


def package(folder: Path, name: str, body: str, *, requires: str = "", distribution: str = "") -> None:
    """An installed distribution with one plugin, as pip would leave it."""
    module = "m_" + (distribution or name).replace("-", "_")
    distribution = distribution or f"dist-{name}"
    (folder / f"{module}.py").write_text(body)
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n{needs}")
    (info / "entry_points.txt").write_text(f"[smalti.plugins]\n{name} = {module}:plugin\n")


def smalti(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CANARY": str(folder / "canary")}
    return subprocess.run(
        [sys.executable, "-m", "smalti", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def plugged(chance: Random, place: Path) -> Report:
    report = Report()
    name = chance.choice(sorted(BODIES))
    _broken(report, place / "broken", name)
    which = chance.choice((_incompatible, _twice, _not_asked_for))
    which(report, place / which.__name__.strip("_"))
    return report


def _broken(report: Report, folder: Path, name: str) -> None:
    folder.mkdir()
    package(folder, name, BODIES[name])
    listed, refused = smalti(folder, "plugins", "--json"), smalti(folder, "train", "--dry-run")
    report.faults += 1
    if name == "quits-hard":
        report.expect(listed.returncode in (1, 130), f"{name}: listing ends with {listed.returncode}")
        return
    states = {each["name"]: each["state"] for each in json.loads(listed.stdout)["plugins"]} if listed.returncode == 0 else {}
    report.expect(states.get(name) == "broken", f"{name}: listed as {states.get(name)} ({listed.stderr[-200:]})")
    told = name in refused.stderr and f"dist-{name} 1.0" in refused.stderr and f"--without {name}" in refused.stderr
    report.expect(refused.returncode == 4 and told, f"{name}: a run ends with {refused.returncode}: {refused.stderr[-300:]}")


def _incompatible(report: Report, folder: Path) -> None:
    folder.mkdir()
    package(folder, "old", CANARY, requires="smalti<0.0.1")
    listed = smalti(folder, "plugins")
    report.faults += 1
    report.expect("needs smalti <0.0.1" in listed.stdout.replace("smalti<", "smalti <"), f"old: {listed.stdout[-300:]}")
    report.expect(not (folder / "canary").exists(), "a plugin for another version was imported")


def _twice(report: Report, folder: Path) -> None:
    folder.mkdir()
    for distribution in ("dist-one", "dist-two"):
        package(folder, "same", CANARY, distribution=distribution)
    refused = smalti(folder, "train", "--dry-run")
    report.faults += 1
    report.expect(
        refused.returncode == 2 and "dist-one 1.0 and dist-two 1.0" in refused.stderr,
        f"same: {refused.returncode} {refused.stderr[-300:]}",
    )


def _not_asked_for(report: Report, folder: Path) -> None:
    folder.mkdir()
    package(folder, "spy", CANARY)
    smalti(folder, "plugins", "--without=spy")
    smalti(folder, "train", "--help", "--without=all")
    report.faults += 2
    report.expect(not (folder / "canary").exists(), "a plugin that was left out was imported")
