import pytest

from smalti_webui.launch.dry_run import dry_run_of

ANSWER = {
    "launch": {
        "launcher": "elastic",
        "strategy": "FSDP",
        "settings": {},
        "ranks": [0, 1],
        "command": ["python", "-m", "torch.distributed.run", "runs/a b"],
        "environment": {"OMP_NUM_THREADS": "1"},
        "accelerate": {},
    },
    "device": "CPU, 2 processes",
    "precision": "bf16",
    "config": {"digest": "5f", "changes": {"train_batch_size": 3, "num_processes": 2}},
    "plugins": ["core smalti 0.1.0", "ddp smalti 0.1.0", "toy smalti-toy 0.1.0"],
    "notices": ["no GPU found"],
    "effective_batch": 6,
    "steps": 20,
    "samples": 20,
    "buckets": [{"size": "52x80", "samples": 8}, {"size": "64x64", "samples": 12}],
    "quarantined": [],
}


def levels(found):
    return {check.title: check.level for check in found.checks}


def test_a_dry_run_that_passes_can_be_started():
    found = dry_run_of(ANSWER, "", 0, None)
    assert found.ready
    assert set(levels(found).values()) == {"ok", "warning", "skipped"}
    assert [check.text for check in found.checks if check.level == "warning"] == ["no GPU found"]
    assert found.command == "python -m torch.distributed.run 'runs/a b'"
    assert (found.effective_batch, found.formula) == (6, "3 per rank x 2 ranks x 1 accumulated = 6")
    assert found.buckets == (("52x80", 8, 1), ("64x64", 12, 2))


def test_problems_are_in_the_words_of_the_command_line_and_nothing_after_them_was_checked():
    problem = {"message": "unknown option --x\nmore", "fix": "did you mean --y?", "where": "command line"}
    found = dry_run_of({"problems": [problem], "exit_code": 2}, "", 2, None)
    assert not found.ready
    assert not found.can_wait
    first, *rest = found.checks
    assert (first.title, first.text, first.details, first.fix) == (
        "Options",
        "command line: unknown option --x",
        ("more",),
        "did you mean --y?",
    )
    assert {check.level for check in rest} == {"skipped"}


def test_a_failed_preflight_says_that_the_options_are_valid():
    problem = {"message": "no images", "fix": "", "where": ""}
    found = dry_run_of({"problems": [problem], "exit_code": 3}, "", 3, None)
    assert levels(found)["Options"] == "ok"
    assert levels(found)["Preflight"] == "error"


def test_an_end_without_answer_is_an_error():
    found = dry_run_of(None, "Traceback\nValueError: x\n", 1, None)
    assert (found.ready, found.reason) == (False, "ValueError: x")


def test_files_that_cannot_be_used_are_listed():
    found = dry_run_of({**ANSWER, "quarantined": [{"key": "a.png", "reason": "truncated"}]}, "", 0, None)
    (check,) = [each for each in found.checks if each.title == "Data"]
    assert (check.level, check.details) == ("warning", ("a.png: truncated",))


@pytest.mark.parametrize(
    ("condition", "level", "text"),
    [("finished", "ok", "it resumes after step 4"), ("running", "error", "is in use by a running run")],
)
def test_the_run_directory_is_looked_at(make_run, condition, level, text):
    run = make_run("first", condition=condition, steps=4)
    found = dry_run_of(ANSWER, "", 0, run.path)
    (check,) = [each for each in found.checks if each.title == "Run directory"]
    assert (check.level, found.ready, found.can_wait) == (level, level == "ok", True)
    assert text in check.text


def test_a_directory_that_does_not_exist_is_new(tmp_path):
    found = dry_run_of(ANSWER, "", 0, tmp_path / "new")
    assert found.checks[-2].text == f"{tmp_path / 'new'} is new"
