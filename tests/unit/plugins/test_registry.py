"""Calling hooks: who is asked, in which order, who is blamed."""

import inspect
from collections import Counter
from dataclasses import replace
from importlib.metadata import PathDistribution
from types import SimpleNamespace

import pytest
from torch import nn

from smalti import hookimpl
from smalti.errors import Problem, UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import BUILT_IN, Selection, load_plugins
from smalti.plugins.lookup import find_entry
from smalti.plugins.registry import PluginInfo
from smalti.types import Block, Checkpoint, DistributedPlan, FamilyEntry


def info(name: str) -> PluginInfo:
    return PluginInfo(name=name, distribution=f"dist-{name}", version="1.0")


class Wrapper:
    """A backend, or a plugin that only looks on if it has no plan."""

    def __init__(self, name: str, answer: object, asked: list[str]) -> None:
        self.name, self.answer, self.asked = name, answer, asked

    @hookimpl
    def wrap_model(self, model):
        self.asked.append(self.name)
        return self.answer


class Backend(Wrapper):
    @hookimpl
    def configure_distributed(self):
        return DistributedPlan(name=self.name, title=self.name, parallel="nowhere:at_all")


class Families:
    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def register_model_families(self):
        return [FamilyEntry(name=name, title=name, factory="nowhere:at_all") for name in self.names]


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    @hookimpl
    def check_config(self, config):
        raise self.error


def test_the_built_in_plugins_come_first_and_in_a_fixed_order(plugins):
    assert list(plugins.infos)[: len(BUILT_IN)] == list(BUILT_IN)


def test_the_line_at_start_names_plugins_of_other_packages_alone(plugins):
    plugins.register(info("mine"), Families("first"))
    assert plugins.summary.endswith("plugins: toy, mine 1.0")


def test_only_the_chosen_backend_is_asked_for_a_backend_role(plugins):
    asked: list[str] = []
    for name in ("one", "two"):
        plugins.register(info(name), Backend(name, nn.Identity(), asked))
    plan = DistributedPlan(name="one", title="One", parallel="nowhere:at_all")
    plugins.backend(plan).decide(HookSpecs.wrap_model, model=None, family=None, blocks=[], parallel=None, weights=None)
    assert asked == ["one"]


def test_a_plugin_that_is_no_backend_may_take_a_backend_role_first(plugins):
    asked: list[str] = []
    plugins.register(info("one"), Backend("one", nn.Identity(), asked))
    plugins.register(info("special"), Wrapper("special", None, asked))
    plan = DistributedPlan(name="one", title="One", parallel="nowhere:at_all")
    plugins.backend(plan).decide(HookSpecs.wrap_model, model=None, family=None, blocks=[], parallel=None, weights=None)
    assert asked == ["special", "one"]


def test_a_plan_must_carry_the_name_of_its_plugin(plugins):
    with pytest.raises(UserError, match="which is not the name of a plugin"):
        plugins.backend(DistributedPlan(name="nobody", title="Nobody", parallel="nowhere:at_all"))


def test_in_a_decide_hook_the_core_is_asked_last(plugins):
    class Detector:
        @hookimpl
        def detect_blocks(self, model):
            return [Block(path="mine", class_name="Mine", parameters=1)]

    plugins.register(info("detector"), Detector())
    assert [block.path for block in plugins.decide(HookSpecs.detect_blocks, model=None, family=None, config=None)] == ["mine"]


def test_gathered_answers_are_sorted_by_name(plugins):
    plugins.register(info("families"), Families("zebra", "ant"))
    assert [family.name for family in plugins.gather(HookSpecs.register_model_families)] == ["ant", "toy", "zebra"]


def test_one_name_from_two_plugins_is_an_error_only_where_it_is_used_and_names_both_distributions(plugins):
    plugins.register(info("families"), Families("toy", "ant"))
    entries = plugins.gather(HookSpecs.register_model_families)
    assert [entry.name for entry in entries] == ["ant", "families:toy", "toy:toy"]
    assert [find_entry(name, entries).name for name in ("ant", "Families:Ant", "families:toy", "toy:toy")] == [
        *("ant", "ant", "families:toy", "toy:toy")
    ]
    assert find_entry("toy:ant", entries) is None
    with pytest.raises(UserError) as raised:
        find_entry("toy", entries)
    assert "'toy' is registered by plugin 'families' (dist-families 1.0) and plugin 'toy' (smalti-toy " in str(raised.value)
    assert raised.value.fix == "choose families:toy or toy:toy"


def test_one_name_twice_from_one_plugin_is_an_error_too(plugins):
    plugins.register(info("families"), Families("ant", "ant"))
    with pytest.raises(UserError, match="'ant' is provided twice"):
        plugins.gather(HookSpecs.register_model_families)


def test_an_answer_of_another_type_is_a_defect_of_its_plugin(plugins):
    class Wrong:
        @hookimpl
        def register_model_families(self):
            return ["flux"]

    plugins.register(info("wrong"), Wrong())
    with pytest.raises(TypeError, match=r"plugin 'wrong' \(dist-wrong 1.0\) returned the str 'flux' from"):
        plugins.gather(HookSpecs.register_model_families)


ANSWERS = {
    "declare_options": ["a text"],
    "check_config": True,
    "detect_blocks": 5,
    "wrap_model": 5,
    "build_optimizer": 5,
    "save_checkpoint": True,
    "load_checkpoint": {},
    "configure_distributed": "FSDP",
    "on_gpu_fault": "stop",
}


@pytest.mark.parametrize("hook", ANSWERS)
def test_whatever_hook_returns_something_else_the_plugin_is_named(plugins, hook):
    parameters = list(inspect.signature(vars(HookSpecs)[hook]).parameters)[1:]
    plugin = SimpleNamespace(**{hook: hookimpl(lambda: ANSWERS[hook])})
    plugins.register(info("wrong"), plugin)
    with pytest.raises(TypeError, match=rf"plugin 'wrong' \(dist-wrong 1.0\) returned the .* from '{hook}', not a"):
        plugins.notify(vars(HookSpecs)[hook], **dict.fromkeys(parameters))


def test_one_object_stands_for_a_list_of_it(plugins):
    class Bare:
        @hookimpl
        def check_config(self):
            return Problem(message="no")

    plugins.register(info("bare"), Bare())
    assert plugins.call_one("bare", HookSpecs.check_config, config=None) == [Problem(message="no")]


def test_a_hook_is_called_with_its_own_arguments_only(plugins):
    with pytest.raises(TypeError, match="missing a required argument: 'config'"):
        plugins.answers(HookSpecs.check_config)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'also'"):
        plugins.call_one("core", HookSpecs.check_config, config=None, also=1)


def test_only_backend_roles_are_decided_by_a_backend(plugins):
    plan = DistributedPlan(name="core", title="Core", parallel="nowhere:at_all")
    with pytest.raises(AssertionError, match="detect_blocks is not a backend role"):
        plugins.backend(plan).decide(HookSpecs.detect_blocks, model=None, family=None, config=None)


WITH_A_FIX = UserError("no", fix="yes")


@pytest.mark.parametrize("error", [ValueError("no"), WITH_A_FIX])
def test_an_exception_keeps_its_type_and_is_told_where_it_came_from(plugins, error):
    plugins.register(info("raising"), Raising(error))
    with pytest.raises(type(error)) as raised:
        plugins.notify(HookSpecs.check_config, config=None)
    told, *fix = raised.value.__notes__
    assert told == "raised by plugin 'raising' (dist-raising 1.0) in hook 'check_config'"
    assert fix == ([] if error is WITH_A_FIX else ["fix: update dist-raising, or disable the plugin with --without raising"])


def test_what_the_core_tells_the_user_to_fix_names_no_plugin(plugins):
    plugins.register(replace(info("own"), built_in=True), Raising(UserError("yours", fix="this")))
    with pytest.raises(UserError, match="yours") as raised:
        plugins.notify(HookSpecs.check_config, config=None)
    assert not hasattr(raised.value, "__notes__")


def test_blame_goes_to_the_plugin_deepest_in_the_traceback(plugins):
    plugins.register(info("inner"), Raising(ValueError("no")))

    class Outer:
        @hookimpl
        def check_config(self, config):
            raise RuntimeError("from here")

    plugins.register(info("outer"), Outer())
    with pytest.raises(RuntimeError) as raised:
        plugins.notify(HookSpecs.check_config, config=None)
    assert raised.value.__notes__[0] == "raised by plugin 'outer' (dist-outer 1.0) in hook 'check_config'"


def test_a_plugin_that_was_switched_off_for_a_hook_is_not_asked_again(plugins):
    plugins.register(info("raising"), Raising(ValueError("no")))
    plugins.disable("raising", HookSpecs.check_config)
    assert "raising" not in plugins.implementers(HookSpecs.check_config)


def test_a_plugin_need_not_take_all_arguments(plugins):
    seen = []

    class Brief:
        @hookimpl
        def on_checkpoint(self, checkpoint):
            seen.append(checkpoint.step)

    plugins.register(info("brief"), Brief())
    plugins.call_one("brief", HookSpecs.on_checkpoint, state=None, checkpoint=Checkpoint(step=3, path="p", size=1, seconds=1.0))
    assert seen == [3]


def test_the_lines_that_ranks_compare_name_active_plugins_only():
    lines = load_plugins(Selection(without=("all", "toy"))).versions
    assert all(line.split()[1] == "smalti" for line in lines)
    assert not any(line.startswith("toy ") for line in lines)


def test_a_mistyped_name_of_a_plugin_of_the_project_is_shown_the_right_one_once():
    with pytest.raises(UserError, match=r"fix: did you mean plots\?$"):
        load_plugins(Selection(without=("plotts",)))


def test_a_selected_plugin_brings_those_that_its_package_depends_on():
    states = {name: each.state for name, each in load_plugins(Selection(only=("diffusers",))).infos.items()}
    assert (states["diffusers"], states["cache"], states["toy"]) == ("active", "active", "not selected")
    assert load_plugins(Selection(only=("diffusers",), without=("cache",))).infos["cache"].state == "blocked"


def test_the_metadata_of_a_plugin_are_parsed_once_for_its_name_and_once_for_its_requirements(tmp_path, monkeypatch):
    """Every command looks for plugins, and parsing takes as long as all else of it: it is done once in a process."""
    read, own = Counter(), PathDistribution.read_text

    def counted(self, filename):
        read[self._path.name.partition("-")[0], filename] += 1
        return own(self, filename)

    monkeypatch.setattr(PathDistribution, "read_text", counted)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        infos = load_plugins(Selection(without=("toy",)), strict=False).infos
        assert (infos["toy"].state, read["smalti_toy", "METADATA"]) == ("blocked", 2)
    assert load_plugins(strict=False).infos["toy"].state == "active"
