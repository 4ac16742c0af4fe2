"""Which numbers of nodes a run can use, what a node does after an exit code, and when a node counts as lost."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from smalti import RunState, StepBoundary, StopReason
from smalti.config import LaunchOptions, TrainingOptions
from smalti.errors import ConfigError, ExitCode
from smalti.launch import Ended
from smalti.rundir import STOPPED_EARLY, RunDirectory, acquire
from smalti.system import FOLDER_VARIABLE
from smalti_cluster.elastic import group, waiting as waiting_nodes
from smalti_cluster.elastic.excluded import EXCLUDED, FaultLoopError, exclude, refuse_excluded
from smalti_cluster.elastic.group import Group
from smalti_cluster.elastic.growth import Growth
from smalti_cluster.elastic.messages import Generation, GroupEnd, Place, growth, read_group_end
from smalti_cluster.elastic.policy import decide, fault_of_node
from smalti_cluster.elastic.rendezvous import LOST_SECONDS, GroupMember, KeepAlives, _wait_until_formed
from smalti_cluster.elastic.sizes import possible_sizes
from smalti_cluster.elastic.waiting import SteadyNodes, WaitingNodes
from smalti_cluster.options import ClusterOptions, is_elastic, node_problems, node_range
from smalti_health import CircuitFault
from smalti_health.circuits import open_circuit

FAULT = CircuitFault(kind="ecc", time=1000.0, step=7, host=socket.gethostname(), rank=3, uuid="GPU-1", message="row 4")


@pytest.fixture
def sizes(configure, plugins):
    def of(nodes, **options):
        flags = {"nodes": nodes, "main_process_ip": "10.0.0.1", "model_family": "toy", "output_dir": "run", **options}
        flags |= {"instance_data_dir": "pictures", "max_train_steps": 1}
        return possible_sizes(configure(*(f"--{name}={value}" for name, value in flags.items())), plugins)

    return of


def test_accumulation_keeps_the_effective_batch_on_each_usable_number_of_nodes(sizes):
    found = sizes("2:6", num_processes=48, gradient_accumulation_steps=2, train_batch_size=1)  # 96 samples
    assert {
        nodes: (config[LaunchOptions].num_processes, config[TrainingOptions].gradient_accumulation_steps)
        for nodes, config in found.configs.items()
    } == {2: (16, 6), 3: (24, 4), 4: (32, 3), 6: (48, 2)}
    assert found.refused == {5: "the effective batch of 96 does not divide by 5 x 8 ranks x train_batch_size=1 = 40"}
    assert [found.usable(present) for present in (1, 2, 5, 6, 9)] == [None, 2, 4, 6, 6]
    assert found.notices() == [f"5 nodes cannot be used: {found.refused[5]}"]


def test_nodes_above_the_number_for_which_the_batch_is_computed_are_spares(sizes):
    found = sizes("3:5", num_machines=4, num_processes=8, train_batch_size=3, gradient_accumulation_steps=1)  # 24 samples
    assert (found.configs.keys(), found.usable(5)) == ({4}, 4)


def test_without_enough_usable_nodes_no_size_is_found(sizes):
    found = sizes("2:3", num_processes=3, train_batch_size=1, gradient_accumulation_steps=7)  # 21 samples
    assert found.refused == {2: "the effective batch of 21 does not divide by 2 x 1 ranks x train_batch_size=1 = 2"}
    assert (found.usable(2), found.usable(3)) == (None, 3)


@pytest.mark.parametrize("nodes", ["0", "3:2", "2:", "four", "2:3:4"])
def test_a_range_that_is_none_is_refused(configure, nodes):
    with pytest.raises(ConfigError, match="it must be a number of nodes, or MIN:MAX"):
        configure(f"--nodes={nodes}")


def test_options_of_the_range(configure):
    given = ("--nodes=2:4", "--nodes=3", "--num_machines=2", "--nodes=2:4 --num_machines=3", "")
    found = [configure(*flags.split()) for flags in given]
    assert [
        (one[LaunchOptions].num_machines, node_range(one), one[ClusterOptions].restarts, is_elastic(one)) for one in found
    ] == [
        (4, (2, 4), 3, True),
        (3, (3, 3), 0, False),
        (2, (2, 2), 0, False),
        (3, (2, 4), 3, True),
        (1, (1, 1), 0, False),
    ]


def test_a_group_that_was_stopped_to_grow_starts_again_unless_a_signal_came():
    message = growth(12, [1, 3])
    assert message == "the group of nodes grows at step 12: node 1, node 3 can take part"
    assert decide(ExitCode.STOPPED, message, faulty=False, alone=False) == "again"
    assert decide(ExitCode.PREEMPTED, message, faulty=False, alone=False) == "end"
    assert decide(ExitCode.STOPPED, "stopped on request at step 12 of 40", faulty=False, alone=False) == "end"


def test_a_node_waits_steadily_while_its_file_changes_again_and_again(tmp_path):
    now = 0.0
    steady = SteadyNodes(tmp_path, 10.0, lambda: now)

    def look(*changed):
        nonlocal now
        now += 5
        for rank in changed:
            (tmp_path / f"waiting-{rank}").write_text(f"{now}")
        return steady.look()

    (tmp_path / "waiting-2").write_text("of an earlier generation")
    assert [look(1), look(1), look(1), look(1)] == [[], [], [], [1]]
    assert [look(1), look(), look(), look()] == [[1], [1], [1], [1]]
    assert look() == []
    assert [look(1), look(1)] == [[], []], "it was away, and waits anew"


def test_a_group_grows_only_if_it_can_use_the_nodes_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("smalti_cluster.elastic.growth._LOOK_SECONDS", 0.02)
    monkeypatch.setattr("smalti_cluster.elastic.growth._STEADY_SECONDS", 0.0)
    monkeypatch.setattr("smalti_cluster.elastic.waiting._BEAT_SECONDS", 0.0)
    waiting = [WaitingNodes(tmp_path / "nodes"), WaitingNodes(tmp_path / "nodes")]
    place = Place(
        generation=replace(LAST, used=2), machine_rank=0, name="n", address="a", most=4, seconds=5, directory=f"{tmp_path}",
        begun=0.0, end="e", sizes=(2, 4), grow_after=1,
    )  # fmt: skip

    def asks(state, number, seconds):
        growth = Growth(place, 0)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and state.stop_reason is StopReason.NONE:
            for rank, each in enumerate(waiting[:number], 1):
                each.show(rank)
            growth.check(state, StepBoundary(warn=lambda *_: None))
            time.sleep(0.01)
        growth.close()
        return state.stop_reason, state.stop_message

    assert asks(RunState(max_steps=9, step=3), 1, 0.5) == (StopReason.NONE, "")
    expected = "the group of nodes grows at step 3: node 1, node 2 can take part"
    assert asks(RunState(max_steps=9, step=3), 2, 10) == (StopReason.REQUESTED, expected)
    assert asks(RunState(max_steps=3, step=3), 2, 0.5) == (StopReason.NONE, "")
    for changed, there in ((place, True), (replace(place, grow_after=None), False), (replace(place, sizes=(2,)), False)):
        monkeypatch.setenv(*next(iter(changed.variables().items())))
        growth = Growth.of_process()
        assert (growth is not None) is there
        if growth is not None:
            growth.close()


def test_growing_needs_a_range(configure):
    with pytest.raises(ConfigError, match="grow_after is for a range of nodes"):
        node_problems_of(configure("--nodes=3", "--main_process_ip=h", "--grow_after=30m"))
    node_problems_of(configure("--nodes=2:3", "--main_process_ip=h", "--grow_after=30m"))


def node_problems_of(config):
    if problems := node_problems(config):
        raise ConfigError(problems)


@pytest.mark.parametrize("code", [code for code in ExitCode if code not in (ExitCode.KILLED, ExitCode.GPU_FAULT)])
def test_only_losses_and_faults_start_a_group_again(code):
    assert {decide(code, faulty=faulty, alone=alone) for faulty in (True, False) for alone in (True, False)} == {"end"}


def test_the_node_with_the_fault_leaves_and_the_others_go_on():
    assert decide(ExitCode.GPU_FAULT, faulty=True, alone=False) == "leave"
    assert decide(ExitCode.GPU_FAULT, faulty=False, alone=False) == "again"
    assert decide(ExitCode.GPU_FAULT, faulty=True, alone=True) == "end"
    assert {decide(ExitCode.KILLED, faulty=False, alone=alone) for alone in (True, False)} == {"again"}


def test_a_fault_is_of_the_node_whose_rank_has_recorded_it_in_this_generation(tmp_path):
    open_circuit(tmp_path, 1, FAULT)
    assert fault_of_node(tmp_path, range(2, 4), since=999.0) == FAULT
    assert fault_of_node(tmp_path, range(2), since=999.0) is None
    assert fault_of_node(tmp_path, range(2, 4), since=1001.0) is None
    open_circuit(tmp_path, 1, replace(FAULT, rank=0, host="another"))
    assert fault_of_node(tmp_path, range(1), since=0.0) is None


def test_an_excluded_node_is_not_started_again_until_the_file_is_gone(tmp_path):
    refuse_excluded(tmp_path, 1)
    exclude(tmp_path, 1, FAULT)
    refuse_excluded(tmp_path, 2)
    with pytest.raises(FaultLoopError, match=r"node 1 .* ecc: row 4"):
        refuse_excluded(tmp_path, 1)
    (tmp_path / EXCLUDED).unlink()
    refuse_excluded(tmp_path, 1)


def test_a_node_is_lost_when_its_keep_alive_does_not_change_whatever_its_clock_says():
    now = 0.0
    alive = KeepAlives(lambda: now)
    skewed = 10**9
    assert alive.lost({"a": skewed, "b": 5}) == []
    now = LOST_SECONDS
    assert alive.lost({"a": skewed + 1, "b": 5}) == []
    now += 1
    assert alive.lost({"a": skewed + 1, "b": 5}) == ["b"]
    assert alive.lost({"a": skewed + 1, "b": 6}) == []


def test_what_launcher_and_agent_pass_on_arrives(tmp_path, monkeypatch):
    generation = Generation(
        number=2, attempt=1.5, host=1, address="::1", port=7, members=(1, 2, 3), used=2, checkpoints=("step-1",)
    )
    place = Place(
        generation=generation,
        machine_rank=2,
        name="n",
        address="a",
        most=4,
        seconds=5,
        directory="d",
        begun=time.time(),
        end="e",
        late=True,
        sizes=(2, 4),
        grow_after=60,
    )
    assert Place.of_process() is None
    monkeypatch.setenv(*next(iter(place.variables().items())))
    found = Place.of_process()
    assert (replace(found, generation=generation), found.generation.number) == (place, 2)
    end = GroupEnd(first_rank=4, count=2, decision="leave", again=(0, 1), lost=("node 3",), end=(1, "failed"))
    file = tmp_path / "end.json"
    assert read_group_end(file) is None
    end.write(str(file))
    assert (read_group_end(file), end.ranks) == (end, range(4, 6))


# --- the next generation ----------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(sizes, configure, tmp_path, monkeypatch):
    """Lets nodes of a group of four, whose host is gone, form the next generation. Each is a launch in a thread."""
    monkeypatch.setattr(waiting_nodes, "_COUNT_SECONDS", 3.0)
    flags = {"nodes": "1:4", "main_process_ip": "127.0.0.1", "output_dir": "run", "use_cpu": "true", "num_processes": 4}

    def of(machine_ranks, last):
        def form(machine_rank):
            config = configure(*(f"--{name}={value}" for name, value in {**flags, "machine_rank": machine_rank}.items()))
            directory = RunDirectory(tmp_path)
            own = Group(config, found, directory, lambda _: None, lambda: acquire(directory, config_digest="d", world_size=4))
            formed = own._next_of_host(last.attempt, last)
            return formed, own.writer

        found = sizes("1:4", num_processes=4, gradient_accumulation_steps=3, use_cpu="true")  # 12 samples
        with ThreadPoolExecutor(4) as pool:
            formed = list(pool.map(form, machine_ranks))
        [writer] = [each for _, each in formed if each is not None]
        writer.close()
        return [each for each, _ in formed]

    return of


LAST = Generation(number=1, attempt=1.0, host=0, address="127.0.0.1", port=1, members=(0, 1, 2, 3), used=4)


@pytest.mark.parametrize(
    ("there", "last", "message"),
    [
        ([1, 3], LAST, "node 0 was lost, and 1 node more"),
        ([1, 2, 3], LAST, "node 0 was lost"),
        ([2, 3], replace(LAST, handed_over=True, members=(2, 3)), "node 0 has left the group"),
    ],
)
def test_a_new_host_starts_with_the_nodes_that_wait_with_it(waiting, tmp_path, there, last, message):
    (tmp_path / "nodes" / "waiting-2").parent.mkdir()
    (tmp_path / "nodes" / "waiting-2").write_text("of an earlier generation")
    begun = time.monotonic()
    formed = waiting(there, last)
    assert {(each.number, each.members, each.used, each.host, each.message) for each in formed} == {
        (2, tuple(there), len(there), there[0], message)
    }
    assert message.endswith("more") or time.monotonic() - begun < 2.8, "nobody is missing, and it has waited"


def test_the_silence_of_a_host_is_counted_while_its_generation_runs(sizes, configure, tmp_path, monkeypatch):
    monkeypatch.setattr(group, "_BEAT_SECONDS", 0.0)
    directory, found = RunDirectory(tmp_path), sizes("1:4", num_processes=4, gradient_accumulation_steps=3)
    own = Group(configure("--nodes=1:4", "--main_process_ip=h"), found, directory, lambda _: None, lambda: None)
    asked = own._watch_host(LAST)
    asked()
    time.sleep(0.3)
    asked()
    assert directory.heartbeat_watch.silence >= 0.3


def test_joining_a_group_does_not_look_at_the_stack(monkeypatch, tmp_path):
    import torch.distributed.launcher.api as api
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

    handler, holder = dynamic.DynamicRendezvousHandler, dynamic._BackendRendezvousStateHolder
    for owner, names in (
        (api, ["launch_agent"]),
        (dynamic, ["get_method_name"]),
        (handler, ["next_rendezvous", "num_nodes_waiting", "shutdown"]),
        (holder, ["_sanitize"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    monkeypatch.setattr("inspect.stack", lambda *_: pytest.fail("the stack was read"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    GroupMember(None).install()
    dynamic.get_method_name()


def test_nodes_that_were_just_there_are_waited_for_as_long_as_it_takes_to_start(tmp_path, monkeypatch):
    from torch.distributed.launcher.api import LaunchConfig

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    def waits(number):
        place = Place(
            generation=replace(LAST, number=number), machine_rank=1, name="n", address="a", most=4, seconds=600, directory="d",
            begun=0.0, end="e",
        )  # fmt: skip
        found = GroupMember(place)._configured(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)).rdzv_configs
        return found["join_timeout"], found["read_timeout"]

    assert [waits(1), waits(2)] == [(600, 600), (60, 60)]


def test_a_node_that_is_no_member_leaves_the_places_to_the_members():
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def handler(is_host):
        to = {"backend": "c10d", "endpoint": f"127.0.0.1:{port}", "run_id": "r", "min_nodes": 1, "max_nodes": 1}
        parameters = RendezvousParameters(**to, local_addr="127.0.0.1", is_host=is_host)
        backend, store = create_backend(parameters)
        return create_handler(store, backend, parameters)

    member, other = handler(True), handler(False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_wait_until_formed, other)
        time.sleep(0.8)
        assert not waiting.done()
        member.next_rendezvous()
        waiting.result(timeout=20)
    assert [other._this_node in nodes for nodes in (other._state_holder.state.participants,)] == [False]
    member.shutdown()


@pytest.mark.parametrize(
    ("reason", "code"), [({}, ExitCode.STOPPED), ({"reason": "preempted"}, ExitCode.PREEMPTED)], ids=["asked", "signal"]
)
def test_a_stop_between_generations_ends_the_run_with_what_it_was_asked_for(sizes, configure, tmp_path, reason, code):
    directory, stopped = RunDirectory(tmp_path), threading.Event()
    found = sizes("1:4", num_processes=4, gradient_accumulation_steps=3)
    own = Group(configure("--nodes=1:4", "--main_process_ip=h"), found, directory, lambda _: None, lambda: None)
    with acquire(directory, config_digest="d", world_size=4, on_stop=stopped.set) as own.writer:
        directory.request("stop", **reason)
        assert stopped.wait(20)
        ended = Ended(code=ExitCode.STOPPED, message=STOPPED_EARLY, final=True)
        said = own._after(replace(LAST, number=2), ended, None, 0.0)
    assert said == (code, "stopped while the group of nodes was formed; saved checkpoints are intact")
