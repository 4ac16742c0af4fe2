"""A real SLURM on the nodes of a `Cluster`: the controller on the last one, slurmd on all others. For root, without systemd."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti.rundir import RunDirectory

from .images import images_in
from .nodes import Cluster, forbidden
from .nodes.cluster import NodeProcess
from .nodes.runs import TINY

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
_CONF = """
ClusterName=bench
SlurmctldHost={control}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=20
InactiveLimit=0
KillWait=30
MinJobAge=300
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_forbidden() -> str:
    """Why SLURM cannot run here; empty if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"needs slurmctld, slurmd, slurm-client and munge: there is no {missing[0]}"
    return forbidden() or ("" if os.geteuid() == 0 else "SLURM needs root")


_PATH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


class Slurm:
    """SLURM on the nodes of a cluster but the last one, which has the controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.place = cluster.place / "slurm"
        self.workers = range(cluster.count - 1)
        self.control = cluster.count - 1
        for folder in ("state", "spool", "munge"):
            (self.place / folder).mkdir(parents=True)
        (self.place / "munge").chmod(0o700)
        key = self.place / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        nodes = "\n".join(
            f"NodeName=node{k} NodeAddr={cluster.address(k)} NodeHostname=node{k} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for k in self.workers
        )
        address = cluster.address(self.control)
        conf = _CONF.format(control=f"node{self.control}", address=address, place=self.place, nodes=nodes)
        (self.place / "slurm.conf").write_text(conf)
        (self.place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.env = {"SLURM_CONF": str(self.place / "slurm.conf"), "PATH": _PATH}
        self._daemons: dict[int, NodeProcess] = {}
        self._munged()
        self._start(self.control, "slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
        for node in self.workers:
            self.start_node(node)
        self.wait(lambda: self.states().count("IDLE") == len(self.workers), "the nodes are not idle")

    def _munged(self) -> None:
        own = {"key-file": "munge/key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        words = [f"--{name}={self.place / file}" for name, file in own.items()]
        self._start(self.control, "munged", "--foreground", "--force", f"--seed-file={self.place / 'munge/seed'}", *words)
        self.wait((self.place / "munge.sock").exists, "munged does not start")

    def _start(self, node: int, *command: str) -> NodeProcess:
        return self.cluster.start(node, [shutil.which(command[0], path=_PATH) or command[0], *command[1:]], env=self.env)

    def start_node(self, node: int) -> None:
        self._daemons[node] = self._start(node, "slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", f"node{node}")

    def kill_daemon(self, node: int) -> None:
        """End the daemon of a node without its jobs."""
        self._daemons[node].send_signal(signal.SIGKILL)

    def wait(self, done, why: str, seconds: float = 60) -> None:
        """Until `done()`. Raises TimeoutError with the logs."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{why}: {self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of the controller, without what it says at its start."""
        lines = (self.place / "slurmctld.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])

    def run(self, *command: str, env: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        """The output of a command on the controller's node. Raises CalledProcessError with it if it fails."""
        found = shutil.which(command[0], path=_PATH) or command[0]
        process = self.cluster.start(self.control, [found, *command[1:]], env={**self.env, **(env or {})}, folder=folder)
        if code := process.wait(60):
            raise subprocess.CalledProcessError(code, command, process.output)
        return process.output

    def states(self) -> list[str]:
        text = self.run("scontrol", "--oneliner", "show", "nodes")
        return re.findall(r"State=(\S+)", text)

    def submit(self, script: Path, *words: str, folder: Path | None = None) -> int:
        """Submit a job script; the number of the job."""
        text = self.run("sbatch", "--parsable", *words, str(script), folder=folder)
        return int(text.split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What scontrol says of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def start_now(self, number: int) -> None:
        """A job that was queued again waits for two minutes by itself.

        Within the second in which it was ended, nodes take its start for an old message.
        """
        time.sleep(3)
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now")


class SlurmRun:
    """A run of the toy family as a job, with the script that `smalti launch slurm` writes."""

    def __init__(self, slurm: Slurm, *, nodes: int | str, words: Sequence[str] = (), **options: object) -> None:
        self.slurm = slurm
        self.folder = slurm.cluster.place / "job"
        self.folder.mkdir(exist_ok=True)
        self.directory = RunDirectory(self.folder / "run")
        values = {
            **TINY,
            "instance_data_dir": images_in(slurm.cluster.place / "images", 12, (24, 24)),
            "output_dir": "run",
            **options,
        }
        config = "\n".join(f"{name} = {_toml(value)}" for name, value in values.items())
        (self.folder / "config.toml").write_text(config)
        script = self.folder / "run.sbatch"
        written = [sys.executable, "-m", "smalti", "launch", "slurm", "config.toml", f"--nodes={nodes}", "--cpus_per_task=1"]
        log = self.folder / "log"
        slurm.run(*written, f"--sbatch=--output={log}", "--setup=export OMP_NUM_THREADS=1", *words, folder=self.folder)
        self.job = slurm.submit(script, folder=self.folder)
        self._log = log
        self.since = time.time()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def state(self) -> str:
        return self.slurm.job(self.job)["JobState"]

    def wait_for_step(self, step: int, seconds: float = 180) -> int:
        """Until a launch that began after the last restart has made this step, which is returned."""

        def made() -> int:
            last = self.directory.latest("step")
            return (last.step or 0) if last is not None and last.time > self.since else 0

        self._wait(lambda: made() >= step, f"step {step} never came", seconds)
        return made()

    def wait_for_restart(self, seconds: float = 120) -> None:
        """Until the job is queued again."""
        restarts = int(self.slurm.job(self.job)["Restarts"])
        self._wait(lambda: int(self.slurm.job(self.job)["Restarts"]) > restarts, "it is not queued again", seconds)
        self.since = time.time()

    def wait_for_state(self, state: str, seconds: float = 120) -> None:
        self._wait(lambda: self.state == state, f"it does not become {state}", seconds)

    def ended_with(self) -> int | None:
        """The exit code of the last launch."""
        return self.directory.status().exit_code

    def ask_to_stop(self) -> None:
        self.directory.request("stop")

    def _wait(self, done, why: str, seconds: float) -> None:
        try:
            self.slurm.wait(done, why, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{why}: {self.state}\n{self.output}\n{error}") from None


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | int | float) else f'"{value}"'
