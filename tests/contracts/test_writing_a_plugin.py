"""The page on writing a plugin, followed from top to bottom: files written, commands typed, output compared."""

import re
import zipfile

import pytest

import pages

BLOCKS = pages.blocks("writing-a-plugin.md")
ROOT = pages.DOCS.parent
EXCERPTS = "examples/plugin-template/"


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> list[pages.Typed]:
    """Every command of the page, with pictures in a folder and the same in a zip file."""
    folder = tmp_path_factory.mktemp("cookbook")
    pages.photos(folder / "photos")
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for path in sorted((folder / "photos").iterdir()):
            archive.write(path, path.name)
    return pages.follow(BLOCKS, folder, pages.account(tmp_path_factory.mktemp("account")), leave=(EXCERPTS,))


COMMANDS = pages.commands(BLOCKS)


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number])
def test_a_command_of_the_page_does_what_the_page_shows(followed, number):
    typed = followed[number]
    assert typed.status == 0, typed.output
    assert typed.as_shown(), typed.output


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file.startswith(EXCERPTS)], ids=lambda block: block.file)
def test_an_excerpt_stands_in_the_template(block):
    assert block.body in (ROOT / block.file).read_text(encoding="utf-8")


def test_every_block_of_the_page_is_a_file_or_commands():
    strange = [block.text for block in BLOCKS if block.kind not in ("python", "toml", "console")]
    assert strange == []
    assert all(re.fullmatch(r"[\w./-]+\.(py|toml)", block.file) for block in BLOCKS if block.kind != "console")


def test_every_hook_that_the_page_names_exists():
    from smalti.hookspecs import HookSpecs

    text = (pages.DOCS / "writing-a-plugin.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:on|register|declare|check|configure|detect|wrap|build|save|load|log)_[a-z_]+)`", text))
    helpers = {"build_model", "check_plugin"}
    assert sorted(named - set(vars(HookSpecs)) - helpers) == []
