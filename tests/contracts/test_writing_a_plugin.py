"""The page on writing a plugin, followed from top to bottom: files written, commands typed, output compared."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import pages

BLOCKS = pages.blocks("writing-a-plugin.md")
GENERATED = "smalti-"
"""How the folders begin that commands of the page create, and from which the page quotes."""


@dataclass(frozen=True)
class Followed:
    """Every command of the page, and the folder in which they were typed."""

    folder: Path
    typed: list[pages.Typed]


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Followed:
    """With images in a folder and the same in a zip file."""
    folder = tmp_path_factory.mktemp("cookbook")
    pages.photos(folder / "photos")
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for path in sorted((folder / "photos").iterdir()):
            archive.write(path, path.name)
    account = {**pages.account(tmp_path_factory.mktemp("account")), "SMALTI_WITHOUT": "plots"}
    typed = pages.follow(BLOCKS, folder, account, leave=(GENERATED,))
    return Followed(folder, typed)


COMMANDS = pages.commands(BLOCKS)


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number])
def test_a_command_of_the_page_does_what_the_page_shows(followed, number):
    typed = followed.typed[number]
    assert typed.status == 0, typed.output
    assert typed.as_shown(), typed.output


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file.startswith(GENERATED)], ids=lambda block: block.file)
def test_what_the_page_quotes_was_generated(followed, block):
    assert block.body in (followed.folder / block.file).read_text(encoding="utf-8")


def test_every_block_of_the_page_is_a_file_or_commands():
    strange = [block.text for block in BLOCKS if block.kind not in ("python", "toml", "console")]
    assert strange == []
    assert all(re.fullmatch(r"[\w./-]+\.(py|toml)", block.file) for block in BLOCKS if block.kind != "console")


def test_every_hook_that_the_page_names_exists():
    from smalti.hookspecs import HookSpecs

    text = (pages.DOCS / "writing-a-plugin.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:on|register|declare|check|configure|detect|wrap|build|save|load|log)_[a-z_]+)`", text))
    others = {"build_model", "build_sampler", "check_export", "check_plugin", "check_storage", "save_file"}
    assert sorted(named - set(vars(HookSpecs)) - others) == []


def test_every_check_and_class_of_the_kit_that_the_page_names_exists():
    from smalti_testing import pytest as kit

    text = (pages.DOCS / "writing-a-plugin.md").read_text(encoding="utf-8")
    contracts = {name for name in vars(kit) if name.endswith("Contract")} - {"Contract"}
    assert set(re.findall(r"^\| `(\w+Contract)`", text, flags=re.MULTILINE)) == contracts
    checks = {check for name in contracts for check in getattr(kit, name).contract.checks}
    named = re.findall(r"`(it_[a-z_0-9]+|steps_[a-z_0-9]+)`", text) + re.findall(r'exempt = MappingProxyType\(\{"(\w+)"', text)
    assert named
    assert sorted(set(named) - checks) == []


def test_every_method_of_a_family_is_in_the_tables_of_the_page():
    from smalti.models import ModelFamily

    text = (pages.DOCS / "writing-a-plugin.md").read_text(encoding="utf-8")
    methods = {name for name, value in vars(ModelFamily).items() if callable(value) and name[0] != "_"}
    cells = "".join(row for row in text.splitlines() if row.startswith("| "))
    assert sorted(methods - set(re.findall(r"`(\w+)`", cells))) == []
