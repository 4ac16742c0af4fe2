"""The user's own Accelerate YAML: what it means here, what is refused, and what `accelerate launch` makes of ours."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from smalti.config.accelerate_yaml import KEYS
from smalti.errors import ConfigError, UserError
from smalti.launch.plan import LaunchPlan, plan_launch, yaml_text
from smalti.types import DistributedPlan
from support.dependencies import is_tested

DDP = DistributedPlan(name="ddp", title="DDP", parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)
FSDP = DistributedPlan(
    name="fsdp2",
    title="FSDP",
    parallel="elsewhere:Sharded",
    accelerate={"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
)
MINIMAL = "distributed_type: MULTI_GPU\nnum_processes: 8\n"


@pytest.fixture
def planned(configure, write, tmp_path):
    """planned(text or path, *flags) -> the plan for a machine with CUDA, from this Accelerate YAML."""

    def make(source: str | Path, *flags: str, distributed=DDP, kind="cuda") -> LaunchPlan:
        path = source if isinstance(source, Path) else write("user.yaml", source)
        config = configure("--accelerate_config", str(path), *flags)
        return plan_launch(config, distributed, tmp_path, kind, {})

    return make


def understood(plan: LaunchPlan):
    """The arguments of `accelerate launch`, once it has read the file that the plan writes."""
    assert plan.command[:3] == (sys.executable, "-m", "accelerate.commands.launch")
    assert plan.accelerate_file is not None
    plan.accelerate_file.write_text(yaml_text(plan.accelerate))
    assert isinstance(load_config_from_file(str(plan.accelerate_file)), ClusterConfig)
    return _validate_launch_command(launch_command_parser().parse_args(plan.command[3:]))[0]


def refused(configure, write, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        configure("--accelerate_config", str(write("user.yaml", text)), *flags)
    return str(raised.value)


# --- what is launched -----------------------------------------------------------------------------------------------


def test_four_machines_with_eight_devices_are_launched_as_the_file_says(planned, data, monkeypatch):
    for name in os.environ:
        if name.startswith("OMP_"):
            monkeypatch.delenv(name)
    plan = planned(data / "accelerate-4x8.yaml", "--machine_rank=2")
    arguments = understood(plan)
    assert (arguments.module, arguments.training_script) == (True, "smalti.launch.worker")
    assert arguments.training_script_args == [str(plan.accelerate_file.parent)]
    environment = prepare_multi_gpu_env(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("4", "8", 2)
    assert (arguments.rdzv_endpoint, arguments.multi_gpu) == ("10.0.0.100:8080", True)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan.ranks == range(16, 24)


def test_compiling_is_left_to_smalti(planned, data):
    arguments = understood(planned(data / "accelerate-4x8.yaml", "--machine_rank=1"))
    assert prepare_multi_gpu_env(arguments)["ACCELERATE_DYNAMO_BACKEND"] == "NO"


def test_a_plan_without_a_users_file_is_one_that_accelerate_understands(configure, tmp_path):
    plan = plan_launch(configure("--num_processes=4", "--accelerate_config=none"), DDP, tmp_path, "cuda", {})
    arguments = understood(plan)
    prepare_multi_gpu_env(arguments)
    assert (arguments.nproc_per_node, arguments.mixed_precision, arguments.main_process_port != 29500) == ("4", "bf16", True)


def test_keys_that_smalti_does_not_cover_survive(planned):
    text = MINIMAL + "debug: true\nmain_training_function: main\nsame_network: false\ntpu_env: []\n"
    merged = planned(text).accelerate
    assert {key: merged[key] for key in yaml.safe_load(text)} == yaml.safe_load(text)


def test_keys_that_accelerate_refuses_are_left_out_with_a_notice(planned):
    plan = planned(MINIMAL + "invalid_key: {a: 1}\n")
    understood(plan)
    assert "invalid_key" not in plan.accelerate


def test_the_users_file_is_not_touched(planned, write):
    path = write("mine.yaml", MINIMAL)
    planned(path, "--num_processes=4")
    assert path.read_text() == MINIMAL


def test_a_backends_section_is_merged_into_the_users(planned, monkeypatch):
    text = "distributed_type: MULTI_GPU\nnum_processes: 8\ndynamo_config: {}\n"
    plan = planned(text, distributed=dataclasses.replace(FSDP, accelerate={**FSDP.accelerate, "debug": True}))
    arguments = understood(plan)
    assert (arguments.use_fsdp, arguments.fsdp_version, arguments.debug) == (True, 2, True)
    assert plan.notices == ("distributed_type: 'FSDP' is launched, the Accelerate YAML says 'MULTI_GPU'",)


def test_rendezvous_and_affinity_reach_accelerate_although_it_ignores_them_in_its_file(planned):
    plan = planned(MINIMAL + "rdzv_backend: c10d\nenable_cpu_affinity: true\n")
    arguments = understood(plan)
    assert (arguments.rdzv_backend, arguments.enable_cpu_affinity) == ("c10d", True)
    assert prepare_multi_gpu_env(arguments)["ACCELERATE_CPU_AFFINITY"] == "1"


def test_chosen_devices_are_the_visible_ones(planned):
    arguments = understood(planned(MINIMAL + "gpu_ids: 4,5\n", "--num_processes=2"))
    assert prepare_multi_gpu_env(arguments)["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_one_chosen_device_is_the_visible_one_for_a_single_rank(planned):
    plan = planned("distributed_type: 'NO'\nnum_processes: 1\ngpu_ids: '3'\n")
    command, environment = prepare_simple_launcher_cmd_env(understood(plan))
    assert (plan.launcher, environment["CUDA_VISIBLE_DEVICES"]) == ("accelerate", "3")
    assert command[1:3] == ["-m", "smalti.launch.worker"]


def test_fewer_chosen_devices_than_ranks_are_refused(planned):
    with pytest.raises(UserError, match=r"gpu_ids in the Accelerate YAML lists 2 devices \(4,5\) for 8 processes"):
        planned(MINIMAL + "gpu_ids: 4,5\n")


@pytest.mark.parametrize(("kind", "name"), [("cuda", "MULTI_GPU"), ("xpu", "MULTI_XPU"), ("npu", "MULTI_NPU")])
def test_each_kind_of_device_has_its_type(planned, kind, name):
    assert planned(MINIMAL, kind=kind).accelerate["distributed_type"] == name


def test_on_cpus_the_users_file_still_says_how_many_ranks(planned):
    plan = planned("distributed_type: MULTI_CPU\nnum_processes: 3\n", kind="cpu")
    assert (plan.launcher, plan.ranks, plan.accelerate) == ("elastic", range(3), {})


# --- what it means --------------------------------------------------------------------------------------------------


def test_a_flag_beats_the_file_and_the_difference_is_told(configure, write):
    path = write("user.yaml", MINIMAL + "mixed_precision: bf16\n")
    config = configure("--accelerate_config", str(path), "--num_processes=2", "--mixed_precision=no")
    assert set(config.notices) == {
        f"num_processes: '2' from --num_processes wins over 8 from num_processes in {path}",
        f"mixed_precision: 'no' from --mixed_precision wins over 'bf16' from mixed_precision in {path}",
    }


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("mixed_precision: no", "mixed_precision", "no"),
        ("mixed_precision: 'no'", "mixed_precision", "no"),
        ("num_processes: -1", "num_processes", 1),
        ("main_process_port: 0", "main_process_port", None),
        ("main_process_port: null", "main_process_port", None),
        ("dynamo_config: {dynamo_backend: 'NO', dynamo_mode: default}", "dynamo_backend", None),
        ("dynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_backend", "inductor"),
        ("dynamo_backend: INDUCTOR", "dynamo_backend", "inductor"),
        ("dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: reduce-overhead}", "dynamo_mode", "reduce-overhead"),
        ("use_cpu: true", "use_cpu", True),
    ],
)
def test_what_accelerate_writes_is_understood(configure, write, line, name, value):
    path = write("user.yaml", f"distributed_type: 'NO'\n{line}\n")
    assert configure("--accelerate_config", str(path)).value(name) == value


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("mixed_precision: fp16", ": cannot be 'fp16'"),
        ("fp16: true", ": cannot be 'fp16'"),
        ("mixed_precision: fp8", ": cannot be 'fp8'"),
        ("compute_environment: AMAZON_SAGEMAKER", "smalti does not launch on AMAZON_SAGEMAKER"),
        ("tpu_use_cluster: true", "smalti does not train on TPUs"),
        ("num_proceses: 3", "unknown key num_proceses\n    fix: did you mean num_processes?"),
        ("num_processes: 0", ": cannot be 0"),
        ("num_processes: many", ": cannot be 'many'"),
        ("parallelism_config: {parallelism_config_cp_size: 2}", "parallelism_config needs smalti-fsdp2"),
    ],
)
def test_what_cannot_be_done_is_refused(configure, write, line, told):
    assert told in refused(configure, write, f"distributed_type: 'NO'\n{line}\n")


@pytest.mark.parametrize(("kind", "told"), [("XLA", "TPUs"), ("MEGATRON_LM", "Megatron-LM")])
def test_other_strategies_are_refused(configure, write, kind, told):
    assert f"smalti does not train on {told}" in refused(configure, write, f"distributed_type: {kind}\n")


@pytest.mark.parametrize(("kind", "package"), [("FSDP", "smalti-fsdp2"), ("DEEPSPEED", "smalti-deepspeed")])
def test_a_strategy_of_a_plugin_that_is_not_installed_names_its_package(configure, write, kind, package):
    assert f"{kind} needs {package}" in refused(configure, write, f"distributed_type: {kind}\n")


def test_a_file_that_is_no_accelerate_configuration_is_refused(configure, write):
    assert "this is not an Accelerate configuration" in refused(configure, write, "num_processes: 2\n")


def test_an_accelerate_yaml_can_be_the_configuration_itself_but_not_twice(configure, write):
    path = write("user.yaml", MINIMAL)
    assert configure(file=path).value("num_processes") == 8
    with pytest.raises(ConfigError, match="is an Accelerate YAML already"):
        configure("--accelerate_config", str(path), file=path)


def test_what_has_no_effect_is_told(configure, write):
    text = "distributed_type: 'NO'\ndynamo_config: {dynamo_use_dynamic: true}\nmpirun_config: {a: 1}\ndowncast_bf16: 'yes'\n"
    text += "mixed_precision: bf16\n"
    notices = configure("--accelerate_config", str(write("user.yaml", text))).notices
    assert [notice.partition(" in ")[0] for notice in notices] == ["dynamo_use_dynamic", "mpirun_config", "downcast_bf16"]


# --- where it lies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HOME": "{home}/huggingface"},
        {"XDG_CACHE_HOME": "{home}"},
        {"ACCELERATE_CONFIG_PATH": "{home}/huggingface/accelerate/default_config.yaml"},
    ],
)
def test_the_users_default_file_is_found_where_accelerate_keeps_it(configure, tmp_path, environment):
    path = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(MINIMAL)
    given = {name: value.format(home=tmp_path) for name, value in environment.items()}
    assert configure(environment=given).value("num_processes") == 8
    assert configure("--accelerate_config=none", environment=given).value("num_processes") == 1


@pytest.mark.skipif(not is_tested("accelerate"), reason="another Accelerate has other keys")
def test_the_keys_are_those_that_accelerate_knows():
    known = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert known <= KEYS
    assert KEYS - known == {"fp16", "dynamo_backend", "ipex_config"}
