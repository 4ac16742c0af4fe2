"""`python -m support.nodes.host DESCRIPTOR`: makes the namespaces of nodes, and the first process of each.

The first process lives as long as the cluster. It starts commands as it is asked, and adopts what their processes leave behind.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress

from .namespaces import (
    BIND,
    NEW_HOST_NAME,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PIDS,
    PRIVATE,
    become_root,
    end_with_parent,
    mount,
    set_host_name,
    unmount,
    unshare,
)

LONGEST = 1 << 18


def main(descriptor: int) -> None:
    end_with_parent()
    with socket.socket(fileno=descriptor) as line:
        setup = json.loads(line.recv(LONGEST))
        try:
            try:
                unshare(NEW_MOUNTS | NEW_NETWORK)
            except PermissionError:
                become_root()
                unshare(NEW_MOUNTS | NEW_NETWORK)
            mount("none", "/", flags=PRIVATE)
            _ip("link set lo up", "link add bridge type bridge", "link set bridge up")
            _ip(f"addr add {setup['network']}.1/24 dev bridge")
            if setup["warm"]:
                from .forked_commands import import_heavy

                import_heavy()
                gc.freeze()
            nodes = [_node(line, k, setup) for k in range(setup["count"])]
        except Exception as error:  # noqa: BLE001 - for the one who asked
            line.send(f"{type(error).__name__}: {error}".encode())
            return
        socket.send_fds(line, [json.dumps([maker for maker, _ in nodes]).encode()], [each.fileno() for _, each in nodes])
        for _, each in nodes:
            each.close()
        with suppress(ConnectionError):
            while port := line.recv(LONGEST):  # until nobody is there any more
                with socket.create_server((f"{setup['network']}.1", int(port))) as server:
                    socket.send_fds(line, [b"listening"], [server.fileno()])
        with suppress(ChildProcessError):
            while True:
                os.wait()


def _ip(*commands: str) -> None:
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip: {done.stderr.strip()}")


def _node(host: socket.socket, k: int, setup: dict) -> tuple[int, socket.socket]:
    """Start the first process of a node. Returns the number of its parent, and the line on which it takes orders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ready, began = os.pipe()
    if (process := os.fork()) == 0:
        try:
            host.close()
            ours.close()
            end_with_parent()
            unshare(NEW_NETWORK | NEW_MOUNTS | NEW_HOST_NAME | NEW_IPC | NEW_PIDS)
            if (first := os.fork()) == 0:
                end_with_parent()
                _first_process(theirs, k, setup, began)
            theirs.close()
            os.close(began)
            os.waitpid(first, 0)
        except BaseException:  # noqa: BLE001 - must not return
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    os.close(began)
    if os.read(ready, 1) != b"y":
        raise OSError(f"node {k} could not be made")
    _ip(
        f"link add port{k} type veth peer name eth0 netns {process}",
        f"link set port{k} master bridge",
        f"link set port{k} up",
    )
    commands = f"link set lo up\naddr add {setup['network']}.{10 + k}/24 dev eth0\nlink set eth0 up\n"
    ours.send(json.dumps({"network": commands}).encode())
    if (answer := ours.recv(LONGEST)) != b"{}":
        raise OSError(f"node {k}: {answer.decode()}")
    os.close(ready)
    return process, ours


def _first_process(line: socket.socket, k: int, setup: dict, began: int) -> None:
    set_host_name(f"node{k}")
    mount("proc", "/proc", "proc")
    mount("shm", "/dev/shm", "tmpfs")
    with suppress(OSError):
        mount("sysfs", "/sys", "sysfs")
    mount(setup["hosts"][k], "/etc/hosts", flags=BIND)
    reading, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(began, b"y")
    os.close(began)
    while True:
        ready, _, _ = select.select([line, reading], [], [])
        if reading in ready:
            os.read(reading, 1000)
            _report_ends(line)
        if line in ready:
            try:
                text, descriptors, *_ = socket.recv_fds(line, LONGEST, 4)
                if not text:
                    os._exit(0)
                _answer(line, json.loads(text), descriptors)
            except ConnectionError:
                os._exit(0)


def _report_ends(line: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            line.send(json.dumps({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}).encode())


def _answer(line: socket.socket, order: dict, descriptors: list[int]) -> None:
    passed: list[int] = []
    try:
        answer = _carry_out(line, order, descriptors, passed)
    except OSError as error:
        answer = {"error": str(error)}
    socket.send_fds(line, [json.dumps(answer).encode()], passed)
    for each in (*descriptors, *passed):
        os.close(each)


def _carry_out(line: socket.socket, order: dict, descriptors: list[int], passed: list[int]) -> dict:
    if "network" in order:
        _ip(*order["network"].splitlines())
    elif "bind" in order:
        mount(*order["bind"], flags=BIND)
    elif "unbind" in order:
        unmount(order["unbind"])
    elif "signal" in order:
        with suppress(ProcessLookupError):
            os.kill(-1, order["signal"])  # all but this one
    elif "processes" in order:
        return {"processes": [int(each) for each in os.listdir("/proc") if each.isdigit() and each != "1"]}  # noqa: PTH208
    elif "command" in order:
        process = _start(line, order, descriptors)
        passed.append(os.pidfd_open(process))
        return {"pid": process}
    return {}


def _start(line: socket.socket, order: dict, descriptors: list[int]) -> int:
    process = os.fork()
    if process != 0:
        return process
    try:
        signal.set_wakeup_fd(-1)
        line.close()
        os.setsid()
        for number, each in ((0, os.open("/dev/null", os.O_RDONLY)), (1, descriptors[0]), (2, descriptors[0])):
            os.dup2(each, number)
        os.closerange(3, 1 << 20)
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if order["forked"]:
            from .forked_commands import run_command

            run_command(order["command"], order["environment"], order["folder"])
        os.chdir(order["folder"])
        os.execvpe(order["command"][0], order["command"], order["environment"])
    except BaseException:  # noqa: BLE001 - must not return
        traceback.print_exc()
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]))
