"""What is wrong with the software, the memory, the disks, the name and the environment of a node is found."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from smalti.plugins.registry import PluginInfo, Plugins
from smalti_doctor.checks.cgroups import MemoryLimit, cpu_quota, memory_limit
from smalti_doctor.checks.environment import environment
from smalti_doctor.checks.host import clock_synchronised, resolved
from smalti_doctor.checks.memory import memory
from smalti_doctor.checks.processes import leftovers, processes
from smalti_doctor.checks.processor import processor
from smalti_doctor.checks.software import software
from smalti_doctor.checks.storage import Folder, existing, mount_of, read_mounts, storage, try_saves
from smalti_doctor.masking import Mask

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path):
    """Writes files of /proc and /sys below a folder that stands for the root."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "root"

    return write


def found(section, level: str) -> list[str]:
    assert all(each.fix for each in section.findings if each.level in ("warning", "error"))
    return [each.message for each in section.findings if each.level == level]


def test_packages_that_are_missing_or_of_another_release_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "smalti_sparkle-9.9.dist-info"
    folder.mkdir()
    requires = "Requires-Dist: numpy>=99\nRequires-Dist: no-such-package>=2\nRequires-Dist: other; extra == 'more'\n"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: smalti-sparkle\nVersion: 9.9\n{requires}")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins()
    plugins.infos["old"] = PluginInfo(
        name="old", distribution="smalti-old", version="1", state="incompatible", reason="too old"
    )
    section = software(plugins)
    assert found(section, "error") == ["smalti-sparkle needs no-such-package>=2, which is not installed"]
    warnings = "\n".join(found(section, "warning"))
    assert "but smalti-sparkle 9.9: packages of different releases" in warnings
    assert "smalti-sparkle needs numpy>=99, but " in warnings
    assert "plugin 'old' (smalti-old 1) is incompatible: too old" in warnings
    assert section.facts["packages"]["smalti-sparkle"] == "9.9"


def test_the_limits_of_a_container_count_and_not_the_memory_of_its_host(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/job/task\n",
            "sys/fs/cgroup/job/memory.max": f"{64 * MIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\nfile 9\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n",
            "sys/fs/cgroup/job/task/memory.max": "max\n",
            "sys/fs/cgroup/job/task/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
        }
    )
    assert (memory_limit(root), cpu_quota(root)) == (MemoryLimit(limit=64 * MIB, available=54 * MIB), 1.5)
    [message] = found(memory(root, has_infiniband=False), "warning")
    assert message.startswith("54.0 MiB free of the 64.0 MiB that this container may use; the host has ")


def test_the_older_cgroups_are_read_too(tree):
    root = tree(
        {
            "proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{20 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {8 * MIB}\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (memory_limit(root), cpu_quota(root)) == (MemoryLimit(limit=512 * MIB, available=500 * MIB), 2.0)


def test_a_processor_with_few_instructions_or_too_many_threads_is_a_warning(tree, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    root = tree({"proc/cpuinfo": "model name\t: Old CPU\nflags\t\t: fpu sse4_1\n"})
    warnings = found(processor(root), "warning")
    assert any("without AVX2" in each for each in warnings)
    assert any("OMP_NUM_THREADS=4096" in each for each in warnings)


def test_saves_are_tried_and_nothing_remains(tmp_path):
    trial = try_saves(tmp_path)
    assert (trial.problem, trial.fsync_ms > 0, list(tmp_path.iterdir())) == ("", True, [])
    assert try_saves(existing(tmp_path / "not" / "there")).problem == ""
    section = storage([Folder(name="output_dir", path=Path("/proc/self"), wanted=0)])
    assert "cannot be written to" in found(section, "error")[0]


def test_file_systems_that_are_not_safe_are_named(tmp_path, tree):
    line = "36 35 98:0 / {point} rw,noatime shared:1 - {kind} server:/export rw,{options}\n"
    soft, mounted, memory_disk = (tmp_path / name for name in ("soft nfs", "bucket", "ram"))
    for path in (soft, mounted, memory_disk):
        path.mkdir()
    root = tree(
        {
            "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
            + line.format(point=str(soft).replace(" ", "\\040"), kind="nfs4", options="vers=4.2,soft")
            + line.format(point=mounted, kind="fuse.s3fs", options="allow_other")
            + line.format(point=memory_disk, kind="tmpfs", options="size=1g")
        }
    )
    mounts = read_mounts(root)
    assert [mount_of(path, mounts).kind for path in (soft / "run", tmp_path)] == ["nfs4", "ext4"]
    for path, words in ((soft, "nfs4 with the option soft"), (mounted, "no atomic renames"), (memory_disk, "lost when")):
        assert words in found(storage([Folder(name="output_dir", path=path, wanted=0)], root), "warning")[0]


def test_a_full_disk_is_a_warning_with_the_variable_that_moves_the_folder(tmp_path):
    section = storage(
        [Folder(name="output_dir", path=tmp_path, wanted=0), Folder(name="HF_HOME", path=tmp_path, wanted=1 << 60)]
    )
    [finding] = [each for each in section.findings if each.level == "warning"]
    assert finding.message.startswith(f"HF_HOME {tmp_path}")
    assert "set HF_HOME" in finding.fix


def test_names_are_resolved_and_the_reason_is_given_where_they_are_not():
    assert "127.0.0.1" in resolved("localhost")[0]
    addresses, problem = resolved("no-such-host.invalid")
    assert (addresses, bool(problem)) == ([], True)


@pytest.mark.parametrize(("answer", "synchronised"), [("yes", True), ("no", False), ("what?", None)])
def test_the_clock_is_asked_for(tmp_path, monkeypatch, answer, synchronised):
    tool = tmp_path / "timedatectl"
    tool.write_text(f"#!/bin/sh\necho {answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")  # /bin/sh, and no chronyc
    assert clock_synchronised() is synchronised


def test_variables_that_make_training_slow_or_fail_are_named_and_secrets_are_not_shown():
    values = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_SOCKET_IFNAME": "nosuch0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "LD_PRELOAD": "/opt/x.so",
        "HF_TOKEN": "hf_abc",
        "EDITOR": "vi",
    }
    section = environment(Mask(), values)
    assert found(section, "warning") == ["CUDA_LAUNCH_BLOCKING=1: every kernel is waited for, which makes steps much slower"]
    assert found(section, "error")[0].startswith("NCCL_SOCKET_IFNAME=nosuch0: this node has no interface nosuch0, only ")
    assert found(section, "note") == ["set: GLOO_SOCKET_IFNAME=lo, LD_PRELOAD=/opt/x.so, NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=0"]
    assert (section.facts["HF_TOKEN"], "EDITOR" in section.facts) == ("***", False)


def test_a_process_that_an_earlier_run_has_left_is_named(tmp_path):
    """Its parent, a shell, is gone."""
    code = "import time; time.sleep(120)"
    script = f'"{sys.executable}" -c "{code}" smalti.launch.worker {tmp_path} > /dev/null 2>&1 & echo $!'
    pid = int(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout)
    child = subprocess.Popen([sys.executable, "-c", code, "smalti.launch.worker", str(tmp_path)])
    try:
        deadline = time.monotonic() + 20
        while (left := leftovers().keys()) < {pid} and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pid in left
        assert child.pid not in left  # its run is alive
        [finding] = [each for each in processes(tmp_path / "run", []).findings if f"process {pid} " in each.message]
        assert (finding.level, finding.fix.split(",")[0]) == ("warning", f"kill -9 {pid}")
    finally:
        psutil.Process(pid).kill()
        child.kill()
        child.wait()
