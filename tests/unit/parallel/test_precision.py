"""--mixed_precision=auto: what a device computes natively, decided once for a run."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from smalti.config import TrainingOptions
from smalti.config.toml import as_toml
from smalti.errors import UserError
from smalti.launch.plan import plan_launch
from smalti.launch.preflight import Preparation
from smalti.parallel.devices import native_bf16
from smalti.parallel.precision import cost_of, describe, in_bf16
from smalti.rundir.directory import RunDirectory
from smalti.rundir.events import EventWriter
from smalti.rundir.writer import prepare
from smalti.types import DistributedPlan
from support.forked_ranks import forked_processes

DDP = DistributedPlan(name="ddp", title="DDP", parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def has_instructions() -> bool:
    """What the kernel says of this processor, for x86."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    if flags is None:
        pytest.skip("needs /proc/cpuinfo of an x86 processor")
    return bool({"avx512_bf16", "amx_bf16"} & set(flags.group(1).split()))


def native_on_cpus() -> bool:
    return native_bf16("cpu").native


@pytest.fixture
def emulating(monkeypatch):
    """A processor that oneDNN may use up to AVX2 only, so that bf16 is emulated."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    native_bf16.cache_clear()
    yield
    native_bf16.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "takes_away"),
    [
        ("ONEDNN_MAX_CPU_ISA", "avx2", True),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", True),  # torch says that oneDNN has bf16 then
        ("DNNL_MAX_CPU_ISA", "AVX2_VNNI_2", True),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", False),
        ("ATEN_CPU_CAPABILITY", "avx2", False),
    ],
)
def test_bf16_is_native_where_onednn_may_use_its_instructions(monkeypatch, variable, value, takes_away):
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    with forked_processes(ranks=1, group=False) as process:  # which has not used oneDNN yet
        assert process.run(native_on_cpus) == [has_instructions() and not takes_away]


def test_auto_is_the_default_and_what_is_given_wins_over_the_device(configure, emulating, write):
    accelerate = write("a.yaml", "distributed_type: 'NO'\nmixed_precision: bf16\n")
    assert not in_bf16(configure("--use_cpu"))
    assert in_bf16(configure("--use_cpu", "--mixed_precision=bf16"))
    assert in_bf16(configure("--use_cpu", f"--accelerate_config={accelerate}"))


def test_an_accelerate_yaml_for_devices_elsewhere_asks_them_for_bf16(configure, emulating, tmp_path):
    plan = plan_launch(configure("--num_processes=2"), DDP, tmp_path, "cuda", {})
    assert plan.accelerate["mixed_precision"] == "bf16"


def test_bf16_where_it_is_emulated_is_told_with_its_cost(configure, emulating):
    notices = cost_of(configure("--mixed_precision=bf16", "--use_cpu"), "cpu")
    assert [("35 times" in notice, "--mixed_precision=no" in notice) for notice in notices] == [(True, True)]
    assert cost_of(configure("--mixed_precision=no", "--use_cpu"), "cpu") == []


@pytest.fixture
def prepared(configure, plugins, tmp_path):
    """prepared("--flag", ...) -> a launch of one and the same run, on a few images."""
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (32, 16)).save(tmp_path / f"images/{number}.png")
    flags = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path / 'images'}")
    flags += ("--resolution=16", "--caption_strategy=filename", f"--output_dir={tmp_path / 'run'}")
    return lambda *more, write=False: Preparation.of(configure(*flags, *more), plugins, write=write)


def test_a_run_that_has_made_steps_keeps_its_precision_on_another_processor(prepared, configure, emulating, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    prepare(directory)
    directory.launch_file.write_text(json.dumps({"values": {"mixed_precision": "bf16"}}))
    assert prepared("--use_cpu").config[TrainingOptions].mixed_precision == "no"
    EventWriter(directory.events_file).append("step", step=1, loss=0.1)
    resumed = prepared("--use_cpu")
    assert resumed.config[TrainingOptions].mixed_precision == "bf16"
    assert any("bf16 is emulated here" in notice for notice in resumed.notices)
    assert prepared("--use_cpu", "--mixed_precision=no").config[TrainingOptions].mixed_precision == "no"
    directory.launch_file.write_text("{")
    with pytest.raises(UserError, match=r"does not say in which precision.*\n.*--mixed_precision=bf16"):
        prepared("--use_cpu")


@pytest.mark.parametrize(
    ("has", "reason"), [(True, "ONEDNN_MAX_CPU_ISA=AVX2 takes the bf16"), (False, "this CPU has no bf16 instructions")]
)
def test_what_auto_became_is_in_the_files_of_the_run_with_its_reason(prepared, configure, emulating, monkeypatch, has, reason):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has)
    config = prepared("--use_cpu").config
    assert as_toml(config).partition('mixed_precision = "no" # auto: ')[2].startswith(reason)
    assert config.shared_values()["mixed_precision"] == "no"
    assert describe(config, "cpu").startswith(f"fp32: {reason}")
