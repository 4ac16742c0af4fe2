"""D10: what becomes of a run over two nodes when something happens to one of them, scenario by scenario, as a table."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from smalti.checkpoint import CheckpointStore, verify
from smalti.rundir import read_events
from support.nodes import Cluster, forbidden
from support.nodes.runs import Run
from support.processes import commands

from ..phases import images
from ..subject import Report

TIMEOUT = 10
"""Seconds, of collective calls."""
PLUGIN = """
import os, time
import smalti

class Busy:
    @smalti.hookimpl
    def on_step_end(self, state, result):
        if os.environ.get("RANK") == "0" and state.step == 5:
            time.sleep(float(os.environ["BUSY_SECONDS"]))

plugin = Busy()
"""
Code = int | None


@dataclass
class Scene:
    """One scenario: its nodes, and what was seen."""

    cluster: Cluster
    place: Path
    report: Report = field(default_factory=Report)
    codes: tuple[Code, ...] = ()
    seconds: tuple[float | None, ...] = ()
    remark: str = ""
    run: Run | None = None
    _hurt: float = 0.0

    @property
    def directory(self) -> Path:
        return self.place / "run"

    def start(self, step: int = 5, **options: object) -> Run:
        """A run over both nodes that has made these steps."""
        values: dict[str, object] = {"process_group_timeout": TIMEOUT, **options}
        self.run = Run(self.cluster, self.directory, **values)
        if step:
            self.run.wait_for_step(step)
        self.hurt()
        return self.run

    def hurt(self) -> None:
        """The seconds count from now."""
        self._hurt = time.monotonic()

    def wait(self, limit: float = 120, *, run: Run | None = None) -> str:
        """Until all nodes have ended, or this number of seconds. Returns what they printed."""
        run = run or self.run
        assert run is not None
        ended: dict[int, float] = {}
        while len(ended) < len(run.processes) and time.monotonic() - self._hurt < limit:
            for number, each in enumerate(run.processes):
                if number not in ended and each.poll() is not None:
                    ended[number] = time.monotonic() - self._hurt
            time.sleep(0.02)
        self.codes = tuple(each.poll() for each in run.processes)
        self.seconds = tuple(ended.get(number) for number in range(len(run.processes)))
        return "\n".join(run.outputs())

    def expect(
        self,
        *codes: Code,
        within: float | None = None,
        says: str | tuple[str, ...] = (),
        lost: tuple[int, ...] = (),
        saved: bool = False,
    ) -> None:
        """Exit codes by node; the longest time; what is printed, and which nodes are called lost; an intact checkpoint."""
        assert self.run is not None
        printed = "\n".join(self.run.outputs())
        self.report.expect(self.codes == codes, f"exit codes {self.codes}, not {codes}: {printed[-1500:]}")
        known = [each for each in self.seconds if each is not None]
        if within is not None and known:
            self.report.expect(max(known) <= within, f"{max(known):.1f} s, not {within}")
        for part in (says,) if isinstance(says, str) else says:
            self.report.expect(part in printed, f"nobody says {part!r}: {printed[-1500:]}")
        for node in lost:
            named = re.search(rf"ended with exit code 9: .*(on node{node}\b|node {node} )", printed)
            self.report.expect(named is not None, f"nobody says that node {node} is lost: {printed[-1500:]}")
        if saved:
            entries = CheckpointStore(self.directory / "checkpoints").all()
            ok = bool(entries) and verify(entries[-1].path).ok
            self.report.expect(ok, f"the newest checkpoint is not intact: {entries[-1:]}")
            self.remark = f"saved step {entries[-1].step}" if ok else "nothing saved"


def only(cluster: Cluster, node: int, module: str) -> list[psutil.Process]:
    """The processes of a node that run this module of smalti."""
    return [each for each, words in commands(cluster.processes(node)) if f"smalti.{module}" in words[1:4]]


def link_cut(scene: Scene) -> None:
    scene.start()
    scene.cluster.cut(1)
    scene.wait()
    scene.expect(9, 9, lost=(1, 0), saved=True)


def link_cut_sharded(scene: Scene) -> None:
    run = scene.start(checkpoint_step_interval=3, fsdp_enable="true")
    while not CheckpointStore(scene.directory / "checkpoints").all():
        run.wait_for_step(run.step + 1)
    scene.hurt()
    scene.cluster.cut(1)
    scene.wait()
    scene.expect(9, 9, lost=(1, 0), saved=True)


def link_cut_by_default(scene: Scene) -> None:
    """With the time-outs that a run has if none is given."""
    scene.start(process_group_timeout=None)
    scene.cluster.cut(1)
    scene.wait()
    scene.expect(9, 9, within=60, lost=(1, 0), saved=True)


def node_killed_by_default(scene: Scene) -> None:
    scene.start(process_group_timeout=None)
    scene.cluster.cut(1)
    scene.cluster.kill(1)
    scene.wait()
    scene.expect(9, -9, within=60, lost=(1,), saved=True)


def link_away_for_4_s(scene: Scene) -> None:
    run = scene.start(process_group_timeout=20)
    scene.cluster.cut(1)
    time.sleep(4)
    scene.cluster.heal(1)
    run.wait_for_step(run.step + 20)
    run.processes[0].send_signal(signal.SIGTERM)
    scene.wait()
    scene.expect(6, 6, saved=True)


def slow_link(scene: Scene) -> None:
    run = scene.start()
    scene.cluster.slow(1, mbit=8)
    run.wait_for_step(run.step + 5)
    run.processes[0].send_signal(signal.SIGTERM)
    scene.wait()
    scene.expect(6, 6, saved=True)


def node_1_killed(scene: Scene) -> None:
    scene.start()
    scene.cluster.kill(1)
    scene.wait()
    scene.expect(9, -9, lost=(1,), saved=True)


def node_0_killed(scene: Scene) -> None:
    scene.start()
    scene.cluster.kill(0)
    scene.wait()
    scene.expect(-9, 9, lost=(0,), saved=True)


def power_cut_of_node_1(scene: Scene) -> None:
    scene.start()
    scene.cluster.cut(1)
    scene.cluster.kill(1)
    scene.wait()
    scene.expect(9, -9, lost=(1,), saved=True)


def power_cut_of_node_0(scene: Scene) -> None:
    scene.start()
    scene.cluster.cut(0)
    scene.cluster.kill(0)
    scene.wait()
    scene.expect(-9, 9, lost=(0,), saved=True)


def worker_killed(scene: Scene) -> None:
    scene.start()
    only(scene.cluster, 1, "launch.worker")[0].kill()
    scene.wait()
    scene.expect(9, 9, says="was killed by SIGKILL", saved=True)


def agent_killed(scene: Scene) -> None:
    scene.start()
    only(scene.cluster, 1, "launch.agent")[0].kill()
    scene.wait()
    scene.report.expect(all(code in (6, 9) for code in scene.codes), f"exit codes {scene.codes}")
    scene.expect(*scene.codes, within=60, saved=True)


def node_stopped(scene: Scene) -> None:
    scene.start(12, process_group_timeout=60, phase_deadlines=["training=4", "first_step=60"], on_hang="stop")
    scene.cluster.pause(1)
    scene.wait(100)
    scene.expect(9, None, says="the run hangs", lost=(1,), saved=True)
    assert scene.run is not None
    reports = list((scene.directory / "hangs").glob("*"))
    found = any("trainer.py" in path.read_text(errors="replace") for path in reports)
    scene.report.expect(found, f"no stacks in {reports}")
    scene.cluster.resume(1)


def sigterm_to_smalti(scene: Scene) -> None:
    run = scene.start()
    run.processes[1].send_signal(signal.SIGTERM)
    scene.wait()
    scene.expect(6, 6, within=15, saved=True)


def sigterm_to_the_node(scene: Scene) -> None:
    scene.start()
    scene.cluster.signal(1, signal.SIGTERM)
    scene.wait()
    scene.expect(6, 6, within=15, saved=True)


def complete_and_resumed(scene: Scene) -> None:
    for steps in (12, 18):
        scene.start(0, max_train_steps=steps)
        scene.wait()
        scene.expect(0, 0, saved=True)


def other_learning_rate(scene: Scene) -> None:
    scene.start(0, own={1: {"learning_rate": 0.002}})
    scene.wait()
    scene.expect(2, 2, within=30, says=("learning_rate", "on node 1"))


def other_number_of_processes(scene: Scene) -> None:
    scene.start(0, own={1: {"num_processes": 2}})
    scene.wait()
    scene.expect(2, 2, within=30, says=("num_processes", "on node 1"))


def node_1_never_comes(scene: Scene) -> None:
    scene.run = Run(scene.cluster, scene.directory, own={}, rendezvous_timeout=8)
    scene.cluster.kill(1)
    scene.hurt()
    scene.wait(60)
    scene.expect(3, -9, says="node 1 did not start within 8 s")


def wrong_port(scene: Scene) -> None:
    scene.start(0, rendezvous_timeout=10, own={1: {"main_process_port": 29999}})
    scene.wait(100)
    scene.report.expect(None not in scene.codes and 0 not in scene.codes, f"exit codes {scene.codes}")
    scene.expect(*scene.codes, within=60, says="main_process_port")


def two_nodes_0(scene: Scene) -> None:
    """The second one ends at once; the first one goes on waiting."""
    run = scene.start(0, rendezvous_timeout=15, own={1: {"machine_rank": 0}})
    code = run.processes[1].wait(12)
    scene.report.expect(code == 2, f"the second node 0 ends with {code}: {run.outputs()[1]}")
    scene.wait(100)
    taken = "--machine_rank=0 is taken by node0"
    scene.expect(3, 2, says=(taken, "node1, process", "node 1 did not start within 15 s; node1"))


def directory_not_shared(scene: Scene) -> None:
    scene.directory.mkdir()
    scene.cluster.private(1, scene.directory)
    scene.start(0, rendezvous_timeout=10)
    scene.wait(60)
    scene.expect(3, 3, within=40, says="--output_dir")


def directory_older_on_node_1(scene: Scene) -> None:
    import shutil

    scene.start(0, max_train_steps=6)
    scene.wait()
    copy = scene.place / "older"
    shutil.copytree(scene.directory, copy)
    scene.start(0, max_train_steps=9)
    scene.wait()
    other = scene.cluster.private(1, scene.directory)
    shutil.copytree(copy, other, dirs_exist_ok=True)
    scene.start(0, max_train_steps=12, rendezvous_timeout=10)
    scene.wait(60)
    scene.report.expect(None not in scene.codes and 0 not in scene.codes, f"exit codes {scene.codes}")
    scene.expect(*scene.codes, within=40, says="output_dir")


def clock_ahead(scene: Scene) -> None:
    scene.start(0, max_train_steps=12, clocks={1: 600})
    scene.wait()
    scene.expect(0, 0, saved=True)


def clock_takeover(scene: Scene) -> None:
    """The clock of the node that starts a second run in the same directory is ahead: the first one keeps it."""
    first = scene.start(nodes=(0,))
    second = Run(scene.cluster, scene.directory, nodes=(1,), clocks={1: 600})
    scene.hurt()
    scene.wait(60, run=second)
    taken, after = scene.codes, scene.seconds
    scene.report.expect(taken == (75,), f"the second run: {taken}: {second.outputs()[0][-800:]}")
    first.processes[0].send_signal(signal.SIGTERM)
    scene.wait(30, run=first)
    scene.report.expect(scene.codes == (6,), f"the first run ends with {scene.codes}: {first.outputs()[0][-800:]}")
    scene.codes, scene.seconds = (*scene.codes, *taken), (*scene.seconds, *after)


def clock_behind(scene: Scene) -> None:
    """A run was killed, and the clock of the node where it starts again is behind: it is taken over soon."""
    scene.start(nodes=(0,))
    scene.cluster.kill(0)
    again = scene.run = Run(scene.cluster, scene.directory, nodes=(1,), clocks={1: -600}, max_train_steps=12)
    scene.hurt()
    scene.wait(100)
    scene.report.expect(scene.codes == (0,), f"the second run: {scene.codes}: {again.outputs()[0][-800:]}")


def elastic(scene: Scene, **options: object) -> Run:
    """A run that continues on one node when the other is lost."""
    nodes = {node: {"nodes": "1:2"} for node in (0, 1)}
    return scene.start(own=nodes, gradient_accumulation_steps=1, max_train_steps=60, node_timeout=5, **options)


def generations(scene: Scene) -> list[tuple[int, int]]:
    """The ranks and the accumulation of each."""
    found = [each for each in read_events(scene.directory / "events.jsonl") if each.kind == "generation"]
    return [(int(each.number("world_size") or 0), int(each.number("accumulation") or 0)) for each in found]


def elastic_node_killed(scene: Scene) -> None:
    elastic(scene)
    scene.cluster.kill(1)
    scene.wait()
    scene.expect(0, -9, saved=True)
    scene.report.expect(generations(scene) == [(4, 1), (2, 2)], f"generations {generations(scene)}")


def elastic_node_0_killed(scene: Scene) -> None:
    elastic(scene)
    scene.cluster.kill(0)
    scene.wait()
    scene.expect(-9, 0, saved=True)
    scene.report.expect(generations(scene) == [(4, 1), (2, 2)], f"generations {generations(scene)}")


def elastic_link_cut(scene: Scene) -> None:
    """Each node takes the other for lost, and both see the run directory: one continues, the other ends with its result."""
    elastic(scene, rendezvous_timeout=20)
    scene.cluster.cut(1)
    scene.wait()
    scene.expect(0, 0, saved=True)
    steps = [each.step for each in read_events(scene.directory / "events.jsonl") if each.kind == "step"]
    scene.report.expect(len(steps) - len(set(steps)) <= 3, f"steps are made twice: {steps}")


def elastic_worker_killed(scene: Scene) -> None:
    elastic(scene)
    only(scene.cluster, 1, "launch.worker")[0].kill()
    scene.wait()
    scene.expect(0, 0, saved=True)
    scene.report.expect(generations(scene) == [(4, 1), (4, 1)], f"generations {generations(scene)}")


def elastic_stopped(scene: Scene) -> None:
    """A stop is no loss: nothing starts again."""
    elastic(scene)
    scene.cluster.signal(1, signal.SIGTERM)
    scene.wait()
    scene.expect(6, 6, within=20, saved=True)
    scene.report.expect(generations(scene) == [(4, 1)], f"generations {generations(scene)}")


def taken_over(scene: Scene) -> None:
    """A run that was stopped for long is taken over by one on another node, and writes nothing more when it goes on."""
    first = scene.start(nodes=(0,), use_ema="true")
    scene.cluster.pause(0)
    second = scene.run = Run(scene.cluster, scene.directory, nodes=(1,), use_ema="true", max_train_steps=first.step + 20)
    scene.hurt()
    scene.wait(100)
    scene.report.expect(scene.codes == (0,), f"the second run: {scene.codes}: {second.outputs()[0][-800:]}")
    before = _contents(scene.directory)
    scene.cluster.resume(0)
    taken, after = scene.codes, scene.seconds
    scene.hurt()
    scene.wait(60, run=first)
    scene.report.expect(scene.codes == (11,), f"the first run: {scene.codes}: {first.outputs()[0][-800:]}")
    changed = {name for name, content in _contents(scene.directory).items() if before.get(name) != content}
    scene.report.expect(not changed, f"the first run has changed {changed}")
    scene.codes, scene.seconds = (*scene.codes, *taken), (*scene.seconds, *after)


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def long_encoding(scene: Scene) -> None:
    """Encoding before the first step takes longer than the collective time-out."""
    import tiny

    model = scene.place / "model"
    tiny.sdxl(model)
    toy = dict.fromkeys(("toy_width", "toy_depth", "toy_heads", "resolution_type"))
    scene.start(
        0,
        **toy,
        model_family="sdxl",
        pretrained_model_name_or_path=model,
        instance_data_dir=images(scene.place, 300),
        resolution=64,
        process_group_timeout=2,
        max_train_steps=4,
    )
    printed = scene.wait(200)
    scene.report.expect("encoding" in printed, "nothing was encoded")
    scene.expect(0, 0, saved=True)


def busy_main_rank(scene: Scene) -> None:
    """Rank 0 is busy in a hook for longer than the collective time-out."""
    plugin = scene.place / "plugin"
    info = plugin / "smalti_busy-1.dist-info"
    info.mkdir(parents=True)
    (plugin / "smalti_busy.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smalti-busy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[smalti.plugins]\nbusy = smalti_busy:plugin\n")
    env = {"PYTHONPATH": str(plugin), "BUSY_SECONDS": str(TIMEOUT * 2.5)}
    scene.start(0, max_train_steps=12, env=env)
    scene.wait()
    scene.expect(0, 0, saved=True)


def name_on_loopback(scene: Scene) -> None:
    """As Debian's installer writes it: the own name resolves to 127.0.1.1."""
    for node in (0, 1):
        scene.cluster.hosts(node, f"127.0.0.1 localhost\n127.0.1.1 node{node}\n")
    scene.start(0, max_train_steps=12)
    scene.wait()
    scene.expect(0, 0, saved=True)


def no_names(scene: Scene) -> None:
    """Host names do not resolve."""
    for node in (0, 1):
        scene.cluster.hosts(node, "127.0.0.1 localhost\n")
    scene.start(0, max_train_steps=12)
    scene.wait()
    scene.expect(0, 0, saved=True)


SCENARIOS: Mapping[str, Callable[[Scene], None]] = {
    "complete, then resumed": complete_and_resumed,
    "link of node 1 cut": link_cut,
    "the same with FSDP2": link_cut_sharded,
    "link of node 1 cut, default time-outs": link_cut_by_default,
    "power cut of node 1, default time-outs": node_killed_by_default,
    "link away for 4 s, time-out 20 s": link_away_for_4_s,
    "link of 8 Mbit/s": slow_link,
    "SIGKILL to all of node 1": node_1_killed,
    "SIGKILL to all of node 0": node_0_killed,
    "power cut of node 1": power_cut_of_node_1,
    "power cut of node 0": power_cut_of_node_0,
    "a worker of node 1 killed": worker_killed,
    "the agent of node 1 killed": agent_killed,
    "SIGSTOP to all of node 1": node_stopped,
    "SIGTERM to smalti on node 1": sigterm_to_smalti,
    "SIGTERM to all of node 1": sigterm_to_the_node,
    "node 1 with another learning rate": other_learning_rate,
    "node 1 with another number of processes": other_number_of_processes,
    "node 1 never comes": node_1_never_comes,
    "another port on node 1": wrong_port,
    "two nodes with rank 0": two_nodes_0,
    "output_dir is not shared, empty": directory_not_shared,
    "output_dir is not shared, older on node 1": directory_older_on_node_1,
    "clock of node 1 ahead by 10 min": clock_ahead,
    "second run, its clock ahead by 10 min": clock_takeover,
    "run of a killed node, clock behind by 10 min": clock_behind,
    "elastic, node 1 killed": elastic_node_killed,
    "elastic, node 0 killed": elastic_node_0_killed,
    "elastic, link cut": elastic_link_cut,
    "elastic, a worker killed": elastic_worker_killed,
    "elastic, SIGTERM to all of node 1": elastic_stopped,
    "run taken over while it was stopped": taken_over,
    "encoding for longer than the time-out": long_encoding,
    "rank 0 busy for 2.5 time-outs": busy_main_rank,
    "own names on 127.0.1.1": name_on_loopback,
    "names that do not resolve": no_names,
}


def scenarios(chance: Random, place: Path, *, names: tuple[str, ...] = tuple(SCENARIOS)) -> Report:
    """D10: all scenarios in a random order."""
    report = Report()
    if reason := forbidden():
        print(f"      D10: not possible here: {reason}", flush=True)
        return report
    with Cluster(2, warm=True) as cluster:
        for name in chance.sample(names, len(names)):
            folder = place / f"scene-{len(list(place.iterdir()))}"
            folder.mkdir()
            _play(report, cluster, folder, name)
    return report


def _play(report: Report, cluster: Cluster, place: Path, name: str) -> None:
    scene = Scene(cluster, place)
    try:
        SCENARIOS[name](scene)
        left = cluster.leftovers() if None not in scene.codes else []
        scene.report.expect(not left, f"processes are left: {left}")
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        scene.report.broken.append(f"{type(error).__name__}: {error}")
    finally:
        cluster.reset()
    report.faults += 1
    report.broken += [f"{name}: {each}" for each in scene.report.broken]
    codes = " / ".join("-" if each is None else str(each) for each in scene.codes)
    seconds = " / ".join("-" if each is None else f"{each:.1f}" for each in scene.seconds)
    judged = "BROKEN" if scene.report.broken else "held"
    print(f"      D10: {name:<46} | {codes:<8} | {seconds:<12} s | {scene.remark:<16} | {judged}", flush=True)


def one_scenario(chance: Random, place: Path) -> Report:
    """D10 in short."""
    return scenarios(chance, place, names=("link of node 1 cut",))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        report = scenarios(Random(0), Path(folder), names=tuple(sys.argv[1:]) or tuple(SCENARIOS))
    print(*report.broken, sep="\n")
