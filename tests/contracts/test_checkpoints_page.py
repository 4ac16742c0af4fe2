"""The page on checkpoints, typed from top to bottom against a run of its own."""

import json
import re

import pytest

from support import pages

BLOCKS = pages.blocks("checkpoints.md")
FORMAT = "reference/checkpoint-format.md"
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
    return pages.follow(BLOCKS, folder, {**environment, "SMALTI_WITHOUT": "plots"})  # which takes long to import


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number].partition(" --")[0])
def test_a_command_of_the_page_does_what_the_page_shows(followed, number):
    typed = followed[number]
    assert typed.status == 0, typed.output
    assert typed.as_shown(), typed.output


@pytest.fixture(scope="module")
def checkpoint(followed, folder):
    """One that was left as it was."""
    return folder / "runs/first/checkpoints/step-00000008"


def always_there(words: str) -> bool:
    """Whether what is said of a file or key means that it is always there."""
    return ", if " not in words


def keys_of(file: str) -> dict[str, bool]:
    """The keys in the page's table on this file, and whether they are always there."""
    text = (pages.DOCS / FORMAT).read_text(encoding="utf-8")
    rows = text[text.index(f"`{file}`:") :].split("\n\n")[1].splitlines()[2:]
    return {key: always_there(row) for row in rows for key in re.findall(r"`([\w.]+)`", row.split("|")[1])}


def agree(found: set[str], documented: dict[str, bool]) -> bool:
    return {name for name, always in documented.items() if always} <= found <= documented.keys()


def test_the_files_of_a_checkpoint_are_those_that_the_page_lists(checkpoint):
    [listing] = [block for block in pages.blocks(FORMAT) if block.text.startswith("checkpoints/step-00000012/")]
    found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert agree(found, {line.split()[0]: always_there(line) for line in listing.body.splitlines()}), found


def test_the_keys_of_the_manifest_are_those_that_the_page_explains(checkpoint):
    found = set(json.loads((checkpoint / "manifest.json").read_text()))
    assert agree(found, keys_of("manifest.json")), found


def test_the_keys_of_the_state_are_those_that_the_page_explains(checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    found = {f"{group}.{key}" for group in ("optimizer", "trainer") for key in state.pop(group)} | state.keys()
    assert agree(found, keys_of("state.json")), found
