"""`smalti doctor --nodes` as a command: on each node by hand, and over ssh from one of them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from smalti.errors import PreflightError, UserError
from smalti_cluster.checks.hosts import check_hosts

HERE = """#!/bin/sh
# Like ssh HOST COMMAND, but on this machine.
echo "$1" >> "$HOSTS_ASKED"
[ "$1" = gone ] && { echo "ssh: connect to host gone port 22: Connection refused" >&2; exit 255; }
shift
exec sh -c "$*"
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def flags(tmp_path, port) -> list[str]:
    where = [f"--output_dir={tmp_path}/run", "--main_process_ip=127.0.0.1", f"--main_process_port={port}"]
    return [*where, "--use_cpu", "--rendezvous_timeout=60"]


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> str:
    """A command like ssh that stays on this machine."""
    script = tmp_path / "ssh with spaces"
    script.write_text(HERE)
    script.chmod(0o755)
    monkeypatch.setenv("HOSTS_ASKED", str(tmp_path / "asked"))
    return shlex.quote(str(script))


def test_what_differs_is_reported_on_node_0_and_ends_all_nodes_with_3(smalti, flags, tmp_path):
    command = [*smalti, "doctor", "--nodes", *flags, "--num_machines=2", "--json"]
    processes = [
        subprocess.Popen(
            [*command, f"--machine_rank={rank}", f"--seed={rank}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (1, 0)
    ]
    ended = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [3, 3], ended
    report = json.loads(ended[1][0])
    assert report["exit_code"] == 3
    assert [each["check"] for each in report["findings"] if each["level"] == "error"] == ["seed"]
    assert "error: seed is 1 on node 1" in ended[0][1]
    assert not (tmp_path / "run").exists()


def test_a_host_that_cannot_be_reached_is_named_at_once(ssh, flags):
    with pytest.raises(PreflightError, match="cannot be started on gone: ssh: connect to host gone port 22"):
        check_hosts(["gone", "b"], flags, ssh=ssh, as_json=False, measure=False)


def test_hosts_have_to_be_several(ssh):
    for hosts in (["a"], ["a", "a"], ["a", ""]):
        with pytest.raises(UserError, match="does not name several hosts"):
            check_hosts(hosts, [], ssh=ssh, as_json=False, measure=False)


@pytest.fixture
def real_ssh(tmp_path, ssh):
    """The command for a real sshd on this machine that accepts a key of its own; where there is no sshd, one like it."""
    server, keygen, client = (
        shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin"),
        shutil.which("ssh-keygen"),
        shutil.which("ssh"),
    )
    if not (server and keygen and client and os.getuid() == 0):
        yield ssh
        return
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("", 0))
        number = probe.getsockname()[1]
    own = {"HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub", "PidFile": "none", "StrictModes": "no"}
    own |= {"ListenAddress": "127.0.0.1", "Port": number, "UsePAM": "no", "PermitRootLogin": "yes"}
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [f"-o{name}={value}" for name, value in own.items()]
    process = subprocess.Popen([server, "-D", "-f", "/dev/null", *options], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", number)).close()
            break
        except OSError:
            time.sleep(0.02)
    yield (
        f"ssh -F /dev/null -p {number} -i {tmp_path}/user -oBatchMode=yes -oStrictHostKeyChecking=no "
        f"-oUserKnownHostsFile={tmp_path}/known -oLogLevel=ERROR"
    )
    process.terminate()
    process.wait()


def test_hosts_are_started_over_ssh_and_node_0_reports(real_ssh, flags, capfd):
    code = check_hosts(["127.0.0.1", "root@localhost"], flags, ssh=real_ssh, as_json=True, measure=False)
    output, errors = capfd.readouterr()
    assert code == 0, errors
    assert json.loads(output)["works"]
