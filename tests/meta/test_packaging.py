"""What each package says of itself to an index, and the licence that goes with it."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import smalti
from support import dependencies, version

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
    assert (stated["classifiers"], stated["keywords"]) == (core["classifiers"], core["keywords"])
    assert stated["readme"] == "README.md"
    assert (project.parent / "README.md").is_file()
    assert list(project.parent.glob("src/*/py.typed"))
    assert stated["description"]


def test_all_packages_have_one_version_and_need_each_other_within_its_bounds(project):
    stated = tomllib.loads(project.read_text())["project"]
    assert (stated["version"], smalti.__version__, metadata.version(stated["name"])) == (version.current(),) * 3
    needs = dependencies.requirements(project)
    own = {each.name: each.specifier for each in needs if each.name.startswith("smalti") and each.name != stated["name"]}
    assert {*own.values()} == {SpecifierSet(version.bounds(version.current()))}
    assert ("smalti" in own) == (project.parent.name != "core")


def test_every_dependency_has_bounds_that_are_the_same_everywhere_and_hold_what_is_tested():
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonicalize_name(name): number for name, number in tested.items()}
    asked = {}
    for path in PROJECTS.values():
        for need in dependencies.requirements(path):
            asked.setdefault(canonicalize_name(need.name), set()).add(need.specifier)
    bounded = {name: {each.operator for one in found for each in one} for name, found in asked.items()}
    assert {name: signs for name, signs in bounded.items() if name != "smalti" and not {">=", "<"} <= signs} == {}
    assert {name: found for name, found in asked.items() if len(found - {SpecifierSet()}) > 1} == {}
    outside = [name for name, found in asked.items() for each in found if name in pinned and pinned[name] not in each]
    assert outside == []
    assert {name for name in asked if not name.startswith("smalti")} <= {*pinned}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-demo.txt"])
def test_a_list_of_packages_has_what_they_need_from_the_same_clone(name):
    listed = re.findall(r"^(?:-e )?\./(?:plugins/)?(\w+)", (ROOT / name).read_text(), flags=re.MULTILINE)
    stated = [tomllib.loads(PROJECTS[folder].read_text())["project"] for folder in listed]
    needed = {Requirement(each).name for project in stated for each in project["dependencies"]}
    assert {each for each in needed if each.startswith("smalti")} <= {project["name"] for project in stated}


def test_the_extra_all_has_every_package_but_those_for_authors():
    project = tomllib.loads(PROJECTS["core"].read_text())["project"]
    extras = project["optional-dependencies"]
    named = {Requirement(each).name for each in (*extras["usual"], *extras["all"])}
    packages = {tomllib.loads(path.read_text())["project"]["name"] for path in PROJECTS.values()}
    assert named == packages - {"smalti-testing", "smalti-toy"}


def test_a_new_version_reaches_every_file_that_states_one_or_bounds():
    assert version.rewritten(version.current()) == {}
    texts = version.rewritten("7.65.4")
    assert {*PROJECTS.values(), ROOT / "core/src/smalti/__init__.py", ROOT / "CITATION.cff"} <= {*texts}
    stale = re.compile(rf"smalti[^\n]*{re.escape(version.bounds(version.current()))}|ersion(__)? = \"{version.current()}")
    assert [str(path) for path, text in texts.items() if stale.search(text)] == []
    needs = [Requirement(each) for each in tomllib.loads(texts[PROJECTS["webui"]])["project"]["dependencies"]]
    assert {str(each.specifier) for each in needs if each.name.startswith("smalti")} == {"<7.66,>=7.65"}


def test_a_version_of_other_than_three_numbers_is_refused():
    for wrong in ("0.3", "0.3.0rc1", "v0.3.0"):
        with pytest.raises(SystemExit, match="fix: make version"):
            version.main(wrong)


def test_the_newest_and_the_lowest_versions_are_chosen_from_the_bounds(tmp_path):
    bounds = dependencies.declared(ROOT)
    assert ({"torch", "click", "hatchling"} <= {*bounds}, {name for name in bounds if name.startswith("smalti")}) == (
        True,
        set(),
    )
    tested = {"torch": "2.13.0", "click": "8.5.1", "pytest": "9.2.0", "six": "1.17.0"}
    assert dependencies.planned("newest", bounds, tested, ["torch"]) == {"torch": "2.13.0", "pytest": "9.2.0"}
    low = dependencies.planned("lowest", bounds, tested, ["torch"])
    assert (low["torch"], low["pytest"], low["click"], "six" in low) == ("2.13.0", "9.2.0", "8.4.2", False)
    (tmp_path / "core").mkdir()
    (tmp_path / "core/pyproject.toml").write_text('x = ["click>=8.2,<9", "nvidia-ml-py>=13.580,<14", "smalti-data>=0.2,<0.3"]')
    dependencies.loosen(tmp_path)
    loose = 'x = ["click>=8.2", "nvidia-ml-py>=13.580", "smalti-data>=0.2,<0.3"]'
    assert (tmp_path / "core/pyproject.toml").read_text() == loose
