"""Hooks, their documentation, their shipped users and their tests are one thing: each is held to the others."""

import inspect
import re
import tomllib
from functools import cache

import pluggy
import pytest
from click.testing import CliRunner

from smalti.hookspecs import PROJECT, HookSpecs
from smalti.parallel.protocol import Parallel, TrainingState
from smalti.plugins.registry import PluginInfo, Plugins
from smalti_testing.hooks_page import callers, examples, hooks_page, shipped_users
from smalti_testing.new_plugin import plugin
from smalti_testing.protocols import documented

MANAGER = pluggy.PluginManager(PROJECT)
MANAGER.add_hookspecs(HookSpecs)
HOOKS = {name: caller.spec for name, caller in vars(MANAGER.hook).items() if not name.startswith("_")}
KINDS = ("decide", "gather", "notify")


@cache
def shown() -> set[str]:
    """The names of the classes on the page of protocols."""
    return {address.partition(":")[2] for address in documented()}


def described(name: str) -> str:
    """The docstring of a hook."""
    return inspect.getdoc(HOOKS[name].function) or ""


def test_the_page_is_up_to_date(root, shipped):
    assert (root / "docs/reference/hooks.md").read_text() == hooks_page(shipped), (
        "smalti plugin reference hooks > docs/reference/hooks.md"
    )


def test_the_command_prints_the_page_and_names_nothing_but_plugins_of_this_project(root):
    printed = CliRunner().invoke(plugin, ["reference", "hooks"])
    assert (printed.exit_code, printed.output) == (0, (root / "docs/reference/hooks.md").read_text())


def test_the_page_has_every_hook_with_its_exact_arguments_in_the_order_of_the_catalogue(shipped):
    signatures = [f"{name}({', '.join(HOOKS[name].argnames)})" for name in vars(HookSpecs) if name in HOOKS]
    assert re.findall(r"^### `(.+)`$", hooks_page(shipped), flags=re.MULTILINE) == signatures


def test_every_hook_is_called():
    assert [name for name in HOOKS if not callers(name)] == []


@pytest.mark.parametrize("name", HOOKS)
def test_a_docstring_begins_with_the_kind(name):
    kind, *more = described(name).partition(":")[0].split(", ")
    assert kind in KINDS
    assert {*more} <= {"backend role", "collective", "isolated"}
    assert (kind == "decide") == bool(HOOKS[name].opts.get("firstresult"))


@pytest.mark.parametrize("name", HOOKS)
def test_a_docstring_explains_what_no_class_on_the_pages_does(name):
    hints = HOOKS[name].function.__annotations__
    assert [
        each
        for each in HOOKS[name].argnames
        if not shown() & {*re.findall(r"\w+", hints[each])} and f"`{each}`" not in described(name)
    ] == []


def test_every_hook_has_an_example():
    assert list(examples()) == [name for name in vars(HookSpecs) if name in HOOKS]


def test_the_page_on_choosing_a_hook_names_every_one_and_no_other(root):
    choices = (root / "docs/hooks.md").read_text(encoding="utf-8").partition("## Which hook\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"`(\w+_\w+|diagnose)`", choices)} == {*HOOKS}


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_is_a_whole_plugin_that_implements_the_hook(name):
    code = examples()[name].removeprefix("```python\n").removesuffix("```")
    module: dict[str, object] = {"__name__": "example"}
    exec(compile(code, f"hook_examples.md: {name}", "exec"), module)
    info = PluginInfo(name="example", distribution="docs", version="1")
    Plugins().register(info, module["plugin"])
    assert name in info.hooks


@pytest.mark.parametrize("name", HOOKS)
def test_a_shipped_plugin_uses_the_hook_and_the_page_names_every_one_that_does(shipped, name):
    assert shipped_users(name, shipped) == sorted(shipped.implementers(vars(HookSpecs)[name])) != []


def test_the_readme_of_a_package_lists_the_hooks_that_its_plugin_implements(root, shipped):
    wrong = {}
    for project in root.glob("plugins/*/pyproject.toml"):
        names = tomllib.loads(project.read_text())["project"].get("entry-points", {}).get("smalti.plugins", ())
        implemented = {hook for name in names for hook in shipped.infos[name].hooks}
        [listed] = re.findall(r"^Hooks: (.*?)\.", project.with_name("README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        if set(re.findall(r"`(\w+)`", listed)) != implemented:
            wrong[project.parent.name] = sorted(implemented)
    assert wrong == {}


def test_a_test_is_named_after_each_hook(root):
    sources = [path.read_text() for folder in ("tests", "plugins") for path in (root / folder).rglob("test_*.py")]
    tests = re.findall(r"^def test_\w*hook_\w+", "\n".join(sources), flags=re.MULTILINE)
    assert [name for name in HOOKS if not any(f"hook_{name}_" in test for test in tests)] == []


def test_the_loop_in_the_catalogues_first_words_names_every_hook():
    told = inspect.getsource(inspect.getmodule(HookSpecs)).split('"""')[1]
    assert [name for name in HOOKS if name not in told] == []


def test_the_essay_tells_as_many_hooks_and_methods_of_parallel_as_there_are(root):
    design = " ".join((root / "docs" / "design.md").read_text(encoding="utf-8").split())

    def methods(protocol: type) -> int:
        names = {name for kind in protocol.__mro__ if kind.__module__ == protocol.__module__ for name in vars(kind)}
        return len([name for name in names if not name.startswith("_")])

    form = r"`Parallel` with (\d+) methods and its `TrainingState` with (\d+), and all else that varies behind (\d+) hooks"
    [told] = re.findall(form, design)
    assert tuple(map(int, told)) == (methods(Parallel), methods(TrainingState), len(HOOKS))


def test_only_the_plugins_that_the_essay_names_ask_for_a_place_in_the_order(root):
    sources = [*(root / "core" / "src").rglob("*.py"), *root.glob("plugins/*/src/**/*.py")]
    order = {path.stem: re.findall(r"@hookimpl\((\w+)", path.read_text(encoding="utf-8")) for path in sources}
    expected = {"run_directory": ["tryfirst", "trylast"], "activation_plugin": ["tryfirst"]}
    assert {name: found for name, found in order.items() if found} == expected
