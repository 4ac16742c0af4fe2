"""The day of a GPU, rehearsed on the CPU: every check reports the fault that is planted for it, and passes without."""

import json
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import forked_day

from smalti_testing.nvml import VARIABLE, FakeNvml
from support.forked_ranks import forked_processes
from support.whole import WHOLE, some

HERE = Path(__file__).parent


@contextmanager
def importable():
    sys.path.insert(0, str(forked_day.BENCH))
    yield
    sys.path.remove(str(forked_day.BENCH))


with importable():
    from gpuday import documents
    from gpuday.day import lacking
    from gpuday.measures import furthest
    from gpuday.processes import Setting
    from gpuday.table import GPU_DAY, cluster

SETTING = Setting(folder=Path(), rehearsed=True, hardware={})
POSSIBLE = [check for check in GPU_DAY if not lacking(check, SETTING)]
FAULTS = {
    "sdxl-lora": ("memory", "peak_of_plan"),
    "resume": ("forget", "loss_difference"),
    "saves": ("corrupt", "unverified"),
    "sdxl-b8": ("slow", "seconds"),
    "bare-sdxl": ("slow", "bare_ratio"),
    "flux-lora": ("memory", "peak_of_plan"),
    "compile-sdxl": ("break", "breaks"),
    "compile-flux-lora": ("break", "breaks"),
    "lion-512": ("slow", "seconds"),
    "zero2-offload": ("huge", "peak_mib"),
    "zero2-offload-128": ("huge", "peak_mib"),
    "offload-sdxl-lora": ("memory", "peak_of_plan"),
    "nccl": ("sum", "wrong"),
    "zero3": ("output", "loss_difference"),  # its weights are not there yet
    "lost-rank": ("unsaved", "lost_steps"),
    "health": ("", "stopping"),  # by the driver
    "correct-sd3": ("exit", ""),  # whose process ends
}
"""What `smalti_spoiler` does to each check, and the figure that tells; of all others the weights are wrong."""
LIGHT = ("health", "nccl")
"""Some of each kind: all checks take minutes."""
SOME = (*LIGHT, "resume", "compile-sdxl", "bare-sdxl", "sharded-one", "lost-rank") if WHOLE else LIGHT


@pytest.fixture(scope="module")
def process():
    with forked_processes(ranks=1, group=False, seconds=550, imports=forked_day.IMPORTS) as running:
        yield running


@pytest.fixture(scope="module")
def day(process, tmp_path_factory):
    """day("--only", ..., spoil="CHECK=KIND,...") -> exit code, output, and the results by check; always in one folder."""
    folder, driver = tmp_path_factory.mktemp("day"), FakeNvml(tmp_path_factory.mktemp("nvml"))

    def run(*words: str, spoil: str = "", gpu: str = "", place: Path = folder):
        driver.set("count 1", *([gpu] if gpu else []))
        path = os.pathsep.join(map(str, (HERE / "spoiler", *forked_day.PATHS)))
        variables = {"SPOIL": spoil, VARIABLE: str(driver.control), "PYTHONPATH": path}
        given = ["--folder", str(place), "--minutes", "1000", *words]
        code, output = process.run(forked_day.day, given, variables, driver.library.parent)[0]
        return code, output, json.loads((place / "state.json").read_text())["checks"]

    return run


@pytest.mark.parametrize("name", some([check.name for check in POSSIBLE], *LIGHT))
def test_a_planted_fault_is_reported(day, name):
    kind, figure = FAULTS.get(name, ("loss", "loss_difference"))
    code, output, results = day("--only", name, spoil=f"{name}={kind}", gpu="recovery.0 1")
    problems = results[name]["problems"]
    assert (code, results[name]["status"]) == (1, "failed"), output
    report = Path(output.splitlines()[-1]).read_text()
    assert f"| {name} | failed |" in report
    assert problems[0] in report
    if not figure:
        assert "ended with exit code 3" in problems[0]
        return
    told = {each.split()[0] for each in problems}
    assert figure in told, problems
    assert told <= {figure, "gradient_difference", "graphs"}, problems  # the latter ones of the same fault


@pytest.fixture(scope="module")
def whole(day):
    """Some of each kind, without faults; those that have failed before are made again."""
    return day("--again", "--only", *SOME)


def test_without_a_fault_checks_pass(whole):
    code, output, results = whole
    assert [(name, results[name]["problems"]) for name in SOME if results[name]["status"] != "passed"] == []
    assert code == 0, output


def test_what_is_done_is_not_made_again(whole, day):
    code, output, results = day("--only", *SOME)
    assert code == 0
    assert results == whole[2]
    assert output.count("passed before") == len(SOME)


def test_a_check_that_hangs_is_ended_and_the_day_continues(day, tmp_path):
    code, output, results = day("--only", "correct-sdxl", "health", "--limit", "8", spoil="correct-sdxl=hang", place=tmp_path)
    assert code == 1
    assert results["correct-sdxl"]["problems"][0].startswith("ended after 8 s")
    assert results["health"]["status"] == "passed", output


def test_no_check_begins_that_would_end_too_late(day, tmp_path):
    _, output, results = day("--minutes", "0.4", "--only", "health", "correct-sdxl", place=tmp_path)
    assert list(results) == ["health"]
    assert "correct-sdxl: left out: needs 0.5 more minutes" in output


EVERY = [(check, bound) for check in (*GPU_DAY, *cluster(8)) for bound in check.bounds]


@pytest.mark.parametrize(("check", "bound"), EVERY, ids=[f"{check.name}-{bound.figure}" for check, bound in EVERY])
def test_each_bound_is_held_on_a_device(check, bound):
    kept = {each.figure: each.least if each.most is None else each.most for each in check.bounds}
    beyond = bound.least * 0.99 - 0.01 if bound.most is None else bound.most * 1.01 + 0.01

    def problems(figures):
        return check.problems(figures, device="NVIDIA H100 80GB HBM3", rehearsed=False)

    assert problems(kept) == []
    for found in (beyond, float("nan"), None):
        [problem] = problems(kept | {bound.figure: found})
        assert problem.startswith(bound.figure)


def test_goals_of_one_device_do_not_count_on_others():
    check = next(check for check in GPU_DAY if check.name == "sdxl-b8")
    figures = {"peak_of_plan": 1.0, "seconds": 0.9, "mfu": 0.4}
    assert check.problems(figures, device="NVIDIA A100", rehearsed=False) == []
    assert len(check.problems(figures, device="NVIDIA H100 NVL", rehearsed=False)) == 2


def test_losses_that_are_not_finite_are_a_difference():
    assert furthest([0.5, float("nan")], [0.5, float("nan")]) == float("inf")
    assert furthest([0.5, 1.0], [0.5, 1.0]) == 0
    assert math.isnan(furthest([0.5], [0.5, 1.0]))


def test_figures_of_a_report_replace_computed_ones_in_documents(tmp_path):
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    page.write_text("| a | <!-- measured:memory_sdxl_lora -->12.7<!-- end --> | <!-- measured:other -->1<!-- end --> |\n")
    found = {"date": "2026-12-01", "hardware": {"device": "NVIDIA H100"}, "measured": {"memory_sdxl_lora": 12.94}}
    report.write_text(json.dumps({**found, "rehearsed": False}))
    for _ in range(2):  # figures that are measured already are replaced by those of a later report
        documents.main([str(report), str(page)])
        mark = "<!-- measured:memory_sdxl_lora -->12.9 (measured: NVIDIA H100, 2026-12-01)<!-- end -->"
        assert page.read_text() == f"| a | {mark} | <!-- measured:other -->1<!-- end --> |\n"
    report.write_text(json.dumps({**found, "rehearsed": True}))
    with pytest.raises(SystemExit, match="rehearsal"):
        documents.main([str(report), str(page)])


def test_marks_of_documents_are_measured_by_a_check():
    keys = {key for check in (*GPU_DAY, *cluster(8)) for key in check.marks or {}}
    pages = sorted((HERE.parents[1] / "docs").rglob("*.md"))
    assert {mark[2] for page in pages for mark in documents.MARK.finditer(page.read_text())} <= keys
