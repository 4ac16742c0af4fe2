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
    """The sidebar: the sections of the index of all pages, each with the pages that it links to."""
    if docname != app.config.root_doc:
        return
    index = (Path(app.srcdir) / "docs" / "README.md").read_text(encoding="utf-8")
    seen: set[str] = set()
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.md\)", section))
        pages = [str(Path("/docs") / link).replace("/docs/../", "/") for link in links if link not in seen]
        seen.update(links)
        caption = section.partition("\n")[0]
        source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app) -> None:
    app.connect("source-read", add_contents)
