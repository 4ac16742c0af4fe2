"""Pairs of features that exclude each other are refused before a launch, with the reason and what to do."""

from pathlib import Path

import pytest
from planning.excluded import EXCLUDED, refusals

from smalti.config import draft
from smalti.plugins import load_plugins, schema_of

COMMON = ("model_family=flux", "output_dir=out", "max_train_steps=1", "mixed_precision=bf16")


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


@pytest.mark.parametrize("pair", EXCLUDED, ids=" and ".join)
def test_what_excludes_each_other_is_refused_with_its_reason(plugins, tmp_path, pair):
    options, reason = EXCLUDED[pair]
    schema = schema_of(plugins)
    words = [f"--{word}" for word in (*COMMON, f"instance_data_dir={tmp_path}")]
    assert not any(reason in said for said in refusals(draft(schema, words, environment={}), plugins))
    said = refusals(draft(schema, [*words, *(f"--{word}" for word in options)], environment={}), plugins)
    [found] = (each for each in said if reason in each)
    assert "\n" in found, "and what to do"


def test_the_page_has_these_pairs_and_no_other():
    page = (Path(__file__).parents[3] / "docs/reference/memory.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ") for line in page.partition("## What excludes each other")[2].splitlines() if line.startswith("| ")
    ]
    assert {(one.removeprefix("| "), other) for one, other, _ in rows[2:]} == {*EXCLUDED}
