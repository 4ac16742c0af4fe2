"""The page on checkpoints, typed from top to bottom against a run of its own."""

import json
import re

import pytest

import pages

BLOCKS = pages.blocks("checkpoints.md")
COMMANDS = pages.commands(BLOCKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the reader stands: pictures to train on."""
    folder = tmp_path_factory.mktemp("reader")
    pages.photos(folder / "photos")
    return folder


@pytest.fixture(scope="module")
def followed(folder, tmp_path_factory) -> list[pages.Typed]:
    environment = pages.account(tmp_path_factory.mktemp("account"))
    return pages.follow(BLOCKS, folder, {**environment, "SMALTI_WITHOUT": "plot"})  # which takes long to import


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number].partition(" --")[0])
def test_a_command_of_the_page_does_what_the_page_shows(followed, number):
    typed = followed[number]
    assert typed.status == 0, typed.output
    assert typed.as_shown(), typed.output


def test_the_files_of_a_checkpoint_are_those_that_the_page_lists(followed, folder):
    [listing] = [block for block in BLOCKS if block.text.startswith("checkpoints/step-00000012/")]
    place = folder / "runs/first/checkpoints/step-00000012"
    listed = {line.split()[0] for line in listing.body.splitlines()}
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == listed


def explained(file: str) -> set[str]:
    """The keys in the first column of the page's table on this file."""
    text = (pages.DOCS / "checkpoints.md").read_text(encoding="utf-8")
    table = text[text.index(f"`{file}`:") :].split("\n\n")[1]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`([\w.]+)`", row.split("|")[1])}


def test_the_keys_of_the_manifest_are_those_that_the_page_explains(followed, folder):
    manifest = json.loads((folder / "runs/first/checkpoints/step-00000012/manifest.json").read_text())
    assert manifest.keys() == explained("manifest.json")


def test_the_keys_of_the_state_are_those_that_the_page_explains(followed, folder):
    state = json.loads((folder / "runs/first/checkpoints/step-00000012/state.json").read_text())
    keys = {f"{group}.{key}" for group in ("optimizer", "trainer") for key in state.pop(group)}
    assert keys | state.keys() == explained("state.json")
