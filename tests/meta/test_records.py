"""What the project was asked for, and what a release brings, are told where they can be found, and shortly."""

import re

ASKED = 10
MOST_WORDS = 1_500
"""Of the section of a release."""


def test_everything_that_was_asked_for_is_in_a_file_and_has_a_test(root):
    section = (
        (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What it has to do\n")[2].partition("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == ASKED
    for row in rows:
        *_, file, test = [cell.strip() for cell in row.strip("|").split("|")]
        assert (root / test.strip("`")).is_file(), row
        assert file.startswith("not built") or (root / file.strip("`")).exists(), row


def test_the_section_of_a_release_can_be_read_in_some_minutes(root):
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    long = {section.splitlines()[0]: len(section.split()) for section in sections if len(section.split()) > MOST_WORDS}
    assert long == {}
