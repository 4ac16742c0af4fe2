"""Strategies that plugins propose to the planner: their options select them, and their sizes add up."""

import pytest

from smalti import HookSpecs, World
from smalti.config import draft
from smalti.plugins import choose_distributed, load_plugins, plugin_problems, schema_of
from smalti_plan.choices import strategies_for

WORLDS = [
    World(size=1, device="cuda:0"),
    World(size=8, local_size=8, device="cuda:0"),
    World(size=16, local_size=8, device="cuda:0"),
    World(size=4, local_size=4, device="cpu"),
]


@pytest.fixture(scope="module")
def plugins():
    return load_plugins()


def configured(plugins, options, world):
    given = {"model_family": "toy", "output_dir": "out", "mixed_precision": "bf16", "max_train_steps": 1, **options}
    given |= {"num_processes": world.size, "num_machines": max(1, world.size // world.local_size)}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return draft(schema_of(plugins), [*flags, "--main_process_ip=127.0.0.1"])


def proposed(plugins, world):
    found = plugins.gather(HookSpecs.propose_strategies, config=configured(plugins, {}, world), world=world)
    return [each for each in found if not each.added_to]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_hook_propose_strategies_names_options_that_select_the_strategy(plugins, world):
    for strategy in proposed(plugins, world):
        for mode, recompute in strategy.recompute.items():
            config = configured(plugins, {**strategy.options, **recompute}, world)
            plan = choose_distributed(config, plugins)
            assert (plan.origin.plugin, config.problems) == (strategy.origin.plugin, ()), (strategy.name, mode)


@pytest.mark.parametrize("world", WORLDS[:2], ids=str)
@pytest.mark.parametrize("goal", ["lora", "full"])
def test_what_is_added_to_strategies_is_what_a_run_accepts(plugins, goal, world):
    own = {"model_type": goal, "max_grad_norm": 0, "train_batch_size": 1}
    found = strategies_for(configured(plugins, own, world), plugins, world, combined=True)
    added = [each for each in found if each.options.keys() & {"offload_activations", "release_gradients", "weights_dtype"}]
    combinations = {name.partition("-")[2] for name in (each.name for each in added) if name.startswith("single-")}
    if world.size == 1:
        both = {"released", "bf16", "bf16-released"} if goal == "full" else set()
        assert combinations == {"activations", *both, *(f"activations-{name}" for name in both)}
    own_problems = plugin_problems(configured(plugins, own, world), plugins)
    for strategy in added:
        for recompute in strategy.recompute.values() if not strategy.keeps_gradients else ():
            config = configured(plugins, {**own, **strategy.options, **recompute}, world)
            assert choose_distributed(config, plugins).origin.plugin == strategy.origin.plugin
            assert plugin_problems(config, plugins) == own_problems, strategy.name


@pytest.mark.parametrize("option", ["--max_grad_norm=1", "--optimizer=muon"])
def test_gradients_are_not_released_where_all_are_needed_at_once(plugins, option):
    words = ["--model_family=toy", "--model_type=full", "--max_grad_norm=0", "--mixed_precision=bf16", option]
    found = strategies_for(draft(schema_of(plugins), words), plugins, WORLDS[0], combined=True)
    assert any("activations" in each.name for each in found)
    assert not any("release_gradients" in each.options for each in found)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_strategy_divides_over_groups_of_ranks_that_exist(plugins, world):
    found = proposed(plugins, world)
    assert len({each.name for each in found}) == len(found) > 0
    for strategy in found:
        shares = {*strategy.divided.values(), strategy.frozen, *(each.ranks for each in strategy.communication)}
        assert all(world.size % share == 0 for share in shares), strategy.name
        assert all(each.between_nodes for each in strategy.communication if each.ranks > world.local_size), strategy.name
        assert bool(strategy.communication) == (world.size > 1), strategy.name


def test_more_sharding_takes_less_memory_and_sends_more(plugins):
    found = {each.name: each for each in proposed(plugins, WORLDS[1])}

    def held(name):
        strategy = found[name]
        return sum(count / strategy.divided.get(part, 1) for part, count in strategy.bytes.items())

    def sent(name):
        return sum(each.bytes_per_parameter for each in found[name].communication)

    assert held("fsdp2") < held("zero-3") + 4 < held("zero-2") + 4 < held("zero-1") + 4 < held("ddp") + 8
    assert sent("zero-1") == sent("zero-2") > sent("ddp"), "gradients as DDP does, and weights"


def test_gradients_travel_between_nodes_once_where_each_node_holds_a_copy(plugins):
    found = {each.name: each for each in proposed(plugins, WORLDS[2])}
    between = {
        name: [each.collective for each in found[name].communication if each.between_nodes] for name in ("hsdp-8", "fsdp2")
    }
    assert between == {"hsdp-8": ["all-reduce"], "fsdp2": ["all-gather", "reduce-scatter"]}


@pytest.mark.parametrize(
    ("options", "device", "names"),
    [
        ({}, "cuda:0", ["fsdp2-offload"]),
        ({"fsdp_enable": "true"}, "cuda:0", ["fsdp2", "fsdp2-offload"]),
        ({}, "cpu", []),
    ],
    ids=str,
)
def test_one_gpu_may_keep_in_host_memory_what_it_cannot_hold(plugins, options, device, names):
    world = World(size=1, device=device)
    found = plugins.gather(HookSpecs.propose_strategies, config=configured(plugins, options, world), world=world)
    assert [each.name for each in found if each.origin.plugin == "fsdp2"] == names


@pytest.mark.parametrize(
    ("world", "names"), [(WORLDS[1], ["fsdp2"]), (WORLDS[2], ["fsdp2", "hsdp-8"]), (WORLDS[3], [])], ids=str
)
def test_shards_of_a_frozen_base_may_be_in_host_memory(plugins, world, names):
    config = configured(plugins, {"model_type": "lora"}, world)
    found = plugins.gather(HookSpecs.propose_strategies, config=config, world=world)
    streamed = [each for each in found if each.origin.plugin == "fsdp2" and each.options.get("stream_base")]
    assert {each.name for each in streamed} == {f"{name}-streamed" for name in names}
    for strategy in streamed:
        accepted = configured(plugins, {"model_type": "lora", **strategy.options}, world)
        assert plugin_problems(accepted, plugins) == plugin_problems(config, plugins)
        assert choose_distributed(accepted, plugins).origin.plugin == "fsdp2"
