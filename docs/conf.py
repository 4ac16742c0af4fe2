"""The site of the documentation: `make docs`, with Sphinx and MyST, of pages in plain Markdown."""

import re
from pathlib import Path

project = "smalti"
author = "the authors of smalti"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/*.md", "docs/**.md", "examples/*/README.md"]
html_theme = "furo"
html_title = "smalti"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4


def add_contents(app, docname: str, source: list[str]) -> None:
    """The sidebar: the index of all pages, and what each of its sections links to."""
    if docname != app.config.root_doc:
        return
    index = (Path(app.srcdir) / "docs" / "README.md").read_text(encoding="utf-8")
    seen = {"/docs/README"}
    begin, *sections = re.split(r"^## ", index, flags=re.MULTILINE)
    source[0] += contents("", ["/docs/README", *linked(begin, seen)])
    for section in sections:
        source[0] += contents(section.partition("\n")[0], linked(section, seen))


def linked(section: str, seen: set[str]) -> list[str]:
    """The pages that a part of the index links to, but for those that were linked before."""
    links = re.findall(r"\]\(([\w./-]+)\.md\)", section)
    pages = [page for page in dict.fromkeys(f"/docs/{link}".replace("/docs/../", "/") for link in links) if page not in seen]
    seen.update(pages)
    return pages


def contents(caption: str, pages: list[str]) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "", "```{toctree}", *options, "", *pages, "```", ""])


def setup(app) -> None:
    app.connect("source-read", add_contents)
