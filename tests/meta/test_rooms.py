"""The core is divided into rooms, its folders: who may import whom, by which names, and what must import no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from support.sources import tree

# From the ground up. A room imports from lower floors only, and those of one floor know nothing of each other.
FLOORS = (
    ("errors",),
    ("system",),
    ("rundir",),
    ("config",),
    ("types",),
    ("parallel",),
    ("checkpoint",),
    ("diffusion",),
    ("models",),
    ("hookspecs",),
    ("plugins",),
    ("data",),
    ("training",),
    ("launch", "builtin"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TORCH_FREE = (
    *("errors", "system", "rundir", "config", "types", "checkpoint.format", "hookspecs", "plugins"),
    *("launch", "cli"),
)
NEEDS_TORCH = {"smalti.launch.rank"}
FILES_IN_A_FOLDER = 14
LINES_OF_A_README = 14


@dataclass(frozen=True)
class Import:
    """`from module import name`, or `import module` without a name."""

    module: str
    name: str | None
    when: Literal["loading", "type checking", "calling"]


@cache
def imports(path: Path) -> list[Import]:
    """Everything that a file imports from smalti or elsewhere."""

    def walk(node: ast.AST, when: Literal["loading", "type checking", "calling"]) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, None, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield from (Import(child.module or "", alias.name, when) for alias in child.names)
            elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                yield from walk(ast.Module(child.body, []), "type checking")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, "calling" if when == "loading" else when)
            else:
                yield from walk(child, when)

    return list(walk(tree(path), "loading"))


@pytest.fixture(scope="module")
def base(root) -> Path:
    return root / "core" / "src" / "smalti"


@pytest.fixture(scope="module")
def modules(base) -> dict[str, Path]:
    """Every module of the core by its name."""
    found = {}
    for path in sorted(base.rglob("*.py")):
        parts = ("smalti", *path.relative_to(base).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.fixture(scope="module")
def homes(base) -> dict[tuple[str, str], str]:
    """(face, name) -> the module that has it, for every name of every face."""
    found = {}
    for stub in [base / "__init__.pyi", *base.glob("*/__init__.pyi")]:
        face = ".".join(("smalti", *stub.relative_to(base).parts[:-1]))
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                inner = f"{face}.{node.module}" if node.module else face
                found |= {(face, alias.name): inner if node.module else f"{face}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    """The room of a module: its folder, or itself at the top; empty for what is no module of the core."""
    parts = module.split(".")
    return parts[1] if parts[0] == "smalti" and len(parts) > 1 else ""


def target(each: Import, homes: dict[tuple[str, str], str], modules: dict[str, Path]) -> str:
    """The module that an import loads in the end."""
    if each.name is None:
        return each.module
    if f"{each.module}.{each.name}" in modules:
        return f"{each.module}.{each.name}"
    return homes.get((each.module, each.name), each.module)


def test_every_room_has_a_floor(modules):
    assert {room_of(module) for module in modules} - {"", "__main__"} == FLOOR.keys()


def test_a_room_imports_from_lower_floors_only(modules, homes):
    upwards = []
    for module, path in modules.items():
        own = room_of(module)
        for each in imports(path) if own in FLOOR else ():
            other = room_of(target(each, homes, modules))
            if other and other != own and FLOOR[other] >= FLOOR[own]:
                upwards.append(f"{module}: {each.module}.{each.name}")
    assert upwards == []


def test_rooms_use_each_other_through_their_faces(modules):
    around = [
        f"{module}: {each.module}"
        for module, path in modules.items()
        for each in imports(path)
        if room_of(each.module) not in ("", room_of(module)) and each.module.count(".") > 1
    ]
    assert around == []


def test_only_the_command_line_knows_the_built_in_plugins(modules):
    found = {room_of(module) for module, path in modules.items() for each in imports(path) if room_of(each.module) == "builtin"}
    assert found <= {"builtin", "cli"}


def test_rooms_that_need_no_torch_reach_none_by_imports(modules, homes):
    def reaches(module: str, seen: dict[str, list[str]]) -> list[str]:
        """The way from a module to torch over what loading imports; empty if there is none."""
        if module.split(".")[0] == "torch":
            return [module]
        if module not in modules or module in seen:
            return seen.get(module, [])
        seen[module] = []
        for each in imports(modules[module]):
            if each.when == "loading" and (way := reaches(target(each, homes, modules), seen)):
                seen[module] = [module, *way]
                break
        return seen[module]

    free = [name for name in modules if name.removeprefix("smalti.").startswith(TORCH_FREE) and name not in NEEDS_TORCH]
    assert [way for name in free if (way := reaches(name, {}))] == []


def test_no_torch_is_imported_by_loading_them(modules):
    free = [name for name in modules if name.removeprefix("smalti.").startswith(TORCH_FREE) and name not in NEEDS_TORCH]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code, *free], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_the_names_of_a_face_are_all_there(homes):
    missing = [f"{face}.{name}" for face, name in homes if getattr(import_module(face), name, None) is None]
    assert missing == []


def test_no_name_of_a_face_is_that_of_a_module_behind_it(homes, modules):
    assert [
        f"{face}.{name}" for (face, name), home in homes.items() if f"{face}.{name}" in modules and home != f"{face}.{name}"
    ] == []


def test_a_folder_can_be_overlooked(base):
    counts = {folder: len(list(folder.glob("*.py"))) for folder in (base, *base.rglob("*/")) if folder.is_dir()}
    assert {str(folder): count for folder, count in counts.items() if count > FILES_IN_A_FOLDER} == {}


def test_every_room_has_a_short_readme(base):
    lengths = {}
    for face in base.glob("*/__init__.py"):
        readme = face.with_name("README.md")
        lengths[face.parent.name] = len(readme.read_text().splitlines()) if readme.exists() else 0
    assert {room: lines for room, lines in lengths.items() if not 5 <= lines <= LINES_OF_A_README} == {}


def test_unit_tests_lie_in_folders_named_after_the_rooms(root):
    folders = {path.name for path in (root / "tests/unit").iterdir() if path.name != "__pycache__"}
    assert folders <= FLOOR.keys()


def test_no_modules_import_each_other_in_a_circle(modules, homes):
    graph = {
        module: {target(each, homes, modules) for each in imports(path)} & modules.keys() - {module}
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them
