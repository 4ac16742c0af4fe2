"""What each package says of itself to an index, and the licence that goes with it."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import smalti
from support import version

ROOT = Path(__file__).parents[2]
PROJECTS = {path.parent.name: path for path in (ROOT / "core/pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))}


@pytest.fixture(params=PROJECTS)
def project(request):
    return PROJECTS[request.param]


def test_a_package_has_the_text_of_the_licence(project):
    stated = tomllib.loads(project.read_text())["project"]
    assert (stated["license"], stated["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (project.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_a_package_says_who_made_it_and_what_it_is_for(project):
    stated = tomllib.loads(project.read_text())["project"]
    core = tomllib.loads(PROJECTS["core"].read_text())["project"]
    assert stated["authors"] == core["authors"]
    assert {"Typing :: Typed", "Programming Language :: Python :: 3"} <= {*stated["classifiers"]}
    assert stated["classifiers"] == core["classifiers"]
    assert stated["readme"] == "README.md"
    assert (project.parent / "README.md").is_file()
    assert list(project.parent.glob("src/*/py.typed"))
    assert stated["description"]


def test_all_packages_have_one_version_and_need_each_other_within_its_bounds(project):
    stated = tomllib.loads(project.read_text())["project"]
    assert (stated["version"], smalti.__version__, metadata.version(stated["name"])) == (version.current(),) * 3
    extras = stated.get("optional-dependencies", {})
    needs = [Requirement(each) for group in (stated["dependencies"], *extras.values()) for each in group]
    own = {each.name: each.specifier for each in needs if each.name.startswith("smalti") and each.name != stated["name"]}
    assert {*own.values()} == {SpecifierSet(version.bounds(version.current()))}
    assert ("smalti" in own) == (project.parent.name != "core")


def test_a_new_version_reaches_every_file_that_states_one_or_bounds():
    assert version.rewritten(version.current()) == {}
    texts = version.rewritten("7.65.4")
    assert {*PROJECTS.values(), ROOT / "core/src/smalti/__init__.py", ROOT / "docs/writing-a-plugin.md"} <= {*texts}
    stale = re.compile(rf"smalti[^\n]*{re.escape(version.bounds(version.current()))}|ersion(__)? = \"{version.current()}")
    assert [str(path) for path, text in texts.items() if stale.search(text)] == []
    needs = [Requirement(each) for each in tomllib.loads(texts[PROJECTS["webui"]])["project"]["dependencies"]]
    assert {str(each.specifier) for each in needs if each.name.startswith("smalti")} == {"<7.66,>=7.65"}


def test_a_version_of_other_than_three_numbers_is_refused():
    for wrong in ("", "0.3", "0.3.0rc1", "v0.3.0"):
        with pytest.raises(SystemExit, match="fix: make version"):
            version.main(wrong)
