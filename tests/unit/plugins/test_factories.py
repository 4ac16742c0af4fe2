"""What a plugin registered as "module:callable": its failures name the plugin."""

import sys
from types import ModuleType

import pytest
import torch

from smalti.diffusion.timesteps import ConstantShift
from smalti.errors import BrokenPlugin, MissingPlugin, UserError
from smalti.hookspecs import HookSpecs
from smalti.models.family import ModelFamily
from smalti.plugins.factories import create
from smalti.plugins.lookup import choose_distributed, find_family
from smalti.training.optim.optimizers import build_registered
from smalti.types import DistributedPlan, FamilyEntry, OptimizerEntry, Origin
from smalti_testing import TinyFamily

ORIGIN = Origin(plugin="old", distribution="smalti-old", version="1.2", built_in=False)


@pytest.fixture
def module(monkeypatch):
    """module(callable=...) puts a module `theirs` with these attributes where it can be imported."""

    def put(**contents):
        found = ModuleType("theirs")
        vars(found).update(contents)
        monkeypatch.setitem(sys.modules, "theirs", found)

    return put


def entry(factory: str) -> FamilyEntry:
    return FamilyEntry(name="older", title="Older", factory=factory, origin=ORIGIN)


def made(factory: str):
    found = entry(factory)
    return create(found, found.factory, None)


def test_a_missing_dependency_names_what_needs_it_and_leaves_with_the_code_of_a_missing_package(module):
    def build(config):
        import no_such_package_xyz  # noqa: F401

    module(build=build)
    with pytest.raises(MissingPlugin) as caught:
        made("theirs:build")
    assert "the model family 'older' of plugin 'old' (smalti-old 1.2) needs the Python module 'no_such" in caught.value.message
    assert (caught.value.exit_code, "pip install no_such_package_xyz" in caught.value.fix) == (4, True)


def test_a_module_that_smalti_had_once_shows_a_plugin_for_another_version(module):
    def build(config):
        import smalti.diffusion.step  # noqa: F401

    module(build=build)
    with pytest.raises(BrokenPlugin) as caught:
        made("theirs:build")
    assert "written for another version of smalti: there is no module 'smalti.diffusion.step'" in caught.value.message
    assert caught.value.fix == "update smalti-old, or disable the plugin with --without old"


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("nowhere_at_all.deep:build", "no module 'nowhere_at_all'"), ("theirs:build", "no callable 'build'")],
)
def test_a_factory_that_is_not_there_is_a_defect_of_the_plugin(module, factory, reason):
    module(other=print)
    with pytest.raises(BrokenPlugin) as caught:
        made(factory)
    assert f"the model family 'older' of plugin 'old' (smalti-old 1.2) is '{factory}', but there is {reason}" in str(
        caught.value
    )
    assert "--without old" in caught.value.fix


def test_any_other_exception_keeps_its_type_and_is_attributed(module):
    module(build=lambda: None)  # takes no configuration
    with pytest.raises(TypeError) as caught:
        made("theirs:build")
    assert caught.value.__notes__ == ["raised by plugin 'old' (smalti-old 1.2) in the model family 'older' (theirs:build)"]


def test_what_a_factory_tells_the_user_is_passed_on(module):
    def build(config):
        raise UserError("no such folder", fix="make it")

    module(build=build)
    with pytest.raises(UserError, match="no such folder"):
        made("theirs:build")


def register(plugins, **hooks):
    from smalti import hookimpl
    from smalti.plugins.registry import PluginInfo

    implementations = {name: hookimpl(lambda value=value: value) for name, value in hooks.items()}
    info = PluginInfo(name="old", distribution="smalti-old", version="1.2")
    plugins.register(info, type("Old", (), {name: staticmethod(each) for name, each in implementations.items()})())


class Unrelated:
    name, alignment = "older", 8

    def build_model(self):
        return torch.nn.Identity()


class Partial(ModelFamily):
    name = "older"

    def build_model(self):
        return torch.nn.Identity()


class Misspelt(TinyFamily):
    indivisable = "weights in int4"


class MisspeltInInit(TinyFamily):
    def __init__(self):
        super().__init__()
        self.beta_shedule = "linear"


class MisspeltMethod(TinyFamily):
    def encode_image(self, pixels):
        return pixels[:, :, ::8, ::8]


class Half(TinyFamily):
    def encoder_identity(self, kind):
        return {}


FAULTY = {
    Unrelated: "Unrelated does not inherit from smalti.models.ModelFamily",
    Partial: "Partial has no method encode_captions; has no method forward",
    Misspelt: "Misspelt has indivisable, which smalti does not know; did you mean indivisible?",
    MisspeltInInit: "MisspeltInInit has beta_shedule, which smalti does not know; did you mean beta_schedule?",
    MisspeltMethod: "MisspeltMethod has encode_image, which smalti does not know; did you mean encode_images?",
    Half: "Half has encoder_identity without release_encoder",
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_family_that_is_none_is_refused_with_the_reason(plugins, configure, module, kind):
    module(build=lambda config: kind())
    register(plugins, register_model_families=[FamilyEntry(name="older", title="Older", factory="theirs:build")])
    with pytest.raises(BrokenPlugin) as caught:
        find_family(configure("--model_family=older"), plugins)
    assert f"the model family 'older' of plugin 'old' (smalti-old 1.2) cannot be used: {FAULTY[kind]}" in str(caught.value)
    assert "inherit from smalti.models.ModelFamily" in caught.value.fix


def test_a_family_may_have_names_of_its_own(plugins, configure, module):
    class Own(TinyFamily):
        flow_shift = ConstantShift(value=3.0)
        flow_shifts, sampler, _beta_shedule = (1.0, 3.0), "euler", "linear"

        def sample(self, model, request):
            return super().sample(model, request)

    module(build=lambda config: Own())
    register(plugins, register_model_families=[FamilyEntry(name="older", title="Older", factory="theirs:build")])
    assert isinstance(find_family(configure("--model_family=older"), plugins), Own)


def test_an_optimizer_that_cannot_be_built_is_not_blamed_on_the_core(plugins, configure, module):
    def signum(groups, *, lr, betas):
        raise AssertionError

    module(signum=signum)
    register(plugins, register_optimizers=[OptimizerEntry(name="signum", title="Signum", factory="theirs:signum")])
    config = configure("--optimizer=signum")
    registry = plugins.gather(HookSpecs.register_optimizers)
    groups = [{"params": [("weight", torch.nn.Parameter(torch.ones(2, 2)))]}]
    with pytest.raises(TypeError) as caught:
        plugins.decide(HookSpecs.build_optimizer, model=None, groups=groups, config=config, registry=registry)
    assert caught.value.__notes__ == ["raised by plugin 'old' (smalti-old 1.2) in the optimizer 'signum' (theirs:signum)"]


def test_an_optimizer_that_is_none_is_refused(configure, module):
    module(signum=lambda groups, **settings: "signum")
    signum = OptimizerEntry(name="signum", title="Signum", factory="theirs:signum", origin=ORIGIN)
    with pytest.raises(BrokenPlugin, match=r"theirs:signum made a str, not a torch\.optim\.Optimizer"):
        build_registered([], configure("--optimizer=signum"), [signum])


def test_a_plan_with_the_name_of_another_plugin_names_the_one_that_gave_it(plugins, configure):
    register(plugins, configure_distributed=DistributedPlan(name="new", title="Old", parallel="theirs:parallel"))
    with pytest.raises(BrokenPlugin, match=r"plugin 'old' \(smalti-old 1.2\) returned a plan with the name 'new'"):
        choose_distributed(configure(), plugins)
