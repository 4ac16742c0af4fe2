"""Optimizers by the names of other trainers: which of ours each is, with which settings, and what is refused."""

import re
from pathlib import Path

import pytest

from smalti import OptimizerEntry, hookimpl
from smalti.config.core_options.training import SETTINGS
from smalti.config.resolution import draft, resolve
from smalti.errors import UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins import find_optimizer
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import PluginInfo
from smalti.plugins.schema import schema_of
from smalti_migrate.optimizer_names import ALIASES, REFUSED, normalised, translate_optimizer
from smalti_migrate.tables import tables_page

SCHEMA = schema_of(load_plugins())
OPTIMIZERS = load_plugins(Selection(only=("optimizers",))).gather(HookSpecs.register_optimizers)
SETTING_NAMES = ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay")


def configure(*flags: str):
    return resolve(SCHEMA, ["--accelerate_config=none", *flags], environment={})


def settings(config) -> list[object]:
    return [config.value(name) for name in SETTING_NAMES]


def test_every_name_means_an_optimizer_that_is_here_and_none_is_in_two_tables():
    own = {entry.name for entry in OPTIMIZERS}
    assert {alias.name for alias in ALIASES.values()} <= own
    assert SETTINGS.keys() <= own
    assert (ALIASES.keys() | REFUSED.keys()) & own == ALIASES.keys() & REFUSED.keys() == set()
    assert [name for name in (*ALIASES, *REFUSED) if name != normalised(name)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_says_which_optimizer_to_take(name):
    [problem] = draft(SCHEMA, ["--accelerate_config=none", f"--optimizer={name}"], environment={}).problems
    assert problem.message == f"the optimizer {name!r} is not supported"
    taken = problem.fix.removeprefix("--optimizer=").partition(" ")[0].rstrip(",")
    assert taken in {entry.name for entry in OPTIMIZERS}


@pytest.mark.parametrize(
    ("given", "name", "values"),
    [
        ("adamw", "adamw", [0.9, 0.999, 1e-8, 0.01]),
        ("adamw_bf16", "adamw", [0.9, 0.999, 1e-6, 0.01]),
        ("torch-adamw", "adamw", [0.9, 0.999, 1e-8, 0.01]),
        ("optimi-lion", "lion", [0.9, 0.99, 1e-8, 0.0]),
        ("lion", "lion", [0.9, 0.99, 1e-8, 0.01]),
        ("optimi-stableadamw", "stableadamw", [0.9, 0.99, 1e-6, 0.01]),
        ("StableAdamW", "StableAdamW", [0.9, 0.99, 1e-6, 0.01]),
        ("bnb-adamw8bit", "adamw8bit", [0.9, 0.999, 1e-6, 0.01]),
        ("AdamW8bit", "AdamW8bit", [0.9, 0.999, 1e-8, 0.01]),
    ],
)
def test_a_name_brings_the_settings_that_it_has_there(given, name, values):
    config = configure(f"--optimizer={given}")
    assert (config.value("optimizer"), settings(config)) == (name, values)


def test_settings_that_are_given_are_kept_and_the_notice_tells_the_others():
    config = configure("--optimizer=optimi-lion", "--adam_beta2=0.95")
    assert settings(config) == [0.9, 0.95, 1e-8, 0.0]
    difference = "weights and optimizer state are in fp32"
    assert config.notices == (f"optimi-lion in optimizer is lion here with adam_weight_decay=0; {difference}",)
    assert configure("--optimizer=lion").notices == ()


def test_the_settings_of_a_weaker_name_are_not_used(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('optimizer = "optimi-lion"\n')
    config = resolve(SCHEMA, ["--accelerate_config=none", "--optimizer=adamw"], file=file, environment={})
    assert (config.value("optimizer"), settings(config)) == ("adamw", [0.9, 0.999, 1e-8, 0.01])


def test_the_page_says_where_each_optimizer_works():
    text = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    works = {row[0].strip("`"): (row[2] == "yes", row[3] == "yes") for row in rows if row[0] != "`--optimizer`"}
    assert works == {entry.name: (entry.shards, entry.flat) for entry in OPTIMIZERS}


def test_the_tables_have_every_name():
    names = {name for line in tables_page().splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}
    assert names >= ALIASES.keys() | REFUSED.keys()


def test_what_is_no_name_is_left_to_the_check_of_its_type():
    assert translate_optimizer({"optimizer": 3}).values == {}
    assert translate_optimizer({"optimizer": "adamw"}).values == {}


@pytest.mark.parametrize("name", ["soap", "came8bit", "lion8bit", "adam", "optimi-lion"])
def test_a_registered_optimizer_is_chosen_before_another_trainers_meaning_of_its_name(name):
    class Third:
        @hookimpl
        def register_optimizers(self):
            return [OptimizerEntry(name=normalised(name), title=name, factory="nowhere:at_all")]

    plugins = load_plugins()
    plugins.register(PluginInfo(name="third", distribution="third", version="1"), Third())
    config = resolve(schema_of(plugins), ["--accelerate_config=none", f"--optimizer={name}"], environment={})
    assert find_optimizer(config.value("optimizer"), plugins.gather(HookSpecs.register_optimizers)).origin.plugin == "third"
    assert (config.notices, settings(config)) == ((), [0.9, 0.999, 1e-8, 0.01])


def test_a_run_without_an_optimizer_that_two_plugins_register_goes_on_and_one_with_it_chooses():
    class Third:
        @hookimpl
        def register_optimizers(self):
            return [OptimizerEntry(name="lion", title="Lion", factory="nowhere:at_all")]

    plugins = load_plugins()
    plugins.register(PluginInfo(name="third", distribution="third", version="1"), Third())
    entries, schema = plugins.gather(HookSpecs.register_optimizers), schema_of(plugins)
    assert find_optimizer("adamw", entries).name == "adamw"
    for name in ("optimizers:lion", "third:lion"):
        config = resolve(schema, ["--accelerate_config=none", f"--optimizer={name}"], environment={})
        assert f"{find_optimizer(config.value('optimizer'), entries).origin.plugin}:lion" == name
        assert settings(config)[1] == 0.99
    with pytest.raises(UserError, match="'lion' is registered by plugin 'optimizers'"):
        find_optimizer("lion", entries)
