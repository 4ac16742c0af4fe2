"""Hooks, their documentation, their shipped users and their tests are one thing: each is held to the others."""

import inspect
import re
import tomllib

import pluggy
import pytest

from smalti.hookspecs import PROJECT, HookSpecs
from smalti.parallel.protocol import Parallel, TrainingState
from smalti.plugins.registry import PluginInfo, Plugins

MANAGER = pluggy.PluginManager(PROJECT)
MANAGER.add_hookspecs(HookSpecs)
HOOKS = {name: caller.spec for name, caller in vars(MANAGER.hook).items() if not name.startswith("_")}
KINDS = ("decide", "gather", "notify")


@pytest.fixture(scope="module")
def sections(root) -> dict[str, str]:
    """The sections of docs/hooks.md by the signature that heads them."""
    text = (root / "docs" / "hooks.md").read_text()
    parts = re.split(r"^### `(.+)`$", text, flags=re.MULTILINE)
    return {
        signature: re.split(r"^## ", body, flags=re.MULTILINE)[0]
        for signature, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def signature(name: str) -> str:
    return f"{name}({', '.join(HOOKS[name].argnames)})"


def section(sections, name: str) -> str:
    return sections[signature(name)]


def test_the_docs_have_every_hook_with_its_exact_arguments_in_the_order_of_the_catalogue(sections):
    assert list(sections) == [signature(name) for name in vars(HookSpecs) if name in HOOKS]


@pytest.mark.parametrize("name", HOOKS)
def test_code_and_docs_agree_on_the_kind(sections, name):
    docstring = inspect.getdoc(HOOKS[name].function) or ""
    kind = docstring.partition(":")[0].split(",")[0]
    documented = section(sections, name).strip().partition("\u00b7")[0]
    assert kind in KINDS
    assert documented.split(",")[0].strip() == kind
    for word in ("backend role", "collective", "isolated"):
        assert (word in docstring.partition(":")[0]) == (word in documented), word
    assert (kind == "decide") == bool(HOOKS[name].opts.get("firstresult"))


@pytest.mark.parametrize("name", HOOKS)
def test_every_argument_is_explained(sections, name):
    explained = re.findall(r"^- `(\w+)`:", section(sections, name), flags=re.MULTILINE)
    assert explained == list(HOOKS[name].argnames)


@pytest.mark.parametrize("name", [name for name in HOOKS if "notify" not in (inspect.getdoc(HOOKS[name].function) or "")])
def test_the_answer_is_explained(sections, name):
    assert re.search(r"^Returns ", section(sections, name), flags=re.MULTILINE)


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_is_a_whole_plugin_that_implements_the_hook(sections, name):
    [example] = re.findall(r"^```python\n(.*?)^```", section(sections, name), flags=re.MULTILINE | re.DOTALL)
    module: dict[str, object] = {"__name__": "example"}
    exec(compile(example, f"docs/hooks.md: {name}", "exec"), module)
    info = PluginInfo(name="example", distribution="docs", version="1")
    Plugins().register(info, module["plugin"])
    assert name in info.hooks


@pytest.mark.parametrize("name", HOOKS)
def test_a_shipped_plugin_uses_the_hook_and_the_docs_name_every_one_that_does(sections, shipped, name):
    users = sorted(shipped.implementers(vars(HookSpecs)[name]))
    assert users
    assert re.findall(r"^Shipped users: (.+)\.$", section(sections, name), flags=re.MULTILINE) == [", ".join(users)]


def test_the_readme_of_a_package_lists_the_hooks_that_its_plugin_implements(root, shipped):
    wrong = {}
    for project in root.glob("plugins/*/pyproject.toml"):
        names = tomllib.loads(project.read_text())["project"].get("entry-points", {}).get("smalti.plugins", ())
        implemented = {hook for name in names for hook in shipped.infos[name].hooks}
        [listed] = re.findall(r"^Hooks: (.*?)\.", project.with_name("README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        if set(re.findall(r"`(\w+)`", listed)) != implemented:
            wrong[project.parent.name] = sorted(implemented)
    assert wrong == {}


@pytest.mark.parametrize("name", HOOKS)
def test_a_test_is_named_after_the_hook(root, name):
    sources = [path.read_text() for folder in ("tests", "plugins") for path in (root / folder).rglob("test_*.py")]
    assert any(re.search(rf"^def test_\w*hook_{name}_", text, flags=re.MULTILINE) for text in sources)


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


def test_only_the_plugin_that_the_essay_names_asks_for_a_place_in_the_order(root):
    sources = [*(root / "core" / "src").rglob("*.py"), *root.glob("plugins/*/src/**/*.py")]
    order = {path.stem: re.findall(r"@hookimpl\((\w+)", path.read_text(encoding="utf-8")) for path in sources}
    assert {name: found for name, found in order.items() if found} == {"run_directory": ["tryfirst", "trylast"]}
