"""The choice of `--fit`: the fastest of all ways within the limits; what is set stays, and what is said if none fits."""

from dataclasses import replace

import pytest
from planning.exhaustive import exhaustive, is_rounded

from smalti import FrozenStorage, Strategy, UserError, World
from smalti.config import draft
from smalti.plugins import load_plugins, schema_of
from smalti_plan.choices import estimate, strategies_for
from smalti_plan.facts import BlockFacts, ModelFacts, SampleFacts
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.limit.search import Search, fits, host_of
from smalti_plan.presets.request import card_of
from support.whole import some

WORLD = World(size=1, local_size=1, device="cuda")
ADAPTER = 2**20
SHAPES = {
    "small": (2.5e9, 12, 2**31, 2**25, 6e12),
    "middle": (12e9, 19, 2**30, 2**26, 7.4e13),
    "large": (20e9, 30, 2**30, 2**25, 2e14),
}
"""Parameters, blocks, bytes that a block keeps of a sample, those of its inputs, operations: like SDXL, FLUX.1, Qwen-Image."""


def model_of(shape, goal):
    parameters, blocks, saved, inputs, flops = SHAPES[shape]
    each = int(parameters / blocks)
    trained = each if goal == "full" else ADAPTER
    block = BlockFacts(
        path="", parameters=each, trained=trained, saved=saved, inputs=inputs, copied=2 * trained, products=saved // 4
    )
    frozen = 0 if goal == "full" else 2 * (each - trained) * blocks
    smaller = [
        FrozenStorage(options={"base_model_precision": f"{name}-torchao"}, bytes=int(frozen * share), restoring=2**28)
        for name, share in (("int8", 0.51), ("nf4", 0.26))
    ]
    rowwise = FrozenStorage(
        options={"base_model_precision": "int8-rowwise"}, bytes=int(frozen * 0.51), restoring=2**26, multiplied=True
    )
    sample = SampleFacts(
        width=1024,
        height=1024,
        flops=int(flops),
        saved=2**22,
        copied=0,
        operations=5000,
        blocks=tuple(replace(block, path=f"blocks.{number}") for number in range(blocks)),
    )
    return ModelFacts(
        family=shape,
        parameters=each * blocks,
        trained=trained * blocks,
        frozen=FrozenStorage(bytes=frozen),
        buffers=0,
        largest=2**24,
        sample=sample,
        tensors=blocks,
        smaller=() if goal == "full" else (*smaller, rowwise),
    )


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


@pytest.fixture
def search(plugins):
    """search("middle", "lora", "12GB", "--option=1", ...) -> a search that leaves these options as they are."""

    def make(shape, goal, card, *set_here, host=64, batch=4):
        words = ["--model_family=toy", f"--model_type={goal}", "--mixed_precision=bf16", "--output_dir=out", *set_here]
        config = draft(schema_of(plugins), words, environment={})
        assert not config.problems
        run = replace(RunFacts.of(config, plugins, "cuda"), effective_batch=batch)
        return Search(
            config=config,
            plugins=plugins,
            model=model_of(shape, goal),
            run=run,
            device=card_of(card),
            world=WORLD,
            host=host * 2**30,
            fixed=frozenset(config.sources),
            is_complete=False,
        )

    return make


FREE = ("--max_grad_norm=0",)
"""Gradients may be released."""
FACTORED = (*FREE, "--optimizer=adafactor")
"""The optimizer keeps next to nothing, and does not work under DeepSpeed."""


CASES = [
    *((shape, goal, (), 256) for shape in SHAPES for goal in ("lora", "full")),
    *((shape, "full", words, 36) for shape in ("small", "middle") for words in (FREE, FACTORED)),
]
KEPT = [("small", "lora", (), 256), ("middle", "full", (), 256), ("small", "full", FREE, 36), ("middle", "full", FACTORED, 36)]


@pytest.mark.parametrize(("shape", "goal", "words", "host"), some(CASES, *KEPT))
def test_the_choice_is_the_best_of_all_ways(search, shape, goal, words, host):
    found = []
    for card in ("8GB", "12GB", "24GB", "80GB"):
        one = search(shape, goal, card, *words, host=host)
        best = exhaustive(one)
        if best is None and not any(fits(each, one.device, one.host) for each in one.ways(one.fixed)):
            with pytest.raises(UserError, match="no way to train fits on "):
                one.best()
            continue
        chosen = one.best()
        if best is None:
            assert chosen.fit.level == "tight"
            continue
        assert chosen.seconds == pytest.approx(best.seconds), (card, chosen.options, best.options)
        assert one.is_rounded(chosen) == is_rounded(best)
        assert fits(chosen, one.device, one.host)
        assert chosen.candidate.micro_batch * chosen.candidate.accumulation == 4
        found.append(chosen)
    assert len({str(each.options) for each in found}) > 1 or goal == "full", "what fits depends on the card"


def test_what_changes_no_number_is_chosen_before_what_rounds_weights(search):
    """The host holds what a save copies, and no optimizer beside it."""

    def added(card, *words, host):
        options = search("small", "full", card, *words, host=host, batch=1).best().options
        return {name for name in ("offload_activations", "release_gradients", "weights_dtype") if options.get(name)}

    assert added("80GB", *FREE, host=36) == set()
    assert added("48GB", *FREE, host=36) == {"release_gradients"}
    assert added("24GB", *FACTORED, host=12) == {"release_gradients"}
    assert added("16GB", *FACTORED, host=12) == {"release_gradients", "weights_dtype"}
    assert added("16GB", "--optimizer=adafactor", host=12) == {"weights_dtype"}, "which may fit"


def test_a_base_is_quantised_only_where_nothing_else_fits(search):
    exact = search("middle", "lora", "12GB", host=64).best()
    assert (exact.options["stream_base"], "base_model_precision" in exact.options) == (True, False)
    quantised = search("middle", "lora", "24GB", "--no_stream_base", "--no_fsdp_enable", host=4).best()
    assert quantised.options["base_model_precision"] == "int8-rowwise", "which restores least"


def test_more_memory_is_never_slower_and_never_more_than_there_is(search):
    seconds = []
    for gigabytes in range(8, 81, 8):
        one = search("middle", "lora", "24GB")
        one = replace(one, device=replace(one.device, memory=gigabytes * 10**9))
        chosen = one.best()
        assert chosen.counted.peak.total < one.device.memory
        seconds.append(chosen.seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("world", "name"), [(WORLD, "streamed"), (World(size=2, local_size=2, device="cuda"), "fsdp2-streamed")], ids=("one", "two")
)
def test_blocks_that_stay_on_the_device_take_its_memory_and_save_host_memory_and_time(search, world, name):
    one = replace(search("middle", "lora", "24GB"), world=world)
    [streamed] = (each for each in strategies_for(one.config, one.plugins, world) if each.name == name)
    ways = [
        estimate(
            one.model,
            one.run,
            replace(streamed, options={**streamed.options, "resident_gib": gib}),
            "full",
            1,
            one.device,
            world,
        )
        for gib in (0.0, 4.0, 8.0)
    ]
    device, host, seconds = zip(*((each.fit.most, each.fit.host, each.seconds) for each in ways), strict=True)
    assert (list(device), list(host), list(seconds)) == (
        sorted(device),
        sorted(host, reverse=True),
        sorted(seconds, reverse=True),
    )
    assert ways[1].counted.peak.total - ways[0].counted.peak.total == 4 * 2**30
    assert ways[0].fit.host - ways[1].fit.host == 4 * 2**30 * world.size, "all ranks of the node together"
    held = {each.device.gathered for each in ways[0].counted.phases.values()}
    assert (len(held) == 1) == (name == "streamed"), "what is streamed has its places at all times"
    chosen = [each for each in one.ways(one.fixed) if each.strategy.name == name]
    assert any(each.options["resident_gib"] > 0 and each.fit.level == "fits" for each in chosen), "as many blocks as fit"


def test_what_is_set_stays_and_the_message_says_what_bars_a_smaller_way(search):
    free = search("middle", "lora", "12GB").best()
    assert free.options["stream_base"] is True
    with pytest.raises(UserError) as raised:
        search("middle", "lora", "12GB", "--no_stream_base", "--no_fsdp_enable", "--base_model_precision=no_change").best()
    assert "no way to train fits on card of 12 GB" in raised.value.message
    assert "with what is set, the smallest needs up to " in raised.value.message
    assert raised.value.fix.startswith("--fit=")
    assert "; or leave out " in raised.value.fix
    assert "base_model_precision, fsdp_enable" in raised.value.fix.partition(": ")[0]


def test_restoring_frozen_weights_takes_time_so_that_they_lose_no_precision_for_nothing(search):
    one = search("middle", "lora", "80GB")
    [alone] = (each for each in strategies_for(one.config, one.plugins, WORLD) if each.name == "single")
    whole, *less = (
        estimate(replace(one.model, frozen=frozen), one.run, alone, "full", 1, one.device, WORLD)
        for frozen in (one.model.frozen, *one.model.smaller)
    )
    assert all(each.seconds > whole.seconds for each in less)
    assert whole.slowest.parts["restoring weights"] == 0


def test_a_micro_batch_must_fit_while_its_images_are_encoded(search):
    one = search("small", "lora", "8GB")
    chosen = one.best()
    several = replace(chosen, candidate=replace(chosen.candidate, micro_batch=4))
    assert (several.fit.level, fits(chosen, one.device, one.host)) == ("fits", True)
    assert not fits(several, one.device, one.host), "four images of a megapixel take 10 GiB"


def test_host_memory_is_a_limit_too(search):
    one = search("middle", "lora", "12GB", host=8)
    assert host_of(one.best()) <= 8 * 2**30
    with pytest.raises(UserError) as raised:
        search("middle", "full", "24GB", host=8).best()
    assert "--fit_host=" in raised.value.fix


def test_a_run_that_has_made_steps_keeps_the_precision_of_its_frozen_weights(search):
    one = search("middle", "lora", "24GB")
    kept = replace(one, kept={"base_model_precision": "nf4-torchao"}).best()
    assert kept.options["base_model_precision"] == "nf4-torchao"
    assert "base_model_precision" not in replace(one, kept={"base_model_precision": "no_change"}).best().options


def test_a_run_that_has_made_steps_keeps_the_type_of_its_weights(search):
    one = search("small", "full", "16GB", *FACTORED, host=12, batch=1)
    assert one.best().options["weights_dtype"] == "bf16"
    kept = replace(one, kept={"weights_dtype": "fp32"}).best()
    assert (kept.fit.level, "weights_dtype" in kept.options) == ("tight", False)


def test_a_way_to_save_memory_joins_the_strategies_that_it_is_added_to(search):
    one = search("middle", "lora", "12GB")
    way = Strategy(
        name="inputs",
        title="activations offloaded",
        options={"ema_device": "cpu"},  # stands for the option of a package
        recompute={"full": {}},
        bytes={},
        offloaded=frozenset(("activations",)),
        added_to=frozenset(("ddp", "memory")),
    )

    class More:
        """The plugins with one that proposes the way."""

        def gather(self, hook, **arguments):
            return [*one.plugins.gather(hook, **arguments), way]

    found = {each.name: each for each in strategies_for(one.config, More(), WORLD, combined=True)}
    assert {"single", "single-inputs", "streamed", "streamed-inputs"} <= found.keys()
    assert "fsdp2-offload-inputs" not in found
    both = found["streamed-inputs"]
    assert (both.offloaded, list(both.recompute)) == ({"frozen", "activations"}, ["full"])
    assert both.options["ema_device"] == "cpu"
    plain, added = (estimate(one.model, one.run, found[name], "full", 4, one.device, WORLD) for name in ("streamed", both.name))
    saved = 4 * 2**26 * (19 - 3)
    before, after = (each.counted.phases["forward"].device.total for each in (plain, added))
    assert before - after == saved
    assert added.fit.host - plain.fit.host == saved
    assert added.seconds > plain.seconds
