"""A user's Accelerate YAML with FSDP in it: what it means here, what is launched with it, and what Accelerate reads in that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING, ARGUMENT_VALUE_MAPPING, convert_config_to_fsdp2
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from hypothesis import given, settings, strategies as st
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy

import smalti_fsdp2
from smalti import Config, ConfigError, UserError
from smalti.config.resolution import resolve, restore
from smalti.errors import PreflightError
from smalti.launch.plan import LaunchPlan, check_accelerators, expected_kind, plan_launch, yaml_text
from smalti.plugins.discovery import BUILT_IN, Selection, load_plugins
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.schema import check, schema_of
from smalti_fsdp2.accelerate_export import fragment
from smalti_fsdp2.accelerate_import import KEYS, PARALLELISM_KEYS, STRATEGIES
from smalti_fsdp2.options import FsdpOptions, enabled
from support.dependencies import is_tested

DATA = Path(__file__).parents[3] / "tests" / "data"
PLUGINS = load_plugins(Selection(only=("fsdp2",)))
SCHEMA = schema_of(PLUGINS)
START = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
PARSER = launch_command_parser()


@pytest.fixture
def read(tmp_path):
    """read(text, path or mapping, *flags) -> the Config of this Accelerate YAML and these flags."""

    def resolved(source: str | Path | dict, *flags: str) -> Config:
        path = source if isinstance(source, Path) else tmp_path / "user.yaml"
        if not isinstance(source, Path):
            path.write_text(source if isinstance(source, str) else yaml.safe_dump(source))
        return resolve(SCHEMA, ("--accelerate_config", str(path), *flags), environment={})

    return resolved


def fsdp(line: str, version: str = "fsdp_version: 2, ") -> str:
    return f"{START}fsdp_config: {{{version}{line}}}\n"


def planned(config: Config, directory: Path, kind: str = "cuda") -> LaunchPlan:
    check(config, PLUGINS, without=BUILT_IN)
    return plan_launch(config, choose_distributed(config, PLUGINS), directory, kind, {})


def understood(plan: LaunchPlan):
    """The arguments and the environment that `accelerate launch` gets out of the file that the plan writes."""
    plan.accelerate_file.write_text(yaml_text(plan.accelerate))
    arguments = _validate_launch_command(PARSER.parse_args(plan.command[3:]))[0]
    return arguments, prepare_multi_gpu_env(arguments)


def in_environment(environment: dict[str, str], build):
    """What `build` makes on a rank with these variables. Accelerate sets some itself, which are taken back."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_"))]:
            patch.delenv(name)
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
        for name, value in environment.items():
            if name.startswith(("FSDP_", "PARALLELISM_")):
                patch.setenv(name, value)
        return build()


def plugin_of(options: FsdpOptions) -> FullyShardedDataParallelPlugin:
    return in_environment({}, lambda: smalti_fsdp2.accelerate_plugin(options))


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not is_tested("accelerate"), reason="another Accelerate has other keys")
def test_the_tables_hold_every_key_and_word_that_accelerate_knows():
    flags = {action.dest for action in PARSER._actions}
    assert {name for name in flags if name.startswith("fsdp_")} | set(ARGUMENT_KEY_MAPPING) == KEYS - {
        "fsdp_limit_all_gathers",  # in its plugin only
        "fsdp_ignored_modules",  # in its files only
    }
    assert {name for name in flags if name.startswith("parallelism_config_")} == PARALLELISM_KEYS
    assert ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"] == STRATEGIES
    assert [each.name.removeprefix("_") for each in ShardingStrategy] == list(STRATEGIES)


def test_a_file_of_version_2_means_what_it_says(read):
    config = read(DATA / "accelerate-fsdp-hybrid.yaml")
    assert {name: config.value(name) for name in config.sources if name.startswith(("fsdp", "context"))} == {
        "fsdp_enable": True,
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_min_num_params": 50_000_000,
        "fsdp_cpu_offload": False,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_shard_size": 4,
        "context_parallel_size": 2,
        "context_parallel_comm_strategy": "alltoall",
    }
    assert config.notices == ()


def test_a_file_of_version_1_stays_with_it(read):
    config = read(DATA / "accelerate-fsdp1.yaml")
    options = config[FsdpOptions]
    assert (options.fsdp_version, options.fsdp_reshard_after_forward) == (1, False)
    assert options.fsdp_state_dict_type == "FULL_STATE_DICT"
    assert options.fsdp_transformer_layer_cls_to_wrap == ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    assert config.notices == ()


def test_a_file_from_before_there_were_versions_runs_on_version_2_with_a_notice(read):
    path = DATA / "accelerate-fsdp-early.yaml"
    config = read(path)
    assert (config.value("fsdp_version"), config.value("fsdp_cpu_offload")) == (2, True)
    assert config.source("fsdp_cpu_offload") == f"Accelerate YAML (fsdp_config.offload_params in {path})"
    assert [notice.partition(",")[0] for notice in config.notices] == [f"fsdp_config in {path} has no fsdp_version"]


@pytest.mark.parametrize("name", ["accelerate-fsdp1.yaml", "accelerate-fsdp-early.yaml"])
def test_what_accelerate_converts_to_version_2_means_the_same(read, name):
    before = read(DATA / name)
    after = read(convert_config_to_fsdp2(yaml.safe_load((DATA / name).read_text())))
    values = [{**config.values(), "accelerate_config": None, "fsdp_version": None} for config in (before, after)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("fsdp_reshard_after_forward: 'False'", "fsdp_reshard_after_forward", False),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", "fsdp_reshard_after_forward", False),
        ("fsdp_reshard_after_forward: full_shard", "fsdp_reshard_after_forward", True),
        ("fsdp_sharding_strategy: 2", "fsdp_reshard_after_forward", False),
        ("fsdp_sharding_strategy: '1'", "fsdp_reshard_after_forward", True),
        ("sharding_strategy: HYBRID_SHARD_ZERO2", "fsdp_reshard_after_forward", False),
        ("fsdp_state_dict_type: 1", "fsdp_state_dict_type", "FULL_STATE_DICT"),
        ("fsdp_state_dict_type: '3'", "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ("fsdp_state_dict_type: full_state_dict", "fsdp_state_dict_type", "FULL_STATE_DICT"),
        ("fsdp_offload_params: 'true'", "fsdp_cpu_offload", True),
        ("offload_params: true", "fsdp_cpu_offload", True),
        ("fsdp_forward_prefetch: 'false'", "fsdp_forward_prefetch", 0),
        ("fsdp_forward_prefetch: true", "fsdp_forward_prefetch", 1),
        ("fsdp_backward_prefetch: NO_PREFETCH", "fsdp_backward_prefetch", 0),
        ("fsdp_backward_prefetch: 1", "fsdp_backward_prefetch", 1),
        ("fsdp_backward_prefetch: 2", "fsdp_backward_prefetch", 0),
        ("backward_prefetch_policy: BACKWARD_PRE", "fsdp_backward_prefetch", 1),
        ("fsdp_transformer_layer_cls_to_wrap: 'A, B'", "fsdp_transformer_layer_cls_to_wrap", ("A", "B")),
        ("transformer_layer_cls_to_wrap: A", "fsdp_transformer_layer_cls_to_wrap", ("A",)),
        ("fsdp_transformer_layer_cls_to_wrap: null", "fsdp_transformer_layer_cls_to_wrap", ()),
        ("fsdp_auto_wrap_policy: no_wrap", "fsdp_auto_wrap_policy", "NO_WRAP"),
        ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 0", "fsdp_auto_wrap_policy", "NO_WRAP"),
        ("min_num_params: '2000'", "fsdp_min_num_params", 2000),
        ("fsdp_limit_all_gathers: false", "fsdp_limit_all_gathers", False),
    ],
)
def test_every_spelling_of_accelerate_is_understood(read, line, name, value):
    assert read(fsdp(line)).value(name) == value


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fsdp_use_orig_params: false", "fsdp_config.fsdp_use_orig_params in {} has no effect: parameters always stay"),
        ("fsdp_sync_module_states: 'no'", "fsdp_config.fsdp_sync_module_states in {} has no effect: every rank starts"),
        (
            "fsdp_activation_checkpointing_offload: true",
            "fsdp_config.fsdp_activation_checkpointing_offload in {} has no effect without fsdp_activation_checkpointing",
        ),
        (
            "activation_checkpointing: true, activation_checkpointing_offload: 'yes'",
            "fsdp_config.activation_checkpointing_offload in {} has no effect: offload_activations needs smalti-memory",
        ),
        ("fsdp_ignored_modules: 'norm.*'", "fsdp_config.fsdp_ignored_modules in {} has no effect: every module is sharded"),
        ("fsdp_backward_prefetch: BACKWARD_POST", "fsdp_config.fsdp_backward_prefetch in {} has no counterpart"),
        ("fsdp_sharding_strategy: NO_SHARD", "fsdp_config.fsdp_sharding_strategy in {} means that gathered parameters"),
        ("brand_new: 3", "fsdp_config.brand_new in {} has no effect: Accelerate has no such key"),
        (
            "fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false",
            "fsdp_config.fsdp_sharding_strategy in {} has no effect: fsdp_config.fsdp_reshard_after_forward counts",
        ),
    ],
)
def test_what_has_no_effect_is_told(read, tmp_path, line, told):
    [notice] = read(fsdp(line)).notices
    assert notice.startswith(told.format(tmp_path / "user.yaml"))


def test_activations_that_accelerate_would_keep_in_host_memory_are_kept_there(tmp_path):
    plugins = load_plugins(Selection(only=("fsdp2", "activations")))
    file, recomputing = tmp_path / "user.yaml", "fsdp_activation_checkpointing: true"
    for line, flags, value in (
        (f"{recomputing}, fsdp_activation_checkpointing_offload: 'true'", (), True),
        (f"{recomputing}, fsdp_activation_checkpointing_offload: true", ("--no_offload_activations",), False),
        (recomputing, (), False),
    ):
        file.write_text(fsdp(line))
        config = resolve(schema_of(plugins), ("--accelerate_config", str(file), *flags), environment={})
        assert config.value("offload_activations") is value
        assert not [notice for notice in config.notices if "has no effect" in notice]
        written = fragment(config)["fsdp_config"].get("fsdp_activation_checkpointing_offload")
        assert written == (None if line == recomputing else value)


def test_what_asks_for_nothing_else_than_what_happens_needs_no_notice(read):
    line = "fsdp_use_orig_params: true, fsdp_sync_module_states: 'true', fsdp_activation_checkpointing_offload: false"
    assert read(fsdp(line)).notices == ()


def test_in_version_1_the_strategy_goes_before_the_switch_as_in_accelerate(read):
    line = "fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_reshard_after_forward: FULL_SHARD"
    assert read(fsdp(line, "fsdp_version: 1, ")).value("fsdp_reshard_after_forward") is False
    assert read(fsdp(line)).value("fsdp_reshard_after_forward") is True


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (fsdp("fsdp_reshard_after_foward: true"), "fsdp_reshard_after_foward in {}: unknown key"),
        (fsdp("fsdp_reshard_after_foward: true"), "did you mean fsdp_reshard_after_forward?"),
        (fsdp("fsdp_shard_size: 4"), "fix: --fsdp_shard_size=..., or fsdp_shard_size in the configuration file"),
        (fsdp("fsdp_sharding_strategy: SOME_SHARD"), "fsdp_sharding_strategy in {}: cannot be 'SOME_SHARD'"),
        (fsdp("fsdp_sharding_strategy: 6"), "one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"),
        (fsdp("fsdp_reshard_after_forward: 7"), "fsdp_reshard_after_forward cannot be 7"),
        (fsdp("fsdp_backward_prefetch: 3"), "fsdp_backward_prefetch in {}: cannot be 3"),
        (fsdp("fsdp_state_dict_type: 2"), "fsdp_state_dict_type cannot be 'LOCAL_STATE_DICT'"),
        (fsdp("fsdp_auto_wrap_policy: EVERY_WRAP"), "fsdp_auto_wrap_policy cannot be 'EVERY_WRAP'"),
        (fsdp("fsdp_version: 3", ""), "fsdp_version cannot be 3"),
        (fsdp("fsdp_offload_params: maybe"), "fsdp_cpu_offload cannot be 'maybe'"),
        (START + "fsdp_config: [1]\n", "fsdp_config is a list, not a table"),
        (START + "parallelism_config: {parallelism_config_tp_size: 2}\n", "smalti has no tensor parallelism"),
        (START + "parallelism_config: {parallelism_config_sp_size: 2}\n", "smalti has no sequence parallelism of DeepSpeed"),
        (START + "parallelism_config: {cp_size: 2}\n", "did you mean parallelism_config_cp_size?"),
        (START + "parallelism_config: {parallelism_config_cp_size: some}\n", "context_parallel_size cannot be 'some'"),
        (START + "parallelism_config: {parallelism_config_dp_shard_size: all}\n", "dp_shard_size in {}: cannot be 'all'"),
        (START + "parallelism_config: {parallelism_config_cp_backend: other}\n", "cp_backend in {}: cannot be 'other'"),
        (
            START + "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_dp_replicate_size: 2}\n",
            "2 replicas x 2 shards x 1 context are not num_processes=8",
        ),
    ],
)
def test_what_cannot_be_is_refused(read, tmp_path, text, told):
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert told.format(tmp_path / "user.yaml") in str(raised.value)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("fsdp_version: 2", 32),
        ("fsdp_version: 2, fsdp_reshard_after_forward: SHARD_GRAD_OP", 32),
        ("fsdp_version: 1, fsdp_sharding_strategy: HYBRID_SHARD", None),
        ("fsdp_version: 1, fsdp_reshard_after_forward: 5", None),
    ],
)
def test_over_machines_a_copy_is_shared_as_widely_as_the_file_says(read, line, size):
    text = f"distributed_type: FSDP\nnum_processes: 32\nnum_machines: 4\nmain_process_ip: a\nfsdp_config: {{{line}}}\n"
    assert read(text).value("fsdp_shard_size") == size


def test_context_ranks_count_among_those_that_share_a_copy(read, tmp_path):
    text = START + "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 4}\n"
    assert read(text).value("fsdp_shard_size") is None  # all eight, as if nothing were said
    assert read(text + "num_machines: 2\n", "--main_process_ip=a").value("fsdp_shard_size") == 8


def test_context_parallelism_in_a_file_switches_fsdp_on_for_the_workers_too(read):
    config = read("distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config: {parallelism_config_cp_size: 2}\n")
    worker = restore(SCHEMA, config.shared_values(), config.accelerate, environment={})
    assert (enabled(config), enabled(worker)) == (True, True)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([*STRATEGIES, "BACKWARD_POST", "FULL_STATE_DICT", "true", "no", "", "A,B", "a.b", "SIZE_BASED_WRAP"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.integers(), st.booleans(), max_size=1),
)
NAMES = sorted({*KEYS, *(name.removeprefix("fsdp_") for name in KEYS)})


@settings(max_examples=200, deadline=None)
@given(
    fsdp_config=st.dictionaries(st.sampled_from(NAMES) | st.integers(), VALUES, max_size=5),
    parallelism_config=st.dictionaries(st.sampled_from(sorted(PARALLELISM_KEYS)), VALUES, max_size=4),
    several=st.sampled_from([{}, {"num_machines": 2, "main_process_ip": "a"}, {"num_processes": -1}]),
)
def test_whatever_stands_in_a_file_is_an_option_or_a_complaint(fsdp_config, parallelism_config, several, tmp_path_factory):
    values = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": fsdp_config, **several}
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump({**values, "parallelism_config": parallelism_config}))
    try:
        plan = planned(resolve(SCHEMA, ("--accelerate_config", str(path)), environment={}), path.parent)
    except UserError:
        return
    if plan.accelerate:
        again = resolve(SCHEMA, ("--accelerate_config", str(path)), environment={})
        path.write_text(yaml_text(plan.accelerate))
        launched = resolve(SCHEMA, ("--accelerate_config", str(path)), environment={})
        for name in ("fsdp_reshard_after_forward", "fsdp_cpu_offload", "fsdp_state_dict_type", "context_parallel_size"):
            assert launched.value(name) == again.value(name)


# --- launching ------------------------------------------------------------------------------------------------------


def test_flags_switch_fsdp_on_in_a_file_for_plain_data_parallelism(read, tmp_path):
    text = "distributed_type: MULTI_GPU\nnum_processes: 8\nfsdp_config: {future_key: 3}\ndebug: true\n"
    plan = planned(read(text, "--fsdp_enable", "--fsdp_cpu_offload"), tmp_path)
    arguments, environment = understood(plan)
    assert (arguments.use_fsdp, arguments.multi_gpu, arguments.debug) == (True, False, True)
    assert (environment["FSDP_VERSION"], environment["FSDP_OFFLOAD_PARAMS"]) == ("2", "true")
    assert plan.accelerate["fsdp_config"]["future_key"] == 3
    assert plan.notices == ("distributed_type: 'FSDP' is launched, the Accelerate YAML says 'MULTI_GPU'",)


def test_flags_switch_fsdp_off_in_a_file_that_has_it(read, tmp_path):
    config = read(DATA / "accelerate-fsdp-hybrid.yaml", "--no_fsdp_enable", "--context_parallel_size=1")
    plan = planned(config, tmp_path)
    arguments, environment = understood(plan)
    assert (arguments.use_fsdp, arguments.multi_gpu, arguments.use_parallelism_config) == (False, True, False)
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"} & environment.keys()
    assert plan.distributed.title == "DDP"
    assert plan.notices == ("distributed_type: 'MULTI_GPU' is launched, the Accelerate YAML says 'FSDP'",)
    assert any(notice.startswith("fsdp_enable: 'false' from --no_fsdp_enable wins over") for notice in config.notices)


def test_older_spellings_do_not_contradict_what_is_launched(read, tmp_path):
    plan = planned(read(DATA / "accelerate-fsdp-early.yaml", "--no_fsdp_cpu_offload"), tmp_path)
    assert understood(plan)[1]["FSDP_OFFLOAD_PARAMS"] == "false"
    assert {"offload_params", "fsdp_sharding_strategy", "fsdp_backward_prefetch_policy"}.isdisjoint(
        plan.accelerate["fsdp_config"]
    )


def test_keys_of_version_1_without_counterpart_stay_in_its_file(read, tmp_path):
    text = fsdp("fsdp_use_orig_params: false, fsdp_sync_module_states: true, fsdp_ignored_modules: x", "fsdp_version: 1, ")
    section = planned(read(text), tmp_path).accelerate["fsdp_config"]
    assert [section[f"fsdp_{name}"] for name in ("use_orig_params", "sync_module_states", "ignored_modules")] == [
        False,
        True,
        "x",
    ]


def test_loading_on_one_rank_reaches_accelerate_although_the_file_says_not_to_synchronise(read, tmp_path):
    text = fsdp("fsdp_sync_module_states: false", "fsdp_version: 1, ")
    environment = understood(planned(read(text, "--fsdp_cpu_ram_efficient_loading"), tmp_path))[1]
    assert (environment["FSDP_CPU_RAM_EFFICIENT_LOADING"], environment["FSDP_SYNC_MODULE_STATES"]) == ("true", "true")


def test_how_ranks_are_split_reaches_accelerate(read, tmp_path):
    config = read(START, "--context_parallel_size=2", "--context_parallel_comm_strategy=alltoall", "--fsdp_shard_size=4")
    plan = planned(config, tmp_path)
    parallelism = in_environment(understood(plan)[1], ParallelismConfig)
    assert (parallelism.dp_replicate_size, parallelism.dp_shard_size, parallelism.cp_size) == (2, 2, 2)
    assert (parallelism.total_size, parallelism.cp_handler.cp_comm_strategy) == (8, "alltoall")


def test_on_cpus_there_is_no_accelerate_launcher(read, tmp_path):
    plan = planned(read(START), tmp_path, kind="cpu")
    assert (plan.launcher, plan.distributed.title, plan.accelerate) == ("elastic", "FSDP", {})


def test_a_file_for_fsdp_does_not_train_on_cpus_unasked(read):
    config = read(START)
    assert expected_kind(config) == "cuda"
    with pytest.raises(PreflightError, match="the Accelerate YAML says FSDP, but this node has no usable cuda device"):
        check_accelerators(config, "cpu")
    check_accelerators(read(START, "--use_cpu"), "cpu")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n", ["--fsdp_enable"]),
        ("distributed_type: DEEPSPEED\n", ["--fsdp_enable", "--fsdp_version=1"]),
        (START, ["--deepspeed_config=zero2.json"]),
        (START + "deepspeed_config: {zero_stage: 2}\n", []),
    ],
)
def test_fsdp_and_deepspeed_exclude_each_other_also_where_the_plugin_of_deepspeed_is_missing(read, text, flags):
    with pytest.raises(ConfigError) as raised:
        read(text, *flags)
    assert "FSDP and DeepSpeed cannot be enabled simultaneously." in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_file_for_deepspeed_without_fsdp_only_names_the_package(read):
    with pytest.raises(ConfigError) as raised:
        read("distributed_type: DEEPSPEED\n", "--no_fsdp_enable")
    assert "simultaneously" not in str(raised.value)


# --- Accelerate's own plugin ----------------------------------------------------------------------------------------


def test_the_plugin_of_version_2_has_what_the_options_say():
    options = FsdpOptions(
        fsdp_reshard_after_forward=False,
        fsdp_state_dict_type="full",
        fsdp_cpu_offload=True,
        fsdp_transformer_layer_cls_to_wrap="A,B",
        fsdp_limit_all_gathers=False,
        fsdp_activation_checkpointing=True,
        fsdp_cpu_ram_efficient_loading=True,
    )
    plugin = plugin_of(options)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.limit_all_gathers) == (2, False, False)
    assert (plugin.state_dict_type, plugin.cpu_offload) == (StateDictType.FULL_STATE_DICT, CPUOffloadPolicy())
    assert (plugin.transformer_cls_names_to_wrap, plugin.activation_checkpointing) == (["A", "B"], True)
    assert (plugin.cpu_ram_efficient_loading, plugin.mixed_precision_policy) == (True, None)


def test_the_plugin_of_version_1_has_strategies_for_switches():
    plugin = plugin_of(FsdpOptions(fsdp_version=1, fsdp_reshard_after_forward=False, fsdp_backward_prefetch=0))
    assert (plugin.sharding_strategy, plugin.backward_prefetch) == (ShardingStrategy.SHARD_GRAD_OP, None)
    assert (plugin.forward_prefetch, plugin.use_orig_params) == (True, True)
    hybrid = plugin_of(FsdpOptions(fsdp_version=1, fsdp_shard_size=4))
    assert hybrid.sharding_strategy is ShardingStrategy.HYBRID_SHARD


def test_precisions_that_are_given_reach_the_plugin():
    policy = plugin_of(FsdpOptions(fsdp_param_dtype="bf16", fsdp_output_dtype="fp32")).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    policy = plugin_of(FsdpOptions(fsdp_version=1, fsdp_reduce_dtype="bf16")).mixed_precision_policy
    assert policy == MixedPrecision(param_dtype=None, reduce_dtype=torch.bfloat16)


def test_a_callable_policy_is_for_version_1_because_accelerate_wraps_nothing_with_it_in_version_2():
    options = FsdpOptions(fsdp_version=1, fsdp_auto_wrap_policy="torch.is_tensor")
    assert isinstance(plugin_of(options).auto_wrap_policy, CustomPolicy)
    with pytest.raises(UserError, match=r"FSDP 2 takes no callable such as torch\.is_tensor"):
        plugin_of(FsdpOptions(fsdp_auto_wrap_policy="torch.is_tensor"))


def test_neither_the_package_nor_reading_a_file_imports_torch():
    code = (
        "import sys, smalti_fsdp2, smalti_fsdp2.plugin\nfrom smalti.cli.entry import main\n"
        "try:\n    main(['config', 'export-accelerate', sys.argv[1]])\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "assert not {'torch', 'accelerate'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(DATA / "accelerate-fsdp-hybrid.yaml")], capture_output=True)
    assert done.returncode == 0, done.stderr


OPTIONS = st.fixed_dictionaries(
    {
        "fsdp_version": st.sampled_from([1, 2]),
        "fsdp_reshard_after_forward": st.booleans(),
        "fsdp_state_dict_type": st.sampled_from(["sharded", "full"]),
        "fsdp_cpu_ram_efficient_loading": st.booleans(),
        "fsdp_auto_wrap_policy": st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]),
        "fsdp_transformer_layer_cls_to_wrap": st.sampled_from(["", "A", "A,B"]),
        "fsdp_min_num_params": st.integers(1, 10**9),
        "fsdp_cpu_offload": st.booleans(),
        "fsdp_activation_checkpointing": st.booleans(),
        "fsdp_forward_prefetch": st.integers(0, 1),
        "fsdp_backward_prefetch": st.integers(0, 1),
        "fsdp_shard_size": st.sampled_from([None, 2, 4]),
        "context_parallel_size": st.sampled_from([1, 2]),
    }
)


@settings(max_examples=40, deadline=None)
@given(values=OPTIONS)
def test_the_ranks_of_accelerate_see_the_plugin_that_the_options_make_and_the_file_gives_the_options_again(
    values, tmp_path_factory
):
    if values["fsdp_version"] == 1:  # there is no context parallelism, and loading on one rank takes an accelerator
        values |= {"context_parallel_size": 1, "fsdp_cpu_ram_efficient_loading": False}
    else:  # Accelerate has no prefetch
        values |= {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 1}
    flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
    flags += ["--fsdp_enable", "--num_processes=8", "--accelerate_config=none", "--mixed_precision=bf16"]
    config = resolve(SCHEMA, flags, environment={})
    directory = tmp_path_factory.mktemp("plan")
    plan = planned(config, directory)
    there = in_environment(understood(plan)[1], FullyShardedDataParallelPlugin)
    assert there == plugin_of(config[FsdpOptions])

    again = resolve(SCHEMA, ["--accelerate_config", str(plan.accelerate_file)], environment={})
    lost = {"accelerate_config"}
    lost |= {"fsdp_min_num_params"} if values["fsdp_auto_wrap_policy"] != "SIZE_BASED_WRAP" else set()
    lost |= {"fsdp_shard_size"} if values["fsdp_version"] == 1 else set()
    assert {**again.values(), **dict.fromkeys(lost)} == {**config.values(), **dict.fromkeys(lost)}
