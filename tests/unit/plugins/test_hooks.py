"""The hooks of the set-up: what a plugin says there is what the rest of the kernel works with."""

import click
import pytest

import smalti
from smalti import hookimpl
from smalti.config.resolution import resolve
from smalti.data.datasets.spec import catalog_of
from smalti.errors import ConfigError, UserError
from smalti.hookspecs import HookSpecs
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.registry import PluginInfo
from smalti.plugins.schema import check, schema_of
from smalti.types import CommandCollector
from smalti_cache.all_caches import find_cache


class GlitterOptions(smalti.Options):
    glitter_size: int = smalti.option(3, help="Size of the grains.", ge=1)
    glitter: bool = smalti.option(False, help="Sprinkle.")


class Glitter:
    """A plugin that uses every hook of the set-up."""

    @hookimpl
    def declare_options(self):
        return [smalti.OptionGroup(name="glitter", title="Glitter", options=GlitterOptions)]

    @hookimpl
    def check_config(self, config):
        size = config[GlitterOptions].glitter_size
        return [smalti.Problem(message=f"{size} is too large", where="glitter_size", fix="take 4")] if size > 4 else []

    @hookimpl
    def register_commands(self, commands):
        commands.add_command(click.Command("glitter"))

    @hookimpl
    def register_model_families(self):
        return [smalti.FamilyEntry(name="glitter", title="Glitter", factory="nowhere:at_all")]

    @hookimpl
    def register_storage(self):
        return [smalti.StorageEntry(name="box", title="a box", factory="nowhere:at_all")]

    @hookimpl
    def register_metadata_backends(self):
        return [smalti.MetadataEntry(name="label", title="the label of the box", factory="nowhere:at_all")]

    @hookimpl
    def register_columns(self):
        return [smalti.ColumnEntry(name="shine", title="Shine", keys="nowhere:at_all", factory="nowhere:at_all")]

    @hookimpl
    def register_optimizers(self):
        return [smalti.OptimizerEntry(name="shake", title="Shaking", factory="nowhere:at_all")]

    @hookimpl
    def register_caches(self):
        return [smalti.CacheEntry(name="grains", title="grains", factory="nowhere:at_all")]

    @hookimpl
    def configure_distributed(self, config):
        wanted = config[GlitterOptions].glitter
        return smalti.DistributedPlan(name="glitter", title="Glitter", parallel="nowhere:at_all") if wanted else None


@pytest.fixture
def sparkling(plugins):
    plugins.register(PluginInfo(name="glitter", distribution="smalti-glitter", version="1.0"), Glitter())
    return plugins


@pytest.fixture
def configured(sparkling):
    return lambda *flags: resolve(schema_of(sparkling), flags, environment={})


def test_hook_declare_options_gives_flags_that_are_validated_and_typed(configured):
    assert configured("--glitter-size=2")[GlitterOptions].glitter_size == 2
    with pytest.raises(ConfigError, match="glitter_size: cannot be '0': input should be greater than or equal to 1"):
        configured("--glitter_size=0")


def test_hook_declare_options_puts_a_plugins_section_after_the_cores(sparkling):
    groups = [group.name for group in schema_of(sparkling).groups]
    assert groups.index("glitter") > groups.index("plugins") > groups.index("run")


def test_hook_check_config_complaints_come_together_with_the_cores(sparkling, configured):
    with pytest.raises(ConfigError) as raised:
        check(configured("--glitter_size=5"), sparkling)
    assert "glitter_size: 5 is too large\n    fix: take 4" in str(raised.value)
    assert "no model family given" in str(raised.value)


def test_hook_register_commands_adds_a_command(sparkling):
    group = CommandCollector()
    sparkling.notify(HookSpecs.register_commands, commands=group)
    assert {"glitter", "run"} <= group.commands.keys()


def test_hook_register_model_families_makes_a_family_known(sparkling):
    from smalti.plugins.lookup import find_family

    config = resolve(schema_of(sparkling), ["--model_family=gliter"], environment={})
    with pytest.raises(UserError) as raised:
        find_family(config, sparkling)
    assert raised.value.message == "Unknown model_family 'gliter'."
    assert "did you mean glitter?" in raised.value.fix


def test_hook_register_storage_makes_a_dataset_type_known(sparkling):
    assert {"box", "local"} <= set(catalog_of(sparkling).storages)


def test_hook_register_metadata_backends_makes_a_source_of_captions_known(sparkling):
    assert {"label", "discovery"} <= set(catalog_of(sparkling).metadata)


def test_hook_register_columns_makes_a_column_known(sparkling):
    assert "shine" in catalog_of(sparkling).columns


def test_hook_register_optimizers_adds_to_the_registry(sparkling):
    names = {entry.name for entry in sparkling.gather(HookSpecs.register_optimizers)}
    assert {"shake", "adamw"} <= names


def test_hook_register_caches_makes_a_cache_known(sparkling):
    with pytest.raises(UserError, match="did you mean grains"):
        find_cache(sparkling, "grain")


def test_hook_configure_distributed_claims_the_run_when_its_options_ask_for_it(sparkling, configured):
    assert choose_distributed(configured("--glitter"), sparkling).title == "Glitter"
    assert choose_distributed(configured(), sparkling).title == "single process"
