"""What plugins keep between runs, listed and cleared by name."""

import json
import os
import subprocess
import sys

import pytest

from smalti.errors import UserError
from smalti.plugins import CacheFile, load_plugins
from smalti_cache.all_caches import find_cache, list_caches
from support.commands import commands


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "smalti"


@pytest.fixture
def kept() -> CacheFile:
    return CacheFile("attic")


@pytest.fixture
def attic(monkeypatch, tmp_path):
    """An installed plugin that keeps things in two caches."""
    info = tmp_path / "site" / "smalti_attic-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smalti-attic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[smalti.plugins]\nattic = smalti_attic:plugin\n")
    (tmp_path / "site" / "smalti_attic.py").write_text(
        "import smalti\n"
        "from smalti.plugins.caches import CacheFile\n"
        "class Attic:\n"
        "    @smalti.hookimpl\n"
        "    def register_caches(self):\n"
        "        return [entry('old'), entry('new')]\n"
        "def entry(n):\n"
        "    return smalti.CacheEntry(name=f'attic-{n}', title=f'{n} things', factory=f'smalti_attic:{n}')\n"
        "def old():\n"
        "    return CacheFile('attic')\n"
        "def new():\n"
        "    return CacheFile('attic-new')\n"
        "plugin = Attic()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("SMALTI_PLUGINS", "attic,cache")


@pytest.fixture
def run(capsys):
    return commands(capsys, "cache")


def test_every_cache_is_listed_with_its_place_and_size(attic, run, kept):
    kept.put("one", 1)
    listed = json.loads(run("ls", "--json")[1])["caches"]
    place = kept.place.replace("attic.json", "attic-new.json")
    assert [each for each in listed if each["name"].startswith("attic")] == [
        {"name": "attic-new", "title": "new things", "place": place, "entries": 0, "bytes": 0},
        {"name": "attic-old", "title": "old things", "place": kept.place, "entries": 1, "bytes": kept.size()},
    ]
    lines = [line.split()[:2] for line in run("ls")[1].splitlines()[1:]]
    assert [line for line in lines if line[0].startswith("attic")] == [["attic-new", "0"], ["attic-old", "1"]]


@pytest.mark.parametrize("name", ["attic-old", "Attic_Old"])
def test_a_cache_is_cleared_by_its_name(attic, run, kept, name):
    kept.put("one", 1)
    size = kept.size()
    code, out, _ = run("clear", name, "--yes")
    assert (code, out) == (0, f"{kept.place}: cleared 1 entry ({size} B)\n")
    assert run("clear", name)[1] == f"{kept.place}: nothing to clear\n"


def test_an_unknown_cache_gets_the_nearest_ones(attic, run):
    assert run("clear", "atic-old")[::2] == (
        2,
        "smalti: error: unknown cache 'atic-old'\n  fix: did you mean attic-old? caches: attic-new, attic-old\n",
    )


def test_a_cache_of_a_plugin_that_is_left_out_says_so(run, monkeypatch):
    monkeypatch.setenv("SMALTI_WITHOUT", "fsdp2")
    code, _, errors = run("clear", "fsdp-blocks")
    assert (code, "the plugin 'fsdp2' is installed but disabled" in errors) == (4, True)


def test_what_was_counted_and_measured_for_plans_is_listed_and_cleared(run, home):
    kept = CacheFile("plan-calibrations")
    kept.put("a processor", {"seconds": 1.0})
    _, out, errors = run("ls")
    assert "no latents and captions found" in errors
    [line] = [line for line in out.splitlines() if line.startswith("plan-calibrations")]
    assert (line.split()[1], line.split()[-1]) == ("1", str(home / "plan-calibrations.json"))
    assert run("clear", "plan-calibrations", "--yes")[0] == 0
    assert kept.entries() == 0


def test_a_page_can_list_and_clear_without_the_command_line():
    plugins = load_plugins()
    assert all(each.entries == 0 for each in list_caches(plugins))
    with pytest.raises(UserError, match="unknown cache 'attic'"):
        find_cache(plugins, "attic").clear()


def test_nobody_is_asked_where_nobody_can_answer(attic, kept, tmp_path):
    kept.put("one", 1)
    path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "smalti", "cache", "clear", "attic-old"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60
    )
    assert (done.returncode, kept.entries()) == (0, 0)


def test_a_configuration_without_this_plugin_has_no_encodings(run, tmp_path):
    code, out, errors = run("ls", "--plugins=fsdp2", f"--output_dir={tmp_path}")
    assert (code, "fsdp-blocks" in out, "no latents and captions found" in errors) == (0, True, True), errors
