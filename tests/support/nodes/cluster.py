"""Nodes on this machine: each has its own network, processes, host name, mounts and /dev/shm.

    with Cluster(2) as cluster:
        process = cluster.start(0, ["hostname"])
        cluster.cut(1)

Nothing that happens in them reaches this machine's own network. Files are shared, but for what `private` says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

import psutil

from support.processes import living

from .forked_commands import module_of
from .host import LONGEST

NETWORK = "10.99.0"
_CLOCK = Path(__file__).with_name("clock.c")


class NodeProcess:
    """A process in a node. Its output is in a file, so that it never waits for a reader."""

    def __init__(self, cluster: Cluster, node: int, inner: int, descriptor: int, log: Path) -> None:
        self.node = node
        self.log = log
        self.inner = inner
        """Its number in the node."""
        self.returncode: int | None = None
        self._cluster = cluster
        self._descriptor = descriptor
        fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines())
        self.pid = int(fields["Pid"])
        """Its number on this machine."""

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        self._cluster.receive(self.node)
        return self.returncode

    def wait(self, timeout: float = 120) -> int:
        """The exit code, negative after a signal. Raises TimeoutError with the output."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {self.node} still runs after {timeout} s: {self.output}")
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)


class Cluster:
    """To be used in a `with` statement. Raises OSError where namespaces are forbidden.

    With `warm`, `python -m smalti...` is forked from a process that has made the imports, and so are the processes that it
    starts.
    """

    def __init__(self, count: int = 2, *, warm: bool = False) -> None:
        self.count = count
        self._warm = warm
        self._folder = tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True)
        self.place = Path(self._folder.name)
        self._started: dict[tuple[int, int], NodeProcess] = {}
        self._early: dict[tuple[int, int], int] = {}
        self._ports = [f"port{k}" for k in range(count)]
        self._changed: set[tuple[str, int]] = set()
        self._private: list[tuple[int, Path]] = []
        self._relays: list[socket.socket] = []
        for k in range(count):
            self._hosts(k).write_text(self._default_hosts())
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "support.nodes.host", str(theirs.fileno())],
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        hosts = [str(self._hosts(k)) for k in range(count)]
        self._line.send(json.dumps({"count": count, "network": NETWORK, "hosts": hosts, "warm": warm}).encode())
        answer, descriptors, *_ = socket.recv_fds(self._line, LONGEST, count)
        if not answer.startswith(b"["):
            self._line.close()
            self._host.wait()
            self._folder.cleanup()
            raise OSError(answer.decode() or "the host process has ended")
        self._makers: list[int] = json.loads(answer)
        self._nodes = [socket.socket(fileno=each) for each in descriptors]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all nodes."""
        for line in (*self._nodes, self._line):
            line.close()
        for process in self._started.values():
            process.close()
        self._close_relays()
        self._host.wait()
        self._folder.cleanup()

    def reset(self) -> None:
        """As if it were new: no processes, nothing cut, slow or private."""
        for node in range(self.count):
            self.kill(node)
            self.hosts(node)
        for what, node in list(self._changed):
            self.heal(node) if what == "cut" else self.slow(node, mbit=None)
        for node, path in self._private:
            self._ask(node, {"unbind": str(path)})
        self._private.clear()
        self._close_relays()
        self.leftovers()

    # --- processes --------------------------------------------------------------------------------------------------

    def start(
        self,
        node: int,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        clock: float = 0,
        folder: Path | None = None,
    ) -> NodeProcess:
        """Start a command, in its own session. `env` is added to this environment without settings of smalti.

        `clock`: the seconds by which its wall clock is ahead.
        """
        words = [os.fspath(word) for word in command]
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SMALTI_", "ACCELERATE_"))}
        environment = {**own, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary(node)), **(env or {})}
        if clock:
            environment |= {"LD_PRELOAD": str(self._clock()), "CLOCK_SKEW": str(int(clock))}
        forked = self._warm and not clock and module_of(words) is not None
        order = {"command": words, "environment": environment, "folder": str(folder or self.place), "forked": forked}
        log = self.place / f"node{node}-{len(self._started)}.log"
        with log.open("ab") as file:
            answer, descriptors = self._ask(node, order, [file.fileno()])
        process = NodeProcess(self, node, answer["pid"], descriptors[0], log)
        self._started[node, process.inner] = process
        process.returncode = self._early.pop((node, process.inner), None)
        return process

    def processes(self, node: int) -> list[psutil.Process]:
        """Everything that runs in a node, but for its first process; also what no one waits for any more."""
        inner = Path(f"/proc/{self._first(node)}/ns/pid").stat().st_ino
        found = []
        for each in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if Path(f"/proc/{each.pid}/ns/pid").stat().st_ino == inner and each.pid != self._first(node):
                    found.append(each)
        return living(found)

    def leftovers(self, seconds: float = 5) -> list[str]:
        """The commands of the processes that are still there after this time, of all nodes."""
        deadline = time.monotonic() + seconds
        while True:
            found = [each for node in range(self.count) for each in self.processes(node)]
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        commands = []
        for each in found:
            with suppress(psutil.Error):
                commands.append(" ".join(each.cmdline()))
        return commands

    def signal(self, node: int, number: int) -> None:
        """A signal to every process of a node."""
        self._ask(node, {"signal": number})

    def kill(self, node: int) -> None:
        """SIGKILL to every process of a node. Its network remains; with `cut` before, it is a power cut."""
        self.signal(node, signal.SIGKILL)

    def pause(self, node: int) -> None:
        self.signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        self.signal(node, signal.SIGCONT)

    # --- network, files ---------------------------------------------------------------------------------------------

    def address(self, node: int) -> str:
        return f"{NETWORK}.{10 + node}"

    def cut(self, node: int) -> None:
        """Nothing reaches the node any more, nor leaves it. Connections are not closed."""
        self._ip("link", "set", self._ports[node], "nomaster")
        self._changed.add(("cut", node))

    def heal(self, node: int) -> None:
        """Undo `cut`."""
        self._ip("link", "set", self._ports[node], "master", "bridge")
        self._changed.discard(("cut", node))

    def slow(self, node: int, *, mbit: float | None) -> None:
        """Limit what a node sends and receives. None removes the limit."""
        for pid, device in ((self._host.pid, self._ports[node]), (self._first(node), "eth0")):
            limit = ["replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "16kb", "latency", "200ms"]
            self._in_network(pid, ["tc", "qdisc", *(limit if mbit is not None else ["del", "dev", device, "root"])])
        (self._changed.add if mbit is not None else self._changed.discard)(("slow", node))

    def relay(self, port: int) -> str:
        """The address under which all nodes reach what listens at this port of 127.0.0.1 on this machine."""
        self._line.send(str(port).encode())
        _, descriptors, *_ = socket.recv_fds(self._line, LONGEST, 1)
        server = socket.socket(fileno=descriptors[0])
        self._relays.append(server)
        threading.Thread(target=_accept, args=(server, port), daemon=True).start()
        return f"{NETWORK}.1:{port}"

    def hosts(self, node: int, text: str | None = None) -> None:
        """Replace /etc/hosts of a node; None restores it."""
        self._hosts(node).write_text(self._default_hosts() if text is None else text)

    def private(self, node: int, path: Path) -> Path:
        """Another directory at this path in one node, for processes that start later. Returns where it is on this machine."""
        other = self.place / f"private-{node}-{len(os.listdir(self.place))}"  # noqa: PTH208
        other.mkdir()
        path.mkdir(parents=True, exist_ok=True)
        self._ask(node, {"bind": [str(other), str(path)]})
        self._private.append((node, path))
        return other

    # --- parts ------------------------------------------------------------------------------------------------------

    def receive(self, node: int) -> None:
        """Take what a node has reported."""
        line = self._nodes[node]
        line.setblocking(False)
        with suppress(BlockingIOError):
            while text := line.recv(LONGEST):
                self._ended(node, json.loads(text))
        line.setblocking(True)

    def _close_relays(self) -> None:
        for server in self._relays:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self._relays.clear()

    def _ask(self, node: int, order: Mapping[str, object], descriptors: Sequence[int] = ()) -> tuple[dict, list[int]]:
        line = self._nodes[node]
        socket.send_fds(line, [json.dumps(order).encode()], descriptors)
        while True:
            text, passed, *_ = socket.recv_fds(line, LONGEST, 4)
            answer = json.loads(text)
            if "ended" not in answer:
                break
            self._ended(node, answer)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, passed

    def _ended(self, node: int, report: dict) -> None:
        process = self._started.get((node, report["ended"]))
        if process is None or process.returncode is not None:
            self._early[node, report["ended"]] = report["code"]  # it ended before it was known here, or is an orphan
        else:
            process.returncode = report["code"]

    def _first(self, node: int) -> int:
        """The number of a node's first process on this machine."""
        return int(psutil.Process(self._makers[node]).children()[0].pid)

    def _ip(self, *words: str) -> None:
        self._in_network(self._host.pid, ["ip", *words])

    def _in_network(self, pid: int, command: Sequence[str]) -> None:
        own = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{pid}/ns/user")  # noqa: PTH115
        user = [] if own else ["--user", "--preserve-credentials"]
        prefix = ["nsenter", "--target", str(pid), *user, "--net"]
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def _clock(self) -> Path:
        library = self.place / "clock.so"
        if not library.exists():
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_CLOCK)], check=True)
        return library

    def _temporary(self, node: int) -> Path:
        folder = self.place / f"tmp-{node}"
        folder.mkdir(exist_ok=True)
        return folder

    def _hosts(self, node: int) -> Path:
        return self.place / f"hosts-{node}"

    def _default_hosts(self) -> str:
        return "127.0.0.1 localhost\n" + "".join(f"{self.address(k)} node{k}\n" for k in range(self.count))


def _accept(server: socket.socket, port: int) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            try:
                target = socket.create_connection(("127.0.0.1", port))
            except OSError:
                connection.close()  # as a server that is down
                continue
            for ends in ((connection, target), (target, connection)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@cache
def forbidden() -> str:
    """Why there can be no nodes on this machine; empty if there can."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        with Cluster(1) as cluster:
            cluster.start(0, ["true"]).wait()
    except OSError as error:
        return f"needs namespaces and the ip command: {error}"
    return ""
