"""What templates, scripts and static files must keep to, so that the strict content security policy and the budgets hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smalti_webui.server.templating import PACKAGE, STATIC, Templates

TEMPLATES = sorted((PACKAGE / "templates").rglob("*.html"))
SCRIPTS = sorted((STATIC / "js").rglob("*.js"))
TEMPLATE_LINES = 300
SCRIPT_LINES = 1500
STATIC_BYTES = 400_000
REFUSED = {
    "an inline style": r"\sstyle\s*=|<style\b",
    "an inline script": r"<script\b(?![^>]*\ssrc=)(?![^>]*\stype=\"application/json\")",
    "a script in an attribute": r"\son\w+\s*=|\shx-on\b|javascript:|[\"']js:",
    "an expression in hx-trigger": r"hx-trigger=\"[^\"]*\[",
    "another host": r"(?:src|href|action|hx-\w+)=[\"']?(?:https?:)?//",
    "text that is not escaped": r"\|\s*safe\b|autoescape false",
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_template_is_short_and_has_nothing_inline(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= TEMPLATE_LINES
    markup = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    assert [what for what, pattern in REFUSED.items() if re.search(pattern, markup, re.IGNORECASE)] == []
    Templates().environment.get_template(str(path.relative_to(PACKAGE / "templates")))  # it compiles


def test_own_scripts_are_small_and_load_nothing_from_elsewhere() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SCRIPTS}
    assert sum(lines.values()) <= SCRIPT_LINES, lines
    refused = r"https?://|\beval\(|new Function|insertAdjacentHTML|\.innerHTML\s*=|\.outerHTML\s*=|document\.write"
    assert {path.name: found for path in SCRIPTS if (found := re.findall(refused, path.read_text(encoding="utf-8")))} == {}


def test_static_files_are_small_and_what_is_not_our_own_has_its_licence() -> None:
    sizes = {path.name: path.stat().st_size for path in STATIC.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= STATIC_BYTES, sizes
    licences = {path.name: path.read_text(encoding="utf-8") for path in (STATIC / "vendor").glob("*-LICENSE.txt")}
    assert set(licences) == {"htmx-LICENSE.txt", "uPlot-LICENSE.txt"}
    assert all("Permission" in text for text in licences.values())


def test_every_icon_that_a_template_names_is_there() -> None:
    known = set(re.findall(r'<symbol id="([\w-]+)"', (STATIC / "icons.svg").read_text(encoding="utf-8")))
    named = {
        (path.name, icon)
        for path in [*TEMPLATES, *SCRIPTS]
        for icon in re.findall(r"\bicon\(\"([\w-]+)\"\)", path.read_text(encoding="utf-8"))
    }
    assert {each for each in named if each[1] not in known} == set()
