"""Strategies that plugins propose to the planner: their options select them, and their sizes add up."""

import pytest

from smalti import HookSpecs, World
from smalti.config import draft
from smalti.plugins import choose_distributed, load_plugins, schema_of

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
    config = configured(plugins, {}, world)
    return plugins.gather(HookSpecs.propose_strategies, config=config, world=world)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_hook_propose_strategies_names_options_that_select_the_strategy(plugins, world):
    for strategy in proposed(plugins, world):
        for mode, recompute in strategy.recompute.items():
            config = configured(plugins, {**strategy.options, **recompute}, world)
            plan = choose_distributed(config, plugins)
            assert (plan.origin.plugin, config.problems) == (strategy.origin.plugin, ()), (strategy.name, mode)


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
