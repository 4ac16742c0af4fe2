"""What schedulers say of a job: lists of nodes, variables, times, and the state of a node."""

import os

import pytest
from hypothesis import given, strategies as st

from smalti_cluster.schedulers.environment import scheduled_nodes
from smalti_cluster.schedulers.hostlist import expand_hostlist
from smalti_cluster.schedulers.slurm import node_is_leaving, read_time, seconds_left

STEP = {
    "SLURM_JOB_ID": "3042",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[08,11]",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("gpu[008-010,101],x", ["gpu008", "gpu009", "gpu010", "gpu101", "x"]),
        ("r[1-2]n[8-9]-ib", ["r1n8-ib", "r1n9-ib", "r2n8-ib", "r2n9-ib"]),
        ("a[1],b-2,c[9-10]", ["a1", "b-2", "c9", "c10"]),
        ("", []),
    ],
)
def test_lists_of_nodes_are_expanded(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["node[1-2", "node1]", "n[[1]]", "n[a-b]", "n[]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(ValueError, match="is not a list"):
        expand_hostlist(text)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True))
def test_numbers_keep_their_leading_zeros_and_their_order(numbers):
    text = ",".join(f"{number:03}" for number in numbers)
    assert expand_hostlist(f"n[{text}]") == [f"n{number:03}" for number in numbers]


def values(environment) -> dict[str, str]:
    found = scheduled_nodes(environment)
    return {} if found is None else {name: value for name, (_, value) in found.values.items()}


def test_a_step_of_slurm_says_which_node_this_is():
    found = scheduled_nodes({**STEP, "SLURM_GPUS_ON_NODE": "4"})
    assert (found.scheduler, found.nodes, found.per_node) == ("SLURM job 3042", 2, ("SLURM_GPUS_ON_NODE", "4"))
    assert values(STEP) == {"num_machines": "2", "machine_rank": "1", "main_process_ip": "gpu08", "main_process_port": "29542"}


def test_a_batch_script_alone_is_not_a_node_of_several():
    assert scheduled_nodes({name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_NNODES": "2"}) is None


def test_several_tasks_on_a_node_are_not_taken_for_nodes():
    found = scheduled_nodes({**STEP, "SLURM_STEP_NUM_TASKS": "16"})
    assert (dict(found.values), "SLURM_STEP_NUM_TASKS is 16 on 2 nodes" in found.warning) == ({}, True)
    assert scheduled_nodes({**STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "1"}).warning == ""


@pytest.mark.parametrize(("text", "count"), [("a100:8", "8"), ("gpu:h100:4(S:0-1)", "4"), ("2", "2"), ("none", None)])
def test_gpus_of_a_node_may_be_written_with_their_type(text, count):
    found = scheduled_nodes({**STEP, "SLURM_GPUS_PER_NODE": text})
    assert found.per_node == (None if count is None else ("SLURM_GPUS_PER_NODE", count))


def test_a_pod_of_an_indexed_job_finds_node_0_behind_a_service_of_the_same_name():
    pod = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}
    assert values(pod) == {"machine_rank": "3", "main_process_ip": "train-0.train"}
    assert scheduled_nodes(pod).nodes is None
    named = {**pod, "NNODES": "4", "MASTER_ADDR": "train-0.svc", "MASTER_PORT": "1234", "NODE_RANK": "0"}
    assert values(named) == {
        "num_machines": "4",
        "machine_rank": "3",
        "main_process_ip": "train-0.svc",
        "main_process_port": "1234",
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            {"num_machines": "2", "machine_rank": "1", "main_process_ip": "h", "main_process_port": "1"},
        ),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}, {"num_machines": "2", "machine_rank": "0"}),
        (
            {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:7"},
            {"num_machines": "2", "machine_rank": "0", "main_process_ip": "h", "main_process_port": "7"},
        ),
        ({"NODE_RANK": "0", "NNODES": "1:4"}, {}),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, {}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}),
        ({}, {}),
    ],
)
def test_variables_as_torchrun_has_them(environment, expected):
    assert values(environment) == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("1-02:03:04", 93784.0), ("02:00:00", 7200.0), ("9:59", 599.0), ("UNLIMITED", None), ("", None)]
)
def test_times_of_slurm(text, seconds):
    assert read_time(text) == seconds


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """controller(scontrol="...", squeue="...") puts programs that print this before all others."""

    def answers(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answers


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("NodeName=n1 State=MIXED+DRAIN ThreadsPerCore=1 Reason=bad fan [root@2026-11-23T14:00:00]", "MIXED+DRAIN: bad fan"),
        ("NodeName=n1 State=ALLOCATED+FAIL Weight=1", "ALLOCATED+FAIL"),
        ("NodeName=n1 State=DRAINING* Weight=1", "DRAINING*"),
        ("NodeName=n1 State=ALLOCATED+PLANNED Reason=drained yesterday [root@x]", ""),
        ("NodeName=n1 State=MIXED", ""),
        ("slurm_load_node error: Unable to contact slurm controller", ""),
    ],
)
def test_a_node_that_drains_or_fails(controller, line, state):
    controller(scontrol=line)
    assert node_is_leaving({"SLURMD_NODENAME": "n1"}) == state


def test_the_time_left_is_asked_for_and_may_be_unknown(controller, monkeypatch):
    controller(squeue="1:30")
    assert (seconds_left({"SLURM_JOB_ID": "7"}), seconds_left({})) == (90.0, None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert (seconds_left({"SLURM_JOB_ID": "7"}), node_is_leaving({"SLURMD_NODENAME": "n1"})) == (None, "")
