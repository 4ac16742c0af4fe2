"""The site of the documentation: built strictly, as `make docs` does, and readable without a network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = ("-W", "--keep-going", "-q", "-c", "docs", "-D", "exclude_patterns=.*,core,plugins,tests", "-b", "html", ".")
BUILD = "import gc, sys; from sphinx.cmd.build import main; gc.set_threshold(100_000, 50, 100); sys.exit(main(sys.argv[1:]))"
"""As `python -m sphinx`; looking for garbage among all pages took a fifth of the time."""


@pytest.fixture(scope="module")
def site(root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-c", BUILD, *WORDS, str(folder)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_the_readme_all_pages_and_a_search(site, root):
    pages = [path.relative_to(root) for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    assert [str(page) for page in pages if not (site / page).with_suffix(".html").is_file()] == []
    assert (site / "searchindex.js").is_file()


def test_make_docs_builds_it_with_these_words(root):
    assert f"-m sphinx {' '.join(WORDS)} site\n" in (root / "Makefile").read_text()


def test_no_page_of_the_site_loads_anything_from_another_host(site):
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\bsrc=.(?:https?:)?//"
        r"|<link[^>]*\bhref=.(?:https?:)?//"
        r"|(?:url\(|@import ).?(?:https?:)?//"
    )
    texts = {
        path.relative_to(site): path.read_text(encoding="utf-8") for kind in ("html", "css") for path in site.rglob(f"*.{kind}")
    }
    assert [str(path) for path, text in texts.items() if loaded.search(text)] == []
