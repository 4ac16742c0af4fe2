"""What each package says of itself to an index, and the licence that goes with it."""

import tomllib
from pathlib import Path

import pytest

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


def test_packages_have_one_version_and_need_the_core_of_it(project):
    stated = tomllib.loads(project.read_text())["project"]
    assert stated["version"] == tomllib.loads(PROJECTS["core"].read_text())["project"]["version"]
    if project.parent.name != "core":
        assert any(need.startswith("smalti>=") for need in stated["dependencies"])
