"""Files for people and services around the repository: forms, workflows, linters. What they name is there, and agrees."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import dependencies, version

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def jobs(request):
    return yaml.safe_load(request.param.read_text())["jobs"]


def commands(jobs):
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_what_a_workflow_runs_is_there(jobs):
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(jobs):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for path in re.findall(r"(?:^|\s)((?:tests|\.ci)/[\w./]+)", command):
            assert (ROOT / path).is_file(), path


def test_a_job_has_a_limit_of_time_and_no_more_rights_than_it_needs(jobs):
    for name, job in jobs.items():
        assert name == "publish" or job["timeout-minutes"] <= 240
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})


def test_ci_runs_what_is_run_here():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert commands(jobs) == [".ci/run"]


def test_a_release_is_refused_unless_its_tag_is_the_version():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    check = next(each for each in commands(jobs) if "GITHUB_REF_NAME" in each)
    for tag, code in ((f"v{version.current()}", 0), ("v0.0.1", 1)):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"GITHUB_REF_NAME": tag, "PATH": path}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment, check=False).returncode == code
    assert jobs["publish"]["needs"] == "build"


def test_forms_ask_for_a_report_of_doctor_and_name_pages_that_are_there():
    fields = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())["body"]
    labels = [each["attributes"].get("label", "") for each in fields]
    assert "`smalti doctor --json`" in labels
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        for path in re.findall(r"\bdocs/[a-z-]+\.md|\b[A-Z]+\.md", form.read_text()):
            assert (ROOT / path).is_file(), path


def test_the_version_of_ruff_is_the_same_before_a_commit_and_in_ci():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    assert [each["rev"] for each in hooks] == [f"v{pinned}"]


def test_links_of_the_pages_beside_readme_lead_somewhere():
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), target


def test_the_container_has_every_package_and_a_torch_that_is_accepted():
    text = (ROOT / "Containerfile").read_text()
    named = set(re.findall(r"/source/plugins/([a-z0-9_]+)", text))
    assert named == {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert re.search(r"^ARG TORCH=(.+)$", text, re.MULTILINE).group(1) in dependencies.declared(ROOT)["torch"]


def test_the_page_of_versions_tells_the_bounds_and_what_is_pinned():
    text = (ROOT / "docs/support.md").read_text()
    pinned = dependencies.pins((ROOT / "constraints.txt").read_text())
    for name, bounds in dependencies.declared(ROOT).items():
        row = re.search(rf"^\| {name} \| ([0-9.]+)(?: to ([0-9.]+))? \| ([0-9.]+)", text, re.MULTILINE | re.IGNORECASE)
        assert row is not None or name not in ("torch", "diffusers", "deepspeed")
        if row is not None:
            assert row.group(1) == dependencies.lowest(bounds)
            assert pinned[name].startswith(f"{row.group(3)}.")
            last = (row.group(2) or row.group(1)).split(".")
            upper = next(each.version for each in bounds if each.operator == "<")
            assert upper == f"{last[0]}.{int(last[1]) + 1}"
