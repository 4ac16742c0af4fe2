"""A narrow PCIe link, GPUs far from the processors and hugepages that are off are found in /sys."""

import pytest

from smalti_doctor.checks.topology import topology

PCI = "sys/bus/pci/devices"


@pytest.fixture
def machine(tmp_path):
    """machine(pages=, nodes=, gpus=[...]) -> the root of its /sys. A GPU is the files of its device that are not usual."""

    def write(*, pages="always [madvise] never", nodes=2, gpus=()):
        files = {f"sys/devices/system/node/node{node}/cpulist": "" for node in range(nodes)}
        files |= {"sys/kernel/mm/transparent_hugepage/enabled": pages} if pages else {}
        usual = {"vendor": "0x10de", "class": "0x030200", "numa_node": "0", "local_cpulist": "0-3,8-11"}
        usual |= {"current_link_width": "16", "max_link_width": "16"}
        usual |= {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"}
        files |= {f"{PCI}/0000:00:1f.0/{name}": text for name, text in {**usual, "vendor": "0x8086", "numa_node": "1"}.items()}
        files |= {f"{PCI}/0000:00:02.0/{name}": text for name, text in {**usual, "class": "0x020000"}.items()}
        for number, own in enumerate(gpus):
            files |= {f"{PCI}/0000:{number:02}:00.0/{name}": text for name, text in {**usual, **own}.items()}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def found(section) -> list[tuple[str, str, str]]:
    assert all(each.fix for each in section.findings if each.level == "warning")
    return [(each.check, each.level, each.message) for each in section.findings]


def test_a_link_with_fewer_lanes_than_it_could_have_is_named(machine):
    root = machine(gpus=[{}, {"current_link_width": "8"}, {"vendor": "0x1002", "class": "0x120000", "max_link_width": "63"}])
    narrow, whole, _, _ = found(topology(root, allowed={0}))
    assert narrow[:2] == ("PCIe", "warning")
    assert narrow[2].startswith("the NVIDIA GPU at 0000:01:00.0 has 8 PCIe lanes of 16")
    assert whole == ("PCIe", "ok", "2 of 3 GPUs have all lanes of their PCIe links")


def test_a_link_that_is_slower_at_rest_is_no_fault(machine):
    root = machine(gpus=[{"current_link_speed": "2.5 GT/s PCIe"}])
    [link] = [each for each in found(topology(root, allowed={0})) if each[0] == "PCIe"]
    assert (link[1], "now at 2.5 GT/s PCIe, at most 16.0 GT/s PCIe" in link[2]) == ("ok", True)


def test_a_gpu_whose_processors_this_process_may_not_use_is_named(machine):
    root = machine(gpus=[{}, {"numa_node": "1", "local_cpulist": "4-7"}])
    [near] = [each for each in found(topology(root, allowed={0, 5})) if each[0] == "NUMA"]
    assert (near[1], near[2].startswith("2 NUMA nodes; GPUs on 0, 1; ")) == ("ok", True)
    [far] = [each for each in found(topology(root, allowed={0, 8})) if each[0] == "NUMA"]
    assert far[:2] == ("NUMA", "warning")
    assert far[2].startswith("the NVIDIA GPU at 0000:01:00.0 is on NUMA node 1, and this process may use no processor there")


def test_where_the_node_is_unknown_nothing_is_wrong(machine):
    root = machine(gpus=[{"numa_node": "-1", "local_cpulist": "", "current_link_width": "0", "max_link_width": "0"}])
    assert [each[:2] for each in found(topology(root, allowed={9}))] == [("NUMA", "ok"), ("hugepages", "ok")]


@pytest.mark.parametrize(
    ("pages", "expected"),
    [("always madvise [never]", "warning"), ("[always] madvise never", "ok"), ("", None)],
)
def test_hugepages_that_are_off_are_named(machine, pages, expected):
    root = machine(pages=pages, nodes=1)
    assert [level for _, level, _ in found(topology(root))] == ([expected] if expected else [])


def test_this_machine_is_read():
    assert topology().facts["numa_nodes"] >= 0
