"""torch, driver and devices that do not fit together are named. A torch that hangs or crashes ends no other check."""

import os

import pytest

from smalti_doctor.checks.devices import NvidiaDriver, NvidiaGpu, device_findings, devices, nvidia_driver, runs_on
from smalti_doctor.child import ChildResult, run_in_child

GPU = NvidiaGpu(index=0, name="NVIDIA H100", uuid="aa", memory=80 << 30, used=0, driver="535.54", mig=False)
BF16 = {"native": True, "why": "it computes it natively"}
SMI = """\
#!/bin/sh
case "$*" in
*query-gpu*) echo "0, NVIDIA H100, GPU-aa, 81559, 81000, 550.54, Disabled"
             echo "1, NVIDIA H100, GPU-bb, 81559, 4, 550.54, [N/A]" ;;
*) echo "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: 12.4 |" ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi with this text on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(text: str) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(text)
        file.chmod(0o755)

    return put


@pytest.fixture
def torch_of(tmp_path, monkeypatch):
    """Puts a module torch with this text in front of the installed one, for child processes."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda text: (tmp_path / "torch.py").write_text(text)


def child(**values: object) -> ChildResult:
    facts = {"version": "2.13.0", "cuda": "12.8", "kind": "cpu", "bf16": BF16, "warnings": [], "devices": [], **values}
    return ChildResult(state="done", values=facts)


def levels(findings) -> dict[str, list[str]]:
    return {each.level: [one.message for one in findings if one.level == each.level] for each in findings}


@pytest.mark.parametrize(
    ("text", "seconds", "message"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file')",
            30,
            "torch cannot be imported: ImportError: libcud",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 30, "torch cannot be used: it was killed by SIGILL"),
        ("import time; time.sleep(60)", 2, "importing torch or using its devices hangs: it did not return within 2 s"),
    ],
)
def test_a_broken_torch_is_named_and_nothing_else_breaks(torch_of, text, seconds, message):
    torch_of(text)
    section = devices(seconds=seconds)
    [finding] = [each for each in section.findings if each.check == "torch"]
    assert (finding.level, finding.message.startswith(message)) == ("error", True), finding.message
    assert finding.fix


def test_a_folder_with_a_file_torch_py_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert run_in_child("json.tool", ("--help",), seconds=30).error != "it ended with status 7"


def test_nvidia_smi_is_read(smi):
    smi(SMI)
    driver = nvidia_driver()
    assert (driver.cuda, driver.version, [gpu.uuid for gpu in driver.gpus]) == ("12.4", "550.54", ["aa", "bb"])
    assert driver.gpus[0].used == 81000 << 20


def test_a_driver_that_does_not_answer_is_an_error_unless_the_run_trains_on_the_cpu(smi):
    smi("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'\nexit 9\n")
    driver = nvidia_driver()
    assert "could not communicate" in driver.error
    assert "could not communicate" in levels(device_findings(child(), driver))["error"][0]
    assert "error" not in levels(device_findings(child(), driver, use_cpu=True))


@pytest.mark.parametrize(
    ("torch", "driver", "visible", "message"),
    [
        ({"cuda": None, "hip": None}, "12.8", None, "this node has 1 x NVIDIA H100, but torch 2.13.0 is a build for CPUs"),
        ({"cuda": "13.0"}, "12.2", None, "the driver 535.54 runs CUDA 12.2 at most, and torch is built for CUDA 13.0"),
        ({"cuda": "12.8"}, "12.2", "", "this node has 1 x NVIDIA H100, but CUDA_VISIBLE_DEVICES='' hides all of them"),
        (
            {"warnings": ["CUDA initialization: no"]},
            "12.8",
            None,
            "this node has 1 x NVIDIA H100, and torch sees none: CUDA init",
        ),
    ],
)
def test_gpus_that_torch_does_not_see_are_explained(monkeypatch, torch, driver, visible, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [found] = levels(device_findings(child(**torch), NvidiaDriver(gpus=(GPU,), cuda=driver)))["error"]
    assert found.startswith(message)


def test_each_device_is_described_and_one_that_cannot_compute_is_an_error(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    whole = {"index": 0, "name": "NVIDIA H100", "memory": 80 << 30, "free": 79 << 30, "capability": "9.0", "uuid": "aa"}
    broken = {"index": 1, "name": "NVIDIA H100", "capability": "9.0", "uuid": "bb", "error": "uncorrectable ECC error"}
    old = {"index": 2, "name": "GeForce GTX 1080", "capability": "6.1", "uuid": "cc"}
    torch = child(
        kind="cuda", devices=[whole, broken, old], compiled_for=["sm_75", "sm_90", "compute_90"], without_peer_access=[[0, 1]]
    )
    gpus = tuple(
        NvidiaGpu(index=index, name="G", uuid=uuid, memory=1, used=0, driver="1", mig=False)
        for index, uuid in enumerate(("aa", "bb", "cc", "dd"))
    )
    found = levels(device_findings(torch, NvidiaDriver(gpus=gpus)))
    assert "cuda:0 NVIDIA H100, 80.0 GiB, 79.0 GiB free, compute capability 9.0" in found["ok"]
    assert found["error"] == [
        "cuda:1 NVIDIA H100 cannot compute: uncorrectable ECC error",
        "cuda:2 GeForce GTX 1080 has compute capability 6.1, for which torch 2.13.0 is not compiled",
    ]
    assert found["note"] == ["1 of 3 pairs of GPUs cannot read each other's memory: they exchange data through host memory"]
    assert found["warning"] == ["nvidia-smi lists 4 GPUs, and torch sees 3; not GPU 3 (G)"]


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ("9.0", ("sm_80", "sm_90"), True),
        ("8.9", ("sm_80", "sm_90"), True),
        ("8.0", ("sm_86",), False),
        ("12.0", ("sm_80", "sm_90a", "compute_90"), True),
        ("12.0", ("sm_80", "sm_90"), False),
        ("6.1", ("sm_75", "compute_75"), False),
        ("9.0", ("gfx942",), True),
    ],
)
def test_binaries_run_on_their_generation_and_intermediate_ones_on_later_ones(capability, compiled, runs):
    assert runs_on(capability, compiled) is runs
