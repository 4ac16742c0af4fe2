"""The direction of dependencies: who may import whom, and what must not import torch."""

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import smalti
from support.sources import nodes, tree

PLUGIN_PACKAGES = tuple(path.name for path in Path(__file__).parents[2].glob("plugins/*/src/smalti_*"))


@cache
def imports(path: Path, *, at_import: bool) -> list[str]:
    """The modules that a file imports; with `at_import`, only those that loading the file imports."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield child.module or ""
            elif not at_import or not is_left_for_later(child):
                yield from walk(child)

    return list(walk(tree(path)))


def is_left_for_later(node: ast.AST) -> bool:
    """Whether loading a module does not run this: the body of a function, or what is for type checkers."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@pytest.fixture(scope="module")
def sources(root) -> list[Path]:
    """Every file of the core."""
    return sorted((root / "core" / "src" / "smalti").rglob("*.py"))


def test_the_core_imports_no_plugin_package(sources):
    found = {module for path in sources for module in imports(path, at_import=False)}
    assert {module for module in found if module.startswith(PLUGIN_PACKAGES)} == set()


def test_packages_import_only_those_other_packages_that_they_depend_on(root):
    found = []
    for project in root.glob("plugins/*/pyproject.toml"):
        declared = tomllib.loads(project.read_text())["project"]["dependencies"]
        own = {project.parent.joinpath("src").glob("smalti_*").__next__().name}
        allowed = own | {canonicalize_name(Requirement(each).name).replace("-", "_") for each in declared}
        for path in project.parent.glob("src/**/*.py"):
            used = {module.split(".")[0] for module in imports(path, at_import=False)}
            found += [f"{path}: {module}" for module in used.intersection(PLUGIN_PACKAGES) - allowed]
    assert found == []


def taken(module: ast.Module) -> Iterator[str]:
    """What some code takes from smalti, by its full name: modules, names of `smalti` itself, names with an underscore."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("smalti."))
        elif isinstance(node, ast.ImportFrom) and node.module == "smalti":
            yield from (f"smalti.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smalti."):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))


PUBLIC = re.findall(r"smalti\.[\w.]*\w", (smalti.__doc__ or "").rpartition("\n\n")[2])


def is_public(name: str) -> bool:
    """Whether a plugin may take this from smalti: see the docstring of the package."""
    return name in PUBLIC or name.removeprefix("smalti.") in smalti.__all__


def test_the_page_for_plugin_authors_has_the_same_public_modules_as_the_package(root):
    page = (root / "docs/writing-a-plugin.md").read_text()
    section = page[page.index("## What is public") :].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(smalti\.\w+)`", "".join(cells))) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_exists(name):
    assert importlib.util.find_spec(name) is not None


def test_plugins_and_the_templates_take_only_what_is_public(root):
    sources, templates = (
        [*root.glob(f"plugins/{paths}")] for paths in ("*/src/**/*.py", "testing/src/smalti_testing/templates/**/*.py.tmpl")
    )
    assert min(len(sources), len(templates)) > 10
    texts = [path.read_text().replace("$package", "smalti_name").replace("${name}", "name") for path in templates]
    modules = [*map(tree, sources), *map(ast.parse, texts)]
    names = zip((*sources, *templates), map(taken, modules), strict=True)
    assert [f"{path.name}: {name}" for path, found in names for name in found if not is_public(name)] == []


@pytest.mark.parametrize("page", ["reference/hooks.md", "writing-a-plugin.md"])
def test_what_the_pages_show_takes_only_what_is_public(root, page):
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    code = [re.sub(r"^#.*\n", "", block, flags=re.MULTILINE) for block in blocks]  # excerpts are indented, their titles not
    assert [name for block in code for name in taken(ast.parse(textwrap.dedent(block))) if not is_public(name)] == []


def test_loading_all_built_in_plugins_imports_no_torch():
    code = "import sys\nfrom smalti.plugins.discovery import load_plugins\nload_plugins()\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_what_makes_the_families_imports_no_more_than_a_launcher_needs():
    code = "import sys\nfrom pkgutil import resolve_name\nfrom smalti.plugins.discovery import load_plugins\n"
    code += "from smalti.hookspecs import HookSpecs\n"
    code += "for entry in load_plugins().gather(HookSpecs.register_model_families):\n    resolve_name(entry.factory)\n"
    code += (
        "later = {'diffusers', 'transformers', 'accelerate', 'torch.distributed.tensor', 'sympy', 'torch.utils.flop_counter'}\n"
    )
    code += "print(*later & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


IMPORTED_BY_OTHERS = {
    "safetensors",
    "protobuf",
    "sentencepiece",
    "python-multipart",
    "smalti-cache",
    "smalti-data",
    "smalti-export",
}
"""What torch reads checkpoints with, transformers tokenizers, FastAPI forms, smalti tables on S3; what encodes and exports."""


def test_every_dependency_of_a_package_is_imported_by_it(root):
    installed = packages_distributions()
    unused = {}
    for project in (path.parent for path in [root / "core" / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")]):
        declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
        modules = {
            module.partition(".")[0] for path in project.glob("src/**/*.py") for module in imports(path, at_import=False)
        }
        imported = {canonicalize_name(name) for module in modules for name in installed.get(module) or (module,)}
        unused[project.name] = {canonicalize_name(Requirement(each).name) for each in declared} - imported - IMPORTED_BY_OTHERS
    assert {name: left for name, left in unused.items() if left} == {}
    assert len(unused) >= 11
