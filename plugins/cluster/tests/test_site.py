"""A launch on several nodes, before ranks start: what is refused, and how the ranks of a node are started."""

import socket
import sys
import threading

import pytest
from PIL import Image
from torch.distributed.run import config_from_args, parse_args

from smalti.config import TrainingOptions
from smalti.config.resolution import resolve
from smalti.errors import ConfigError, PreflightError
from smalti.launch.checks import launch_entry
from smalti.launch.plan import LaunchPlan
from smalti.launch.preflight import Preparation
from smalti.parallel.devices import native_bf16
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir.directory import RunDirectory
from smalti.rundir.writer import acquire
from smalti.types import DistributedPlan
from smalti_cluster.site import NodesSite, check_port

DDP = DistributedPlan(name="ddp", title="DDP", parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)


@pytest.fixture
def plan(plugins, tmp_path):
    def planned(config, kind="cpu", environment=None) -> LaunchPlan:
        directory = RunDirectory(tmp_path / "a run")
        site = NodesSite(
            config=config, plugins=plugins, directory=directory, kind=kind, environment=environment or {}, write=True
        )
        return site.plan(config, DDP)

    return planned


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def elastic(found: LaunchPlan):
    """The launch as torch's launcher understands the command."""
    assert found.command[:3] == (sys.executable, "-m", "torch.distributed.run")
    arguments = parse_args(list(found.command[3:]))
    return config_from_args(arguments)[0], arguments


@pytest.fixture
def wanted(configure, tmp_path):
    """wanted("--flag", ...) -> a configuration that could train, but for what the flags spoil."""
    (tmp_path / "pictures").mkdir(exist_ok=True)
    flags = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path / 'pictures'}", "--use_cpu")
    return lambda *more: configure(*flags, f"--output_dir={tmp_path / 'run'}", *more)


def test_a_machine_that_waits_in_vain_for_the_first_one_says_so(wanted, plugins, tmp_path):
    flags = ("--num_processes=2", "--num_machines=2", "--machine_rank=1", "--main_process_ip=h", "--rendezvous_timeout=1")
    with pytest.raises(PreflightError, match=r"node 0 did not create the run directory .* within 1 s"):
        Preparation.of(wanted(*flags), plugins, write=True)
    assert not (tmp_path / "run").exists()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("nodes-")] == []


def test_a_wrong_address_of_node_0_is_found_before_the_others_wait_for_it(wanted, plugins, tmp_path):
    flags = ("--num_processes=2", "--num_machines=2", "--machine_rank=1", "--main_process_ip=localhost")
    with pytest.raises(PreflightError, match="the loopback, which no other node reaches"):
        Preparation.of(wanted(*flags), plugins, write=True)
    assert not (tmp_path / "run").exists()


def test_num_processes_counts_the_ranks_of_all_machines(configure, plan):
    flags = ("--num_processes=8", "--num_machines=4", "--machine_rank=2", "--main_process_ip=10.0.0.1")
    found = plan(configure(*flags))
    launch, arguments = elastic(found)
    assert (launch.nproc_per_node, launch.min_nodes, launch.max_nodes) == (2, 4, 4)
    assert (arguments.node_rank, launch.rdzv_endpoint) == (2, "10.0.0.1:29500")
    assert found.ranks == range(4, 6)


def test_one_rank_on_each_of_two_machines_is_launched_too(configure, plan):
    found = plan(configure("--num_processes=2", "--num_machines=2", "--main_process_ip=10.0.0.1"))
    assert elastic(found)[0].nproc_per_node == 1


def test_machines_that_join_take_what_the_first_one_has_chosen(wanted, plugins, tmp_path, monkeypatch):
    """On a processor that oneDNN may use up to AVX2 only, so that bf16 is emulated."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    native_bf16.cache_clear()
    flags = ("--num_processes=2", "--num_machines=2", "--main_process_ip=127.0.0.1", "--resolution=16")
    flags = (*flags, "--caption_strategy=filename", f"--main_process_port={free_port()}")
    config = wanted(*flags)
    Image.new("RGB", (16, 16)).save(tmp_path / "pictures/a.png")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "pictures/b.png")
    first = Preparation.of(config, plugins, write=True)
    assert first.directory.record().mixed_precision == "no"
    first.site.close()
    first.site.writer.close()
    with acquire(first.directory, mixed_precision="bf16") as writer:  # as on a machine that has bf16 instructions
        writer.phases.enter("launching")
        joined = Preparation.of(wanted(*flags, "--machine_rank=1"), plugins, write=True)
        joined.site.close()
    assert joined.config[TrainingOptions].mixed_precision == "bf16"
    native_bf16.cache_clear()


def test_nodes_do_not_meet_on_the_loopback(configure, plan):
    config = configure("--num_processes=4", "--num_machines=2", "--main_process_ip=h")
    assert elastic(plan(config))[0].local_addr is None
    for kind in ("cpu", "cuda"):
        assert "GLOO_SOCKET_IFNAME" not in plan(config, kind).environment
        assert plan(config, kind).variables["SMALTI_AGENT_EXTENSION"] == "smalti_cluster.agent:extend"


def test_a_port_that_is_taken_is_found_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} of this node cannot be used"):
            check_port(port)


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ((), False),
        (("--time_limit=1h",), False),
        (("--num_machines=2", "--num_processes=2", "--main_process_ip=h"), True),
        (("--max_restarts=1", "--num_processes=2"), True),
        (("--nodes=1:2", "--num_processes=2", "--main_process_ip=h"), True),
    ],
)
def test_hook_configure_launch_answers_for_several_nodes_and_restarts(configure, plugins, flags, given):
    entry = launch_entry(configure(*flags), plugins, {})
    assert (entry is not None and entry.origin.plugin == "cluster") is given


def test_tasks_that_are_no_nodes_are_not_refused(configure, plugins):
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}
    config = configure(environment={**step, "SLURM_STEP_NUM_TASKS": "16"})
    assert "nothing is taken from SLURM" in config.notices[0]
    assert launch_entry(config, plugins, step) is None


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("--num_machines=2", "--num_processes=2", "--main_process_ip=h"), {}, "num_machines=2: a run on several nodes needs"),
        (("--machine_rank=1",), {}, "machine_rank=1: a run on several nodes needs smalti-cluster"),
        ((), {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}, "SLURM_STEP_NUM_NODES=2 in the environment"),
        ((), {"NODE_RANK": "1", "NNODES": "2"}, "NNODES=2 in the environment"),
        ((), {"JOB_COMPLETION_INDEX": "1", "NNODES": "4"}, "NNODES=4 in the environment"),
        (("--num_machines=1",), {"NODE_RANK": "1", "NNODES": "2"}, None),
        ((), {"SLURM_NODEID": "0", "SLURM_NNODES": "2"}, None),  # a batch script, which is no step
        ((), {"NODE_RANK": "0", "NNODES": "1"}, None),
    ],
)
def test_without_the_package_several_nodes_are_refused_with_what_to_install(flags, environment, message):
    plugins = load_plugins(Selection(only=("toy",)))
    config = resolve(schema_of(plugins), flags, environment={})
    if message is None:
        assert launch_entry(config, plugins, environment) is None
        return
    with pytest.raises(ConfigError, match=message) as refused:
        launch_entry(config, plugins, environment)
    assert refused.value.problems[0].package == "smalti-cluster"
