"""The direction of dependencies: who may import whom, and what must not import torch."""

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import smalti

PLUGIN_PACKAGES = (
    *("smalti_fsdp2", "smalti_deepspeed", "smalti_diffusers", "smalti_toy", "smalti_plots", "smalti_testing"),
    *("smalti_storage_s3", "smalti_health", "smalti_webui"),
)

# From the ground up: a module may import from its own layer and from those below it. A name stands for a package as well.
LAYERS = (
    (
        "errors",
        "packages",
        "files",
        "process",
        "hashing",
        "streams",
        "termination",
        "ending",
        "current_hook",
        "lastwords",
        "launchfolder",
        "parentage",
        "importing",
    ),
    ("types", "liveness", "memoryuse"),
    ("hookspecs", "factories", "returns", "accelerator"),
    ("options", "flags", "configfile", "acceleratefile", "settings", "events", "phases", "recent"),
    (
        "plugins",
        "schema",
        "keptdefaults",
        "configsources",
        "references",
        "config",
        "configtext",
        "configedit",
        "rundir",
        "heartbeat",
        "restoring",
        "parallel",
        "ranks",
        "crew",
        "boundary",
        "accelerator",
        "devices",
        "precision",
    ),
    ("liverun", "storage", "diffusion", "models", "data", "checkpoint", "ema", "schedule", "metrics", "gauges", "statistics"),
    ("observers",),
    ("group", "strategy", "optimizers", "pictures", "replicas", "dataplan", "families", "caches"),
    ("encoding", "resume"),
    ("opening",),
    ("run",),
    ("outofmemory",),
    ("faults",),
    ("attempts",),
    ("validation", "evaluation", "saving", "rescue", "launch"),
    ("agent",),
    ("standby",),
    ("trainer", "workers", "watchdog"),
    ("rank", "checks"),
    ("worker", "preparation", "invocation", "reference", "export"),
    ("commands",),
    ("cli",),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
OUTSIDE = {"defaults", "__init__", "__main__"}

# What a built-in plugin may import while it is loaded; anything else has to wait until a hook is called.
PUBLIC = {
    "errors",
    "hookspecs",
    "types",
    "options",
    "settings",
    "config",
    "rundir",
    "liverun",
    "events",
    "phases",
    "recent",
    "data",
}

TORCH_FREE = (
    "smalti",
    "smalti.config.accelerate_yaml",
    "smalti.plugins.caches",
    "smalti.checkpoint.format.soundness",
    "smalti.launch.checks",
    "smalti.cli.entry",
    "smalti.cli.cache",
    "smalti.cli.checkpoint",
    "smalti.cli.config",
    "smalti.cli.dataset",
    "smalti.cli.plugin",
    "smalti.cli.plugins",
    "smalti.cli.pages.protocols",
    "smalti.cli.run",
    "smalti.cli.train",
    "smalti.config.resolution",
    "smalti.config.files",
    "smalti.config.sources",
    "smalti.config.toml",
    "smalti.system.current_hook",
    "smalti.data.from_options",
    "smalti.parallel.devices",
    "smalti.system.exit",
    "smalti.errors",
    "smalti.config.edit",
    "smalti.rundir.events",
    "smalti.plugins.factories",
    "smalti.plugins.families",
    "smalti.config.flags",
    "smalti.hookspecs",
    "smalti.system.imports",
    "smalti.cli.arguments",
    "smalti.rundir.heartbeat",
    "smalti.config.kept_defaults",
    "smalti.system.exit_reports",
    "smalti.launch.plan",
    "smalti.system.liveness",
    "smalti.rundir.writer",
    "smalti.training.failures.memory_use",
    "smalti.models.blocks",
    "smalti.config.options",
    "smalti.config.known_packages",
    "smalti.system.parent",
    "smalti.rundir.phases",
    "smalti.plugins",
    "smalti.parallel.precision",
    "smalti.rundir.recent",
    "smalti.cli.pages.options",
    "smalti.config.references",
    "smalti.training.resume_checks",
    "smalti.plugins.returns",
    "smalti.plugins.schema",
    "smalti.rundir.restoring",
    "smalti.rundir.directory",
    "smalti.config.core_options",
    "smalti.plugins.lookup",
    "smalti.launch.standby",
    "smalti.system.streams",
    "smalti.system.signals",
    "smalti.types",
    "smalti.launch.agent",
    "smalti.launch.worker",
    "smalti.launch.launcher",
)


def imports(path: Path, *, at_import: bool) -> Iterator[str]:
    """The modules that a file imports; with `at_import`, only those that loading the file imports."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield child.module or ""
                if child.module == "smalti":
                    yield from (f"smalti.{alias.name}" for alias in child.names if alias.name in LAYER)
            elif not at_import or not is_left_for_later(child):
                yield from walk(child)

    return walk(ast.parse(path.read_text()))


def is_left_for_later(node: ast.AST) -> bool:
    """Whether loading a module does not run this: the body of a function, or what is for type checkers."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def own(module: str) -> str | None:
    """The part of smalti that a module belongs to; None for foreign ones and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "smalti" and len(parts) > 1 else None


@pytest.fixture(scope="module")
def sources(root) -> dict[Path, str]:
    """Every file of the core, and the part of smalti it belongs to."""
    base = root / "core" / "src" / "smalti"
    return {path: path.relative_to(base).parts[0].removesuffix(".py") for path in sorted(base.rglob("*.py"))}


def test_every_module_has_a_place_in_the_layers(sources):
    assert set(sources.values()) - OUTSIDE - LAYER.keys() == set()
    assert LAYER.keys() - set(sources.values()) == set()


def test_no_module_imports_from_a_layer_above_it(sources):
    upwards = []
    for path, part in sources.items():
        for module in imports(path, at_import=True) if part in LAYER else ():
            other = own(module)
            if other == "defaults":
                allowed = part == "commands"  # `smalti run watch` shows what the console plugin shows
            else:
                allowed = other is None or (other in LAYER and LAYER[other] <= LAYER[part])
            if not allowed:
                upwards.append(f"{path.name}: {module}")
    assert upwards == []


def test_the_core_imports_no_plugin_package(sources):
    found = {module for path in sources for module in imports(path, at_import=False)}
    assert {module for module in found if module.startswith(PLUGIN_PACKAGES)} == set()


def test_built_in_plugins_load_public_modules_only(sources):
    found = [
        f"{path.name}: {module}"
        for path, part in sources.items()
        if part == "defaults"
        for module in imports(path, at_import=True)
        if (other := own(module)) is not None and other not in PUBLIC
    ]
    assert found == []


def test_plugin_packages_import_no_other_plugin(root):
    found = []
    for path in root.glob("plugins/*/src/**/*.py"):
        package = path.relative_to(root / "plugins").parts[2]
        for module in imports(path, at_import=False):
            if module.startswith(PLUGIN_PACKAGES) and module.split(".")[0] != package:
                found.append(f"{path}: {module}")
    assert found == []


def taken(source: str) -> Iterator[str]:
    """What some code takes from smalti, by its full name: modules, names of `smalti` itself, names with an underscore."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("smalti."))
        elif isinstance(node, ast.ImportFrom) and node.module == "smalti":
            yield from (f"smalti.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smalti."):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))


PUBLIC_MODULES = re.findall(r"smalti\.[\w.]*\w", (smalti.__doc__ or "").rpartition("\n\n")[2])


def is_public(name: str) -> bool:
    """Whether a plugin may take this from smalti: see the docstring of the package."""
    modules = any(name == module or name.startswith(f"{module}.") for module in PUBLIC_MODULES)
    return name.removeprefix("smalti.") in smalti.__all__ or (modules and "._" not in name)


def test_the_page_for_plugin_authors_has_the_same_public_modules_as_the_package(root):
    page = (root / "docs/writing-a-plugin.md").read_text()
    section = page[page.index("## What is public") :].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert re.findall(r"`([\w.]+)`", "".join(cells)) == PUBLIC_MODULES


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_a_public_module_exists(name):
    assert importlib.util.find_spec(name) is not None


def test_plugins_and_the_templates_take_only_what_is_public(root):
    paths = [*root.glob("plugins/*/src/**/*.py"), *root.glob("core/src/smalti/commands/templates/**/*.py.tmpl")]
    assert len(paths) > 10
    sources = [(path.name, path.read_text().replace("$package", "smalti_name").replace("${name}", "name")) for path in paths]
    assert [f"{path}: {name}" for path, text in sources for name in taken(text) if not is_public(name)] == []


@pytest.mark.parametrize("page", ["hooks.md", "writing-a-plugin.md"])
def test_what_the_pages_show_takes_only_what_is_public(root, page):
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    code = [re.sub(r"^#.*\n", "", block, flags=re.MULTILINE) for block in blocks]  # excerpts are indented, their titles not
    assert [name for block in code for name in taken(textwrap.dedent(block)) if not is_public(name)] == []


@pytest.mark.parametrize("start", [0, 1])
def test_modules_that_need_no_torch_import_none(start):
    modules = TORCH_FREE[start::2]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_loading_all_built_in_plugins_imports_no_torch():
    code = "import sys\nfrom smalti.plugins.registry import load_plugins\nload_plugins()\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_what_makes_the_families_imports_no_more_than_a_launcher_needs():
    code = "import sys\nfrom pkgutil import resolve_name\nfrom smalti.plugins.registry import load_plugins\n"
    code += "from smalti.types import FamilyEntry\n"
    code += "for entry in load_plugins().gather('register_model_families', FamilyEntry):\n    resolve_name(entry.factory)\n"
    code += "print(*{'diffusers', 'transformers', 'accelerate', 'torch.distributed.tensor', 'sympy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
