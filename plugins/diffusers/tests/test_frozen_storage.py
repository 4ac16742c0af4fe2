"""What a plan says of a quantised base: Flux in full size, counted without weights and without torchao."""

import pytest

from smalti import World
from smalti.config import draft
from smalti.parallel import device_models
from smalti.plugins import load_plugins, schema_of
from smalti_plan import counted
from smalti_plan.choices import choices, strategies_for
from smalti_plan.counted import facts_of
from smalti_plan.formulas.run_facts import RunFacts

GIB = 2**30
REHEARSED = {"int8-torchao": 14.8, "nf4-torchao": 9.82}
"""GiB at the peak of a step of one image with 1024 x 1024 pixels, all recomputed: `smalti plan --rehearse`, torchao 0.18."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """The facts of a LoRA of Flux, and how its ways to train are listed by device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(counted, "_in_process", lambda request, config: counted.count(request))  # this one has torch already
        plugins = load_plugins()
        words = ["--model_family=flux", "--model_type=lora", "--output_dir=out", "--max_train_steps=1"]
        config = draft(schema_of(plugins), [*words, "--mixed_precision=bf16"])
        facts, run = facts_of(config, plugins, "cuda"), RunFacts.of(config, plugins, "cuda")
    one = World(size=1, local_size=1, device="cuda")
    strategies = strategies_for(config, plugins, one)
    return facts, lambda name: choices(facts, run, strategies, device_models()[name], one)


def test_formulas_of_a_quantised_base_are_near_its_rehearsals(flux):
    _, ways = flux
    found = {each.strategy.name: each for each in ways("rtx4080") if each.candidate.recompute == "full"}
    for precision, gib in REHEARSED.items():
        way = found[f"single-{precision}"]
        assert way.options["base_model_precision"] == precision
        assert way.counted.peak.total / GIB == pytest.approx(gib, rel=0.1)


def test_the_base_is_stored_in_about_a_byte_or_half_a_byte_for_each_weight_of_its_blocks(flux):
    facts, _ = flux
    shares = [each.bytes / facts.frozen.bytes for each in facts.smaller]
    assert shares == pytest.approx([0.51, 0.27, 0.50], abs=0.01)
    assert [each.multiplied for each in facts.smaller] == [False, False, True]
    assert facts.from_json(facts.as_json()) == facts


@pytest.mark.parametrize(
    ("device", "best"), [("a100-80g", "single"), ("rtx3090", "single-int8-torchao"), ("a4000", "single-nf4-torchao")]
)
def test_a_quantised_base_is_offered_where_nothing_else_fits(flux, device, best):
    """If only in second place: streaming fits too, and takes less time than restoring weights for each product."""
    _, ways = flux
    fitting = [each.strategy.name for each in ways(device) if each.fit.level == "fits"]
    resident = [name for name in fitting if name.startswith("single") and "activations" not in name]
    assert resident[0] == best
