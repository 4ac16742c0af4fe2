"""The reference page of the protocols that classes of plugins implement, generated from the source. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What belongs to one hook, as "package:Class", where a plugin imports it from.

    A plugin implements or returns `classes`, may implement `optional` ones as well, and is `given` others. `bases` are classes
    to inherit from, in which methods have defaults.
    """

    title: str
    about: str
    classes: tuple[str, ...]
    optional: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()


CHAPTERS = (
    Chapter(
        title="Model families",
        about="`register_model_families` names a factory; it returns an object whose class inherits from `ModelFamily`.",
        classes=(
            "smalti:FamilyEntry",
            "smalti.models:ModelFamily",
            "smalti.models:Weights",
        ),
        optional=(
            "smalti.models:PostLoadTransform",
            "smalti.diffusion:Shift",
        ),
        given=(
            "smalti.models:SampleRequest",
            "smalti.models:SizeConditioning",
            "smalti.diffusion:Objective",
            "smalti.checkpoint:ExportFolder",
        ),
    ),
    Chapter(
        title="Strategies",
        about="`configure_distributed` returns a `DistributedPlan`; its `parallel` names a factory that returns a `Parallel`. "
        "Inherit from `ReplicatedParallel` if each rank has the whole model, otherwise from `ProcessGroupParallel`, and write "
        "the methods without a default. Its `training_state` returns a `ModelState`; override it if that does not fit.",
        classes=(
            "smalti:DistributedPlan",
            "smalti.parallel:Parallel",
            "smalti.parallel:Communicator",
            "smalti.parallel:AbortableCommunicator",
            "smalti.parallel:TrainingState",
            "smalti.parallel:PortableState",
            "smalti.parallel:FlatRange",
        ),
        given=("smalti:World", "smalti:Block"),
        bases=("smalti.parallel:ProcessGroupParallel", "smalti.parallel:ReplicatedParallel", "smalti.parallel:ModelState"),
    ),
    Chapter(
        title="Launches",
        about="`configure_launch` returns a `LaunchEntry`; its `site` names a callable that returns a `LaunchSite`. Inherit "
        "from it, and write the methods in which the launch is not that of one node.",
        classes=("smalti:LaunchEntry", "smalti.launch:LaunchSite"),
        given=("smalti.launch:LaunchPlan", "smalti.launch:Rendezvous"),
        bases=("smalti.launch:LaunchSite",),
    ),
    Chapter(
        title="Storages",
        about="`register_storage` names a factory; the factory returns a `Storage`. Inherit from it.",
        classes=(
            "smalti:StorageEntry",
            "smalti.data:Storage",
            "smalti.data:StoredFile",
            "smalti.data:Traffic",
            "smalti.checkpoint:RunPlace",
            "smalti.checkpoint:ListedCheckpoint",
        ),
        bases=("smalti.data:Storage",),
    ),
    Chapter(
        title="Metadata backends",
        about="`register_metadata_backends` names a factory; the factory returns a `MetadataSource`. Inherit from it.",
        classes=(
            "smalti:MetadataEntry",
            "smalti.data:MetadataSource",
            "smalti.data:Listed",
            "smalti.data:ListedState",
        ),
        bases=("smalti.data:MetadataSource",),
    ),
    Chapter(
        title="Columns",
        about="`register_columns` names a factory; the factory returns a `Column`. Inherit from it, and from `ColumnKeys`.",
        classes=("smalti:ColumnEntry", "smalti.data:ColumnKeys", "smalti.data:Column"),
        given=("smalti.data:Framing", "smalti.data:ColumnSample"),
        bases=("smalti.data:Column", "smalti.data:ColumnKeys"),
    ),
    Chapter(
        title="Scans",
        about="`configure_scan` returns a `ScanEntry`, which names two functions. `scan` may pass `scan_data` another "
        "`smalti.data.build_datasets`, with a `make_rows` and a `Catalog` of its own.",
        classes=("smalti:ScanEntry",),
    ),
    Chapter(
        title="Optimizers",
        about="`register_optimizers` names a factory; the factory returns a `torch.optim.Optimizer` over groups of "
        "(name, parameter) pairs. Each group may have a `weight_decay` of its own. State that is a tensor is saved under the "
        "name of its parameter; other state and the settings of groups are saved as JSON.",
        classes=("smalti:OptimizerEntry",),
        optional=("smalti.training:WeightAverage", "smalti.training:StepsInBackward"),
    ),
    Chapter(
        title="Terms of the loss",
        about="`build_terms` returns a list of `Term`. Inherit from it.",
        classes=("smalti.training:Term", "smalti.training:Turn", "smalti.training:Step"),
        given=("smalti.diffusion:RandomColumn",),
        bases=("smalti.training:Term",),
    ),
    Chapter(
        title="Work between steps",
        about="`register_periodic_work` names a factory; the factory returns a `PeriodicWork`, or None. Inherit from it.",
        classes=("smalti:PeriodicEntry", "smalti.training:PeriodicWork"),
        bases=("smalti.training:PeriodicWork",),
    ),
    Chapter(
        title="Caches",
        about="`register_caches` names a factory; the factory returns a `Cache`. The callable that `encoder` names "
        "returns a `DataEncoder`, the one that `order` names `Passes` or None.",
        classes=("smalti:CacheEntry", "smalti.plugins:Cache", "smalti:Cleared"),
        optional=(
            "smalti.data:DataEncoder",
            "smalti.data:Encoded",
            "smalti.data:CachedLatents",
            "smalti.data:CachedTexts",
            "smalti.data:Passes",
        ),
        bases=("smalti.plugins:CacheFile",),
    ),
    Chapter(
        title="Checkpoint formats",
        about="`register_checkpoint_formats` names a factory; the factory takes a folder and returns a `Source`.",
        classes=(
            "smalti:CheckpointFormat",
            "smalti.checkpoint:Source",
            "smalti.checkpoint:Contents",
            "smalti.checkpoint:StoredTensor",
        ),
    ),
    Chapter(
        title="Proposals to the planner",
        about="`propose_strategies` returns a list of `Strategy`, `ModelFamily.frozen_storage` one of `FrozenStorage`.",
        classes=("smalti:Strategy", "smalti:Communication", "smalti:FrozenStorage"),
    ),
    Chapter(
        title="Findings of a diagnosis",
        about="`diagnose` returns a list of `Finding`.",
        classes=("smalti:Finding",),
    ),
    Chapter(
        title="Nodes without a shared file system",
        about="In `save_checkpoint`, a plugin sets a `Relay` as `state.relay`, and leaves the saving to others.",
        classes=("smalti.checkpoint:Relay",),
    ),
)

_INTRODUCTION = """\
# Protocols

For authors of plugins: every class that a plugin implements, returns or receives, with the signature of each method. The hooks
themselves are in [Every hook](hooks.md), the way to a first plugin in [Writing a plugin](../writing-a-plugin.md). This page is
generated from the source: `smalti plugin reference > docs/reference/protocols.md`.

A model family inherits from `ModelFamily`. A protocol is not a base class: a class needs its methods and inherits from nothing.
Each method says where it has a default:
**required** means that your class must have it, **default in `Base`** that classes which inherit from `Base` have it already.
An *optional* protocol is one that smalti looks for: a class that has its methods gets what it stands for. A method that says
*collective* is called on every rank, in the same order.
"""
_LONG = 5
_HOOKS = "smalti.hookspecs:HookSpecs"
"""A class with more methods than these gets a table of them first."""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([_INTRODUCTION, *(line for chapter in CHAPTERS for line in _chapter(chapter)), *_handed_over()])


def documented() -> list[str]:
    """The addresses of all classes on the page: those of the chapters, and what annotations of them and of the hooks name."""
    chosen = _chosen()
    named = {found for address in (_HOOKS, *chosen) for found in _classes_named(address)}
    return [*chosen, *sorted(named - {*chosen}, key=lambda address: address.partition(":")[2])]


def _chosen() -> list[str]:
    """The addresses of the classes of the chapters, each once."""
    groups = [group for each in CHAPTERS for group in (each.classes, each.optional, each.given, each.bases)]
    return [*dict.fromkeys(address for group in groups for address in group)]


def _handed_over() -> Iterator[str]:
    """The chapter about what only annotations name."""
    about = "The other classes that hooks and the methods above take and return: a plugin reads, calls or makes them."
    yield from ("## What hooks and methods are given", "", about, "")
    for address in documented()[len(_chosen()) :]:
        yield from _reference(address)


def _reference(address: str) -> Iterator[str]:
    """A class that no plugin implements, in short: attributes, and a line for each method."""
    module, _, name = address.partition(":")
    node = _find(address)
    parents = [ast.unparse(base) for base in node.bases]
    inherited = f", a `{' and `'.join(parents)}`" if parents else ""
    yield from (f"### `{name}`", "", f"*in* `{module}`{inherited}", "", *_docstring_lines(node), "")
    if fields := list(_fields(node)):
        yield from _table(fields)
    if members := list(_members(node)):
        rows = (f"| `{member}` | `{value}` | {_cell(meaning)} |" for member, value, meaning in members)
        yield from ("| member | value | |", "|---|---|---|", *rows, "")
    if methods := [each for each in _methods(node) if not _is_setter(each)]:
        rows = (f"| `{_cell(_signature(each))}` | {_cell(_summary(each))} |" for each in methods)
        yield from ("| method | |", "|---|---|", *rows, "")


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of each constant of a class, such as the members of an enumeration."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in map(ast.unparse, statement.targets):
                if not target.startswith("_"):
                    yield target, ast.unparse(statement.value), _text(after)


def _summary(method: ast.FunctionDef) -> str:
    """The first paragraph of its docstring, in one line."""
    return " ".join((ast.get_docstring(method) or "").partition("\n\n")[0].split())


def _is_setter(method: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in method.decorator_list)


def _classes_named(address: str) -> Iterator[str]:
    """The addresses of the public classes of smalti in the annotations of a class: of its fields and public methods."""
    home, node = _locate(address)
    for statement in node.body:
        annotations: list[ast.expr | None] = []
        if isinstance(statement, ast.AnnAssign):
            annotations.append(statement.annotation)
        elif isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            given = statement.args
            annotations += [each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + [
                statement.returns
            ]
        for each in filter(None, annotations):
            for name in dict.fromkeys(found.id for found in ast.walk(each) if isinstance(found, ast.Name)):
                if (found_at := _address_of(name, home)) is not None:
                    yield found_at


def _address_of(name: str, home: str) -> str | None:
    """Where plugins import a class from that a module of smalti names so; None for anything else."""
    module = home
    for statement in ast.walk(_parsed(*_parts(home))):
        if isinstance(statement, ast.ImportFrom) and name in [each.name for each in statement.names]:
            module = statement.module or ""
    if module.partition(".")[0] != "smalti":
        return None
    room = ".".join(module.split(".")[:2])
    for package in ("smalti", room):
        with suppress(LookupError):
            found, _ = _locate(f"{package}:{name}")
            if found == module or found.startswith(f"{room}."):
                return f"{package}:{name}"
    return None


def _chapter(chapter: Chapter) -> Iterator[str]:
    yield from (f"## {chapter.title}", "", chapter.about, "")
    for address in (*chapter.classes, *chapter.optional, *chapter.given):
        yield from _class(address, chapter)


def _class(address: str, chapter: Chapter) -> Iterator[str]:
    module, _, name = address.partition(":")
    node = _find(address)
    parents = [ast.unparse(base) for base in node.bases]
    kind = (
        "protocol" if "Protocol" in parents else "record" if node.decorator_list and address not in chapter.bases else "class"
    )
    if address in chapter.optional:
        kind = f"optional {kind}"
    inherited = "".join(f", with all that `{each}` has" for each in parents if each not in ("Protocol", "Registered"))
    note = "; your plugin is given one" if address in chapter.given else ""
    yield from (f"### `{name}`", "", f"*{kind} in* `{module}`{inherited}{note}", "", *_docstring_lines(node), "")
    fields = list(_fields(node))
    if "Registered" in parents:
        fields = [*(field for field in _fields(_find("smalti:Registered")) if field[0] != "origin"), *fields]
    if fields:
        yield from _table(fields)
    if kind != "record":
        yield from _method_sections(name, list(_methods(node)), chapter, given=address in chapter.given)


def _table(fields: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """The attributes of a class; without a column for meanings where nothing stands in it."""
    with_meanings = any(meaning for _, _, _, meaning in fields)
    yield "| attribute | type | default |" + (" meaning |" if with_meanings else "")
    yield "|---|---|---|" + ("---|" if with_meanings else "")
    for field, kind, value, meaning in fields:
        yield f"| `{field}` | `{_cell(kind)}` | {_cell(value)} |" + (f" {_cell(meaning)} |" if with_meanings else "")
    yield ""


def _method_sections(owner: str, methods: list[ast.FunctionDef], chapter: Chapter, *, given: bool) -> Iterator[str]:
    """The sections of the methods of a class. If it is `given`, its defaults do not matter and are left out."""
    if len(methods) > _LONG and not given:
        rows = [f"| `{method.name}` | {_default(owner, method, chapter.bases)} |" for method in methods]
        yield from ("| method | |", "|---|---|", *rows, "")
    for method in methods:
        yield from (f"#### `{_signature(method)}`", "")
        if not given:
            yield from (f"*{_default(owner, method, chapter.bases)}*", "")
        yield from (*lines, "") if (lines := _docstring_lines(method)) else ()


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each public annotated attribute that instances have."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(_Plain().visit(statement.annotation))
            if kind.startswith("ClassVar") or statement.target.id.startswith("_"):
                continue
            default, meaning = _declared(statement.value)
            value = "" if default is None else f"`{_value(default)}`"
            yield statement.target.id, kind, value or "required", _text(after) or meaning


class _Plain(ast.NodeTransformer):
    """Annotations without the checks of their values: `Annotated[int, Field(ge=0)]` is `int`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node


def _declared(value: ast.expr | None) -> tuple[ast.expr | None, str]:
    """The default and the help of a field; those of `_key(DEFAULT, help=...)` are its arguments."""
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).startswith("_"):
        return value, ""
    texts = [each.value for each in value.keywords if each.arg == "help"]
    help_text = texts[0].value if texts and isinstance(texts[0], ast.Constant) else ""
    return (value.args[0] if value.args else None), str(help_text)


def _value(node: ast.expr) -> str:
    """A default as an expression; `field(default_factory=dict)` is an empty dict."""
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg == "default_factory":
            return f"{ast.unparse(keyword.value)}()"
    return ast.unparse(node)


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            yield statement


def _signature(method: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(method.returns)}" if method.returns is not None else ""
    if _is_property(method):
        return f"{method.name}{returns.replace(' -> ', ': ')}"
    arguments = ast.unparse(method.args).removeprefix("self").removeprefix(", ")
    return f"{method.name}({arguments}){returns}"


def _is_property(method: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in method.decorator_list)


def _default(owner: str, method: ast.FunctionDef, bases: tuple[str, ...]) -> str:
    """Where the method has a default: in its own class, or in a base class of the chapter."""
    kind = "property, " if _is_property(method) else ""
    if any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in method.decorator_list):
        return f"{kind}required"
    if not _is_empty(method) or any(base.endswith(f":{owner}") for base in bases):
        return f"{kind}default in `{owner}`"
    for base in bases:
        if any(found.name == method.name and not _is_empty(found) for found in _methods(_find(base))):
            return f"{kind}default in `{base.partition(':')[2]}`"
    return f"{kind}required"


def _is_empty(method: ast.FunctionDef) -> bool:
    """Whether it is declared only: nothing but a docstring and `...`."""
    return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in method.body)


def _docstring_lines(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return (ast.get_docstring(node) or "").splitlines()


def _text(statement: ast.stmt | None) -> str:
    """The docstring of an attribute, in one line, if this statement after it is one."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
        return " ".join(statement.value.value.split())
    return ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _find(address: str) -> ast.ClassDef:
    """The definition of a class, in the module from which its package has it. Raises LookupError if there is none."""
    return _locate(address)[1]


@cache
def _locate(address: str) -> tuple[str, ast.ClassDef]:
    """The module that defines a class, and the definition. Raises LookupError for a name that is no class."""
    package, _, name = address.partition(":")
    if not files(_root(package)).joinpath(*package.split(".")[1:]).is_dir():
        return package, _class_in(package, name)
    for statement in _parsed(package, "__init__.pyi").body:
        if isinstance(statement, ast.ImportFrom) and name in [each.name for each in statement.names]:
            module = f"{package}.{statement.module}"
            if files(_root(package)).joinpath(*module.split(".")[1:]).is_dir():  # another room, with a face of its own
                return _locate(f"{module}:{name}")
            return module, _class_in(module, name)
    raise LookupError(address)


def _class_in(module: str, name: str) -> ast.ClassDef:
    for each in _parsed(*_parts(module)).body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            return each
    raise LookupError(f"{module}:{name}")


def _root(package: str) -> str:
    return package.partition(".")[0]


def _parts(module: str) -> tuple[str, ...]:
    """A module for `_parsed`."""
    package, *parts = module.split(".")
    return (package, *parts)


@cache
def _parsed(package: str, *parts: str) -> ast.Module:
    """The source of a file below a package; nothing is imported for it but `smalti` itself."""
    root, *rooms = package.split(".")
    file = parts[-1] if "." in parts[-1] else f"{parts[-1]}.py"
    return ast.parse(files(root).joinpath(*rooms, *parts[:-1], file).read_text(encoding="utf-8"))
