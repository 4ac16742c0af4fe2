"""The nodes of a launch: flags, then the Accelerate YAML, then the scheduler, then the configuration file."""

import pytest

from smalti.config import GROUPS, LaunchOptions, Schema, resolve
from smalti.errors import ConfigError
from smalti_cluster.options import GROUP

STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_GPUS_ON_NODE": "8",
}
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}
YAML = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"


@pytest.fixture
def nodes(write):
    """nodes(environment, "--flag", file="...", yaml="...") -> the configuration and (processes, nodes, rank, address, port)."""

    def resolved(environment, *flags: str, file: str = "", yaml: str = ""):
        user = f"--accelerate_config={write('user.yaml', YAML + yaml) if yaml else 'none'}"
        config = resolve(Schema((*GROUPS, GROUP)), (user, *flags), file=write("run.toml", file), environment=environment)
        launch = config[LaunchOptions]
        rank, main = launch.machine_rank, (launch.main_process_ip, launch.main_process_port)
        return config, (launch.num_processes, launch.num_machines, rank, *main)

    return resolved


def test_slurm_gives_what_nothing_else_gives(nodes):
    config, found = nodes(STEP)
    assert found == (16, 2, 1, "node08", 29542)
    assert config.source("machine_rank") == "scheduler (SLURM_NODEID of SLURM job 42)"
    assert config.notices == ("this is node 1 of 2, and node 0 is node08 (SLURM job 42)",)


def test_a_flag_wins_over_the_scheduler_and_the_scheduler_over_the_file(nodes):
    file = 'num_processes = 4\nnum_machines = 3\nmain_process_ip = "old"\nmain_process_port = 1\n'
    config, found = nodes(STEP, "--main_process_port=5000", file=file)
    assert found == (4, 2, 1, "node08", 5000)
    assert any("main_process_ip: 'node08' from SLURM_STEP_NODELIST" in notice for notice in config.notices)


def test_the_accelerate_yaml_wins_over_the_scheduler(nodes):
    _, found = nodes(STEP, yaml="num_machines: 2\nnum_processes: 4\nmain_process_ip: head\n")
    assert found == (4, 2, 1, "head", 29542)


def test_an_accelerate_yaml_for_one_node_does_not_say_which_of_several_this_is(nodes):
    yaml = "num_machines: 1\nnum_processes: 8\nmachine_rank: 0\nmain_process_ip: null\nmain_process_port: 1\n"
    assert nodes(STEP, "--num_machines=2", yaml=yaml)[1] == (8, 2, 1, "node08", 29542)


@pytest.mark.parametrize("how", ["flag", "yaml", "environment"])
def test_another_number_of_nodes_means_that_the_job_is_something_else(nodes, how):
    flags = ("--num_machines=1",) if how == "flag" else ()
    yaml = "num_machines: 1\n" if how == "yaml" else ""
    environment = {**STEP, **({"SMALTI_NUM_MACHINES": "1"} if how == "environment" else {})}
    config, found = nodes(environment, *flags, yaml=yaml)
    assert found[1:] == (1, 0, None, None)
    assert any("wins over 2 of SLURM job 42" in notice for notice in config.notices)


def test_one_node_is_left_as_it_is(nodes):
    config, found = nodes({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"})
    assert (found, config.notices) == ((1, 1, 0, None, None), ())


def test_a_pod_needs_the_number_of_nodes_from_elsewhere(nodes):
    assert nodes(POD)[1] == (1, 1, 0, None, None)
    assert nodes(POD, file="num_machines = 2\nnum_processes = 16\n")[1] == (16, 2, 1, "train-0.train", None)


def test_a_value_that_is_none_is_reported_with_its_variable(nodes):
    with pytest.raises(ConfigError, match="machine_rank cannot be 'x'") as raised:
        nodes({**STEP, "SLURM_NODEID": "x"})
    assert "SLURM_NODEID of SLURM job 42" in str(raised.value)
