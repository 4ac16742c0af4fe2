"""What differs between runs."""

from __future__ import annotations

import json
from collections.abc import Callable

from smalti.plugins import Selection
from smalti.rundir import RunDirectory
from smalti_webui.configs.schemas import schema_with
from smalti_webui.places.compare.differences import beside, differences, shown_steps
from smalti_webui.places.gallery.samples import gallery

MakeRun = Callable[..., RunDirectory]


def _launched(run: RunDirectory, **values: object) -> RunDirectory:
    run.launch_file.write_text(json.dumps({"values": {"output_dir": str(run.path), **values}}))
    return run


def test_only_options_that_differ_are_listed_and_secrets_are_masked(make_run: MakeRun) -> None:
    one = _launched(make_run("one", samples=()), seed=1, optimizer="adamw", aws_secret_key="hf_" + "a" * 30, betas=[0.9, 0.95])
    two = _launched(make_run("two", samples=()), seed=2, optimizer="adamw", aws_secret_key="hf_" + "b" * 30)

    found = {each.option: each.values for each in differences([one, two], schema_with(Selection()))}

    assert found == {"seed": ("1", "2"), "aws_secret_key": ("***", "***"), "betas": ("[0.9, 0.95]", None)}


def test_a_run_without_a_launch_is_compared_by_its_file(make_run: MakeRun) -> None:
    one, two = make_run("one", samples=()), make_run("two", samples=())
    two.launch_file.write_text("not JSON")
    two.config_file.write_text('model_family = "sdxl"\n')

    assert [(each.option, each.values) for each in differences([one, two], schema_with(Selection()))] == [
        ("model_family", ("toy", "sdxl"))
    ]


def test_images_are_beside_each_other_at_a_step_that_all_have(make_run: MakeRun) -> None:
    galleries = [
        gallery(make_run("one", samples=(5, 10), prompts=("a", "b"))),
        gallery(make_run("two", samples=(10, 15), prompts=("a",))),
        gallery(make_run("none", samples=())),
    ]

    assert shown_steps(galleries) == [10]
    rows = beside(galleries, 10)
    assert [(row.prompt, [image is not None for image in row.images]) for row in rows] == [
        ("a", [True, True, False]),
        ("b", [True, False, False]),
    ]
