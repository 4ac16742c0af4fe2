"""What is declared in one place and shown in others agrees everywhere."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import click
import pytest
from packaging.requirements import Requirement

import smalti
from smalti.cli import entry
from smalti.cli.arguments import pop_flag
from smalti.cli.pages.help import Command
from smalti.cli.train import _FLAGS
from smalti.config.config import PER_MACHINE
from smalti.config.known_packages import PACKAGES, PLUGINS
from smalti.config.options import Schema
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import BUILT_IN, Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.types import Deferred
from smalti_testing.options_page import reference_page
from smalti_testing.plugins import PluginSubject
from support import package_table
from support.sources import nodes, tree


@pytest.fixture(scope="module")
def official() -> Schema:
    """The options of the built-in and of all official plugins."""
    return schema_of(load_plugins(Selection(only=tuple(package.plugin for package in PACKAGES))))


def test_every_option_has_a_sentence_of_help_and_a_section(official):
    bad = [
        option.name
        for option in official.options.values()
        if not option.help.endswith(".") or not re.match(r"[A-Z\"]", option.help) or not option.group.title
    ]
    assert bad == []


def test_option_names_are_lower_case_with_underscores(schema):
    names = [*schema.options, *schema.aliases]
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)] == []


def test_no_option_could_be_taken_for_the_negation_of_a_switch(schema):
    assert [name for name in schema.options if name.startswith("no_")] == []


def test_no_option_has_the_name_of_a_word_of_the_command_line(schema):
    assert {"config", "help", "help_all", "dry_run", "json", "all", "refresh", "apply"} & {
        *schema.options,
        *schema.aliases,
    } == set()


def test_what_an_option_depends_on_is_an_option(schema):
    conditions = {option.when.partition("==")[0].strip() for option in schema.options.values() if option.when}
    assert conditions <= schema.options.keys()


def test_what_machines_may_differ_in_are_options(schema):
    assert schema.options.keys() >= PER_MACHINE


def test_every_default_is_valid_and_can_be_written_as_json(schema):
    for group in schema.groups:
        json.dumps(group.options().model_dump(mode="json"))


RETIRED = re.compile(r"\b(pictures?|draws?|drawn|drawing|mend|told|besides|machines?|cuts?|so many|is no)\b", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=\S)", text)


def test_help_is_at_most_two_short_sentences_in_the_usual_words(official):
    texts = {option.name: option.help for option in official.options.values()}
    assert {name: text for name, text in texts.items() if len(sentences(text)) > 2} == {}
    assert {name: text for name, text in texts.items() if any(len(each.split()) > 20 for each in sentences(text))} == {}
    everything = texts | {f"{each.name}, trade-off": each.tradeoff for each in official.options.values()}
    assert {name: text for name, text in everything.items() if RETIRED.search(text)} == {}


def commands(context: click.Context) -> Iterator[click.Context]:
    """Every command of smalti and of the official plugins, by the context in which it would be called."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            command = command.load() if isinstance(command, Deferred) else command
            yield from commands(click.Context(command, info_name=name, parent=context))


COMMANDS = {
    context.command_path: context
    for context in commands(click.Context(entry.smalti, info_name="smalti", **entry.smalti.context_settings))
}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_with_examples_that_fit_80_columns(monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    command, text = COMMANDS[path].command, click.unstyle(COMMANDS[path].get_help())
    assert isinstance(command, Command)
    assert command.examples
    if path != "smalti train":  # whose page has the options as well
        assert ("Examples:\n" in text, max(map(len, text.splitlines())) <= 80) == (True, True)
    summary = sentences((command.help or "").partition("\n\n")[0])
    assert [each for each in summary if len(each.split()) > 20 or RETIRED.search(each)] == []
    helps = {param.name: param.help for param in command.params if isinstance(param, click.Option) and param.help}
    assert {name: text for name, text in helps.items() if RETIRED.search(text)} == {}
    assert {name: text for name, text in helps.items() if any(len(each.split()) > 20 for each in sentences(text))} == {}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_of_every_command_is_read_with_dashes_and_underscores_in_any_case(path):
    command, context = COMMANDS[path].command, COMMANDS[path]
    for option in (each for each in command.params if isinstance(each, click.Option)):
        flags = [each for each in (*option.opts, *option.secondary_opts) if each.startswith("--")]
        for name in {name for each in flags for name in _spellings(each.removeprefix("--"))}:
            value = [] if option.is_flag else ["1"]
            given, rest, _ = command.make_parser(context).parse_args([f"--{name}", *value])
            assert (option.name in given, rest) == (True, []), name


def _spellings(name: str) -> list[str]:
    return [name.replace("-", "_"), name.replace("_", "-"), name.upper()]


def test_the_switches_of_train_are_read_in_both_spellings():
    for name in (flag.split()[0] for flag, _ in _FLAGS if "=" not in flag):
        for spelling in _spellings(name.removeprefix("--")):
            assert pop_flag([f"--{spelling}"], name), spelling


@pytest.mark.parametrize("path", COMMANDS)
def test_examples_call_the_command_with_options_that_exist(official, path):
    command = COMMANDS[path].command
    assert isinstance(command, Command)
    for example in command.examples:
        words = shlex.split(example.replace("\\\n", " "))
        called = max((name for name in COMMANDS if words[: len(name.split())] == name.split()), key=len)
        assert called.startswith(path), example
        own = {flag for param in COMMANDS[called].command.params for flag in (*param.opts, *param.secondary_opts)} | {
            "--help",
            "--config",
        }
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [flag for flag in flags if flag not in own and official.find(flag) is None] == [], example


def test_the_reference_page_is_up_to_date(root, official):
    page = (root / "docs" / "reference" / "configuration.md").read_text()
    assert page.rstrip() == reference_page(official).rstrip(), "smalti config reference > docs/reference/configuration.md"


def test_the_reference_page_has_a_row_for_every_option_of_all_official_plugins(root, official):
    page = (root / "docs" / "reference" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert rows == [name for group in official.groups for name in group.options.model_fields]
    assert {"lora_rank", "fsdp_enable", "deepspeed_config"} <= set(rows)
    links = re.findall(r"\]\(#([\w-]+)\)", page)
    assert len(links) == len(official.groups)
    assert {f"## {group.title}".lower() for group in official.groups} <= set(page.lower().splitlines())


def test_public_names_are_sorted_and_all_there():
    assert smalti.__all__ == sorted(smalti.__all__)
    assert [name for name in smalti.__all__ if getattr(smalti, name, None) is None] == []


def test_what_hooks_take_and_give_is_public():
    from smalti import types

    given = {name for name, value in vars(types).items() if isinstance(value, type) and value.__module__ == types.__name__}
    assert given <= set(smalti.__all__)


def test_unknown_public_names_are_told():
    with pytest.raises(AttributeError, match="No smalti attribute Nothing"):
        smalti.Nothing  # noqa: B018


def test_importing_smalti_alone_is_light():
    code = "import sys, smalti\nassert not {'pydantic', 'click', 'torch', 'pluggy'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def distribution(folder: str) -> str:
    """The name of the package in a folder of plugins/."""
    return f"smalti-{folder.replace('_', '-')}"


def test_all_packages_have_one_version_and_their_official_names(root):
    found = {path.parent.name: tomllib.loads(path.read_text())["project"] for path in root.glob("plugins/*/pyproject.toml")}
    core = tomllib.loads((root / "core" / "pyproject.toml").read_text())["project"]
    assert {project["version"] for project in found.values()} <= {core["version"]}
    assert {name: project["name"] for name, project in found.items()} == {name: distribution(name) for name in found}
    entered = {
        name: project["name"]
        for project in found.values()
        for name in project.get("entry-points", {}).get("smalti.plugins", ())
    }
    assert {package.plugin: package.distribution for package in PLUGINS.values()} == entered


def test_type_checkers_read_the_annotations_of_all_packages(root):
    packages = [path.parent for path in root.glob("plugins/*/src/smalti_*/__init__.py")] + [root / "core" / "src" / "smalti"]
    assert [str(package.relative_to(root)) for package in packages if not (package / "py.typed").exists()] == []


def test_the_table_of_packages_says_what_each_of_them_adds():
    assert package_table.TABLE.read_text() == package_table.table(), "run `python tests/support/package_table.py`"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.plugin)
def test_a_package_with_a_strategy_of_accelerate_has_its_distributed_type(package):
    types = [key for key in package.accelerate if key.isupper()]
    assert bool(types) == bool(package.strategy)
    assert not types or "configure_distributed" in PluginSubject(package.plugin).info.hooks


NAMED = {
    "builtin/run_directory.py": {"validation_prompt", "validation_prompt_library"},  # the answer to a request for images
    "config/accelerate_yaml.py": {"deepspeed_config"},  # a section of Accelerate's own
    "config/other_trainers.py": {"cache_dir"},  # a key of datasets, here and in the next two
    "data/datasets/parse.py": {"cache_dir"},
    "data/datasets/spec.py": {"cache_dir"},
    "models/family.py": {"context_parallel_comm_strategy", "context_parallel_size"},
    "launch/checks.py": {"eval_steps_interval"},  # which package evaluates
    "models/family_check.py": {"lora_targets"},  # an attribute of families
}
"""Options of packages that texts in the code of the core name. Nothing is added here."""


def test_the_core_names_no_other_option_of_a_package(root):
    base = root / "core" / "src" / "smalti"
    options = {name for package in PACKAGES for name in package.options}
    words = re.compile(rf"--(?:no_)?({'|'.join(options)})\b|\b({'|'.join(name for name in options if '_' in name)})\b")
    found = {}
    for path in base.rglob("*.py"):
        every = nodes(tree(path))
        docstrings = {id(node.value) for node in every if isinstance(node, ast.Expr)}
        texts = [node for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = (match for node in texts if id(node) not in docstrings for match in words.finditer(node.value))
        if names := {match[1] or match[2] for match in named}:
            found[path.relative_to(base).as_posix()] = names
    assert found == NAMED


def _texts(every: Sequence[ast.AST]) -> Iterator[str]:
    """The texts among the nodes of some code, without docstrings; a NUL stands for what an f-string computes."""
    left_out = {id(each.value) for each in every if isinstance(each, ast.Expr)}
    left_out |= {id(part) for each in every if isinstance(each, ast.JoinedStr) for part in each.values}
    for each in every:
        if id(each) in left_out:
            continue
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in each.values)


def _is_command(words: list[str]) -> bool:
    """Whether these are a command, with arguments perhaps; "smalti" alone is none."""
    path = max((name for name in COMMANDS if words[: len(name.split())] == name.split()), key=len)
    return path != "smalti" and not (isinstance(COMMANDS[path].command, click.Group) and len(words) > len(path.split()))


FOREIGN_FLAGS = ("--help", "--config", "--constraint", "--array")
"""Flags in fix lines that are no options: two of `smalti train` itself, and those of sbatch."""


def test_what_messages_and_their_fixes_name_is_there(root, official):
    own = {flag for each in COMMANDS.values() for param in each.command.params for flag in (*param.opts, *param.secondary_opts)}
    wrong = []
    for path in (*root.glob("core/src/**/*.py"), *root.glob("plugins/*/src/**/*.py")):
        every = nodes(tree(path))
        texts = "\n".join(_texts(every))
        fixes = (each.value for each in every if isinstance(each, ast.keyword) and each.arg == "fix")
        flags = re.findall(
            r"(?<![\w-])--[a-z][a-z0-9_]+(?![a-z0-9_\0-])",
            "\n".join(text for fix in fixes for text in _texts([*ast.walk(fix)])),
        )
        names = {
            "hook": [name for name in re.findall(r"hooks? ['\"`]?([a-z]+(?:_[a-z]+)+)", texts) if not hasattr(HookSpecs, name)],
            "page": [page for page in re.findall(r"docs/[\w/.-]+\.md", texts) if not (root / page).is_file()],
            "command": [words for words in re.findall(r"`(smalti [a-z0-9_ -]+)", texts) if not _is_command(words.split())],
            "flag": [flag for flag in flags if flag not in own and official.find(flag.replace("--no_", "--", 1)) is None],
        }
        wrong += [(path.name, kind, name) for kind, found in names.items() for name in found if name not in FOREIGN_FLAGS]
    assert wrong == []


def test_every_built_in_plugin_is_loaded(root):
    folder = root / "core" / "src" / "smalti" / "builtin"
    modules = {f"smalti.builtin.{path.stem}" for path in folder.glob("*.py") if "\nplugin = " in path.read_text()}
    assert modules == set(BUILT_IN.values()) - {"smalti.cli.commands"}


def test_paths_in_the_docs_exist(root):
    text = "".join(path.read_text() for path in (root / "docs").glob("*.md"))
    named = set(re.findall(r"`((?:src|docs|examples|tests)/[\w./-]+\.\w+)`", text))
    assert [name for name in named if not any((root / base / name).exists() for base in (PurePath("core"), PurePath()))] == []


def test_the_usual_set_is_the_same_wherever_it_is_named(root):
    listed = [line for line in (root / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    extras = tomllib.loads((root / "core/pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        required = [Requirement(each) for each in extras[extra]]
        return {f"{each.name}[{','.join(each.extras)}]" if each.extras else each.name for each in required}

    assert {line.replace("./plugins/", "smalti-") for line in listed} == packages("usual") | {"./core"}
    usual, others = ({re.sub(r"\[.*", "", each) for each in packages(extra)} for extra in ("usual", "all"))
    known = {package.distribution for package in PACKAGES}
    assert known - usual - others == {"smalti-testing", "smalti-toy"}
    rows = re.findall(r"^\| `plugins/(\w+)` (\*?)", (root / "docs/install.md").read_text(), flags=re.MULTILINE)
    assert {f"smalti-{name.replace('_', '-')}": bool(mark) for name, mark in rows} == {name: name in usual for name in known}


def test_the_command_of_a_readme_installs_what_the_package_needs(root):
    wrong = {}
    for project in root.glob("plugins/*/pyproject.toml"):
        rest, wanted = [project.parent.name], set()
        while rest:
            wanted.add(f"./plugins/{(folder := rest.pop())}")
            needed = tomllib.loads((root / "plugins" / folder / "pyproject.toml").read_text())["project"]["dependencies"]
            names = (Requirement(each).name for each in needed)
            rest += [name.removeprefix("smalti-").replace("-", "_") for name in names if name.startswith("smalti-")]
        [line] = re.findall(r"^pip install ([^#\n]*)", project.with_name("README.md").read_text(), flags=re.MULTILINE)
        told = {re.sub(r"\[.*", "", word) for word in shlex.split(line)}
        if told != wanted | {"./core"}:
            wrong[project.parent.name] = sorted(wanted - told)
    assert wrong == {}
