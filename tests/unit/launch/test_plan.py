"""The launch plan: which launcher, which command, which environment, for any machine."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.run import config_from_args, parse_args

from smalti import hookimpl
from smalti.config.files import read_mapping
from smalti.config.resolution import restore
from smalti.errors import PreflightError, UserError
from smalti.launch.plan import LaunchPlan, check_accelerators, expected_kind, plan_launch, write_launch_files
from smalti.launch.worker import load_run
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.lookup import choose_distributed
from smalti.plugins.registry import PluginInfo
from smalti.rundir.directory import RunDirectory
from smalti.types import DistributedPlan

RUN = Path("/shared/a run")
DDP = DistributedPlan(name="ddp", title="DDP", parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)
FSDP = DistributedPlan(
    name="fsdp2",
    title="FSDP",
    parallel="elsewhere:Sharded",
    accelerate={"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
    environment={"SHARDS": "2"},
)


def plan(config, kind="cpu", distributed=DDP, environment=None) -> LaunchPlan:
    return plan_launch(config, distributed, RUN, kind, environment or {})


def elastic(found: LaunchPlan):
    """The launch as torch's launcher understands the command."""
    assert found.command[:3] == (sys.executable, "-m", "torch.distributed.run")
    arguments = parse_args(list(found.command[3:]))
    return config_from_args(arguments)[0], arguments


def test_one_rank_runs_in_this_process(configure):
    found = plan(configure(), distributed=FSDP)
    assert (found.launcher, found.command, found.environment, found.ranks) == ("in-process", (), {"SHARDS": "2"}, range(1))


def test_several_ranks_on_cpus_are_started_by_torchs_launcher(configure):
    found = plan(configure("--num_processes=3"))
    launch, arguments = elastic(found)
    assert (found.launcher, launch.nproc_per_node, launch.max_nodes) == ("elastic", 3, 1)
    assert (arguments.module, arguments.training_script, arguments.training_script_args) == (
        True,
        "smalti.launch.worker",
        [str(RUN)],
    )


def test_two_runs_on_one_machine_do_not_share_a_port(configure):
    launch, _ = elastic(plan(configure("--num_processes=3")))
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "127.0.0.1:0")


def test_ranks_of_one_machine_meet_on_the_loopback_unless_the_user_says_otherwise(configure):
    alone = configure("--num_processes=3")
    assert elastic(plan(alone))[0].local_addr == "127.0.0.1"
    interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for kind in ("cpu", "cuda"):
        assert plan(alone, kind).environment["GLOO_SOCKET_IFNAME"] == interface
        assert "GLOO_SOCKET_IFNAME" not in plan(alone, kind, environment={"GLOO_SOCKET_IFNAME": "eth7"}).environment


def test_cores_are_shared_out_over_the_ranks_of_a_machine_unless_the_user_says_so(configure, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    config = configure("--num_processes=8", "--num_machines=2", "--main_process_ip=h")
    assert plan(config).environment["OMP_NUM_THREADS"] == "3"
    assert plan(config, kind="cuda").environment["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plan(config, environment={"OMP_NUM_THREADS": "5"}).environment


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("named", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", None])
def test_segments_of_device_memory_can_grow_unless_the_user_says_anything_of_the_allocator(configure, ranks, named):
    said = {named: "max_split_size_mb:128"} if named else {}
    config, setting = configure(f"--num_processes={ranks}"), ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert (setting in plan(config, kind="cuda", environment=said).environment.items()) is (named is None)
    assert setting not in plan(config, kind="cpu").environment.items()


def test_segments_do_not_grow_where_cuda_cannot_map_them(configure, monkeypatch):
    monkeypatch.setattr("platform.release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert "PYTORCH_ALLOC_CONF" not in plan(configure(), kind="cuda").environment


def test_the_backends_environment_is_added(configure):
    assert plan(configure("--num_processes=2"), distributed=FSDP).environment["SHARDS"] == "2"


def test_a_kind_of_device_without_collectives_trains_in_one_process(configure):
    assert plan(configure(), kind="mps").launcher == "in-process"
    with pytest.raises(UserError, match="mps devices support only one process"):
        plan(configure("--num_processes=2"), kind="mps")


def test_the_fallback_is_chosen_when_nobody_else_claims_the_run(configure, plugins):
    assert choose_distributed(configure(), plugins).title == "single process"
    assert choose_distributed(configure("--num_processes=2"), plugins).title == "DDP"


class Claim:
    def __init__(self, name: str, title: str) -> None:
        self.plan = DistributedPlan(name=name, title=title, parallel="nowhere:at_all")

    @hookimpl
    def configure_distributed(self):
        return self.plan


def test_a_claim_beats_the_fallback(configure, plugins):
    plugins.register(PluginInfo(name="fsdp2", distribution="d", version="1"), Claim("fsdp2", "FSDP"))
    assert choose_distributed(configure("--num_processes=2"), plugins).title == "FSDP"


def test_two_claims_are_refused_in_the_words_that_users_know(configure, plugins):
    for name, title in (("deepspeed", "DeepSpeed"), ("fsdp2", "FSDP")):
        plugins.register(PluginInfo(name=name, distribution=name, version="1"), Claim(name, title))
    with pytest.raises(UserError) as raised:
        choose_distributed(configure(), plugins)
    assert (raised.value.message, raised.value.exit_code) == ("FSDP and DeepSpeed cannot be enabled simultaneously.", 2)


def test_the_files_of_a_launch_give_the_configuration_again(configure, plugins, schema, tmp_path):
    config = configure("--seed=5", "--num_processes=2", "--validation_prompt=a, b")
    directory = RunDirectory(tmp_path)
    write_launch_files(directory, config, plugins, plan(config))
    launch = json.loads(directory.launch_file.read_text())
    assert restore(schema, launch["values"], launch["user_accelerate"], {}).digest == launch["digest"] == config.digest
    assert configure(file=directory.config_file).digest == config.digest


def test_a_worker_refuses_what_another_launch_has_left_meanwhile(configure, tmp_path, monkeypatch):
    plugins = load_plugins(Selection(only=("toy", "trackers", "validation")))
    ours, theirs = (configure(f"--seed={seed}", "--plugins=toy,trackers,validation") for seed in (5, 6))
    directory = RunDirectory(tmp_path)
    monkeypatch.setenv("SMALTI_DIGEST", ours.digest)
    write_launch_files(directory, ours, plugins, plan(ours))
    assert load_run(tmp_path)[0].digest == ours.digest
    write_launch_files(directory, theirs, plugins, plan(theirs))
    with pytest.raises(UserError, match="has other options than this one"):
        load_run(tmp_path)


def test_each_machine_writes_the_same_values_and_its_own_accelerate_yaml(configure, plugins, tmp_path):
    directory, values = RunDirectory(tmp_path), []
    for machine in (0, 1):
        flags = ("--num_processes=4", "--num_machines=2", "--main_process_ip=h", f"--machine_rank={machine}")
        config = configure(*flags)
        write_launch_files(directory, config, plugins, plan_launch(config, DDP, directory.path, "cuda", {}))
        values.append(json.loads(directory.launch_file.read_text())["values"])
    assert values[0] == values[1]
    assert read_mapping(tmp_path / "accelerate.yaml")["machine_rank"] == 0
    assert read_mapping(tmp_path / "accelerate.node-1.yaml")["machine_rank"] == 1
    assert "machine_rank" not in read_mapping(directory.config_file)


def test_a_launch_for_accelerators_that_are_not_there_is_refused(configure, write):
    yaml = write("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\n")
    config = configure("--accelerate_config", str(yaml))
    assert expected_kind(config) == "cuda"
    with pytest.raises(PreflightError, match="says MULTI_GPU, but this node has no usable cuda device"):
        check_accelerators(config, "cpu")
    check_accelerators(configure("--accelerate_config", str(yaml), "--use_cpu"), "cpu")


def test_more_ranks_than_accelerators_are_refused(configure):
    present = torch.accelerator.device_count()
    with pytest.raises(PreflightError, match=f"cuda devices, but it has {present}"):
        check_accelerators(configure(f"--num_processes={present + 1}"), "cuda")
