"""The tutorials, typed from top to bottom. Where one needs published weights, tiny ones are there under their name."""

import shutil

import pytest
import tiny

from support import pages
from support.whole import WHOLE, some

TUTORIALS = sorted(path.stem for path in (pages.DOCS / "tutorials").glob("*.md"))
EXECUTED = TUTORIALS if WHOLE else ["photos-to-a-lora"]


def blocks(tutorial: str) -> list[pages.Block]:
    """What a reader writes and types. Blocks of shell commands whose output is not shown need GPUs or downloads."""
    shown = [block for block in pages.blocks(f"tutorials/{tutorial}.md") if block.kind != "sh"]
    return [block for block in shown if block.kind == "console" or block.text.startswith("# ")]


@pytest.fixture(scope="module")
def follow(tmp_path_factory):
    """Type a tutorial, once; the commands with what came of them.

    Those of the shortest, or of all, are executed as a reader's are; those of the others forked.
    """
    done: dict[str, list[pages.Typed]] = {}

    def follow(tutorial: str) -> list[pages.Typed]:
        if tutorial not in done:
            folder, account = tmp_path_factory.mktemp(tutorial), tmp_path_factory.mktemp("account")
            environment = pages.account(account, forked=tutorial not in EXECUTED)
            pages.photos(folder / "photos")
            if tutorial == "eight-gpus":
                shutil.copytree(pages.DOCS.parent / "examples", folder / "examples", ignore=shutil.ignore_patterns("emoji*"))
                tiny.flux(folder / "FLUX.1-dev")
            done[tutorial] = pages.follow(blocks(tutorial), folder, {**environment, "SMALTI_WITHOUT": "plots"})
        return done[tutorial]

    return follow


EVERY = [(name, number) for name in TUTORIALS for number in range(len(pages.commands(blocks(name))))]
KEPT = [(name, number) for name, number in EVERY if name != "your-own-architecture"]
"""That one does what the page on writing a plugin does, which `test_writing_a_plugin.py` types."""


@pytest.mark.parametrize(("tutorial", "number"), some(EVERY, *KEPT), ids=lambda part: str(part))
def test_a_command_of_a_tutorial_does_what_the_page_shows(follow, tutorial, number):
    typed = follow(tutorial)[number]
    assert typed.status == 0, typed.output
    assert typed.as_shown(), typed.output
