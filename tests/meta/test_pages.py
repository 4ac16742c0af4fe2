"""README and docs: generated parts are up to date, examples are accepted, links lead somewhere."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from smalti.data.reference import SECTIONS, dataset_reference
from smalti.data.spec import FILE_KEYS, DataDefaults, parse_datasets

_LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[Path, str]:
    """The text of README and of every page of the documentation."""
    paths = [root / "README.md", *(root / "docs").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def anchors(text: str) -> set[str]:
    """What the headings of a page can be linked by, as GitHub makes it."""
    headings = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reference_of_dataset_keys_is_up_to_date(root):
    update = "sed -i '/^## All keys/,$d' docs/datasets.md && smalti dataset reference >> docs/datasets.md"
    assert (root / "docs" / "datasets.md").read_text(encoding="utf-8").endswith("\n\n" + dataset_reference()), update


def test_the_reference_of_dataset_keys_has_every_key_once():
    assert sorted(key for keys in SECTIONS.values() for key in keys) == sorted(FILE_KEYS)


def test_the_examples_of_datasets_are_accepted(root):
    examples = dict(_FENCE.findall((root / "docs" / "datasets.md").read_text(encoding="utf-8").partition("## A table")[0]))
    for entries in (json.loads(examples["json"]), tomllib.loads(examples["toml"])["datasets"]):
        specs, problems = parse_datasets(entries, where="docs/datasets.md", defaults=DataDefaults())
        assert (len(specs), problems) == (len(entries), ())


def test_links_lead_to_files_and_headings_that_are_there(pages):
    broken = []
    for path, text in pages.items():
        for link in _LINK.findall(_FENCE.sub("", text)):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in pages and anchor not in anchors(pages[target])):
                broken.append(f"{path.name}: {link}")
    assert broken == []
