"""Complaints before anything is launched, the folders on drives, and what `accelerate launch` receives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from smalti import Cleared, Config, OptimizerEntry, PreflightError, UserError, World, hookimpl
from smalti.config.resolution import resolve
from smalti.hookspecs import HookSpecs
from smalti.launch.plan import plan_launch, yaml_text
from smalti.launch.preflight import Preparation
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.lookup import check_strategy, choose_distributed
from smalti.plugins.registry import PluginInfo
from smalti.plugins.schema import schema_of
from smalti_cache.all_caches import find_cache, list_caches
from smalti_deepspeed import checks, offload_folder
from smalti_deepspeed.accelerate_import import KEYS
from smalti_deepspeed.config import resolved
from smalti_deepspeed.offload_folder import LOCK, Claim, Leftovers, claim_together, swap_bytes

PLUGINS = load_plugins(Selection(only=("deepspeed", "fsdp2", "optimizers", "toy")))
SCHEMA = schema_of(PLUGINS)
ZERO2 = {"zero_optimization": {"stage": 2}}
NO_LIBAIO = "DeepSpeed swaps to a drive with libaio, which is not here"


def configure(document: object, *flags: str) -> Config:
    words = () if document is None else (f"--deepspeed_config={json.dumps(document)}",)
    return resolve(SCHEMA, ["--accelerate_config=none", *words, *flags], environment={})


def complaints(document: object, *flags: str) -> list[str]:
    answers = PLUGINS.answers(HookSpecs.check_config, config=configure(document, *flags))
    reported = [problem.message for problem in answers.get("deepspeed", ())]
    return [message for message in reported if message != NO_LIBAIO]  # nodes differ in that


def swapping(folder: object = None) -> dict:
    offload = {"device": "nvme"} if folder is None else {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"stage": 3, "offload_param": offload}}


# --- complaints -----------------------------------------------------------------------------------------------------


def test_a_norm_in_the_json_is_not_taken_for_a_limit_of_each_element():
    clipping = {**ZERO2, "gradient_clipping": 0.5}
    assert complaints(clipping) == complaints(ZERO2, "--grad_clip_method=value") == []
    [message] = complaints(clipping, "--grad_clip_method=value")
    assert message.startswith("gradient_clipping is a global norm")
    assert resolved(configure(ZERO2, "--grad_clip_method=value"), world_size=1)["gradient_clipping"] == 0


def test_what_an_earlier_run_left_counts_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_folder, "free_bytes", lambda folder: 1000)
    (tmp_path / "zero_stage_3").mkdir()
    (tmp_path / "zero_stage_3" / "swapped").write_bytes(bytes(5000))
    model = torch.nn.Linear(30, 40, device="meta")  # 1,240 parameters of four bytes
    offload_folder.check_free_space(configure(swapping(tmp_path)), model)
    (tmp_path / "zero_stage_3" / "swapped").unlink()
    with pytest.raises(PreflightError, match="are free"):
        offload_folder.check_free_space(configure(swapping(tmp_path)), model)


def test_room_for_what_is_swapped_is_looked_for_before_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "has_libaio", lambda: True)  # nodes differ in that
    monkeypatch.setattr(offload_folder, "free_bytes", lambda folder: 1000)
    run = ("--model_family=toy", "--max_train_steps=1", "--use_cpu")
    asked = configure(swapping(tmp_path), *run, f"--instance_data_dir={tmp_path}/images", f"--output_dir={tmp_path}/run")
    with pytest.raises(PreflightError, match=r"the ranks of this node will swap about .* into .*, where 1000 B are free"):
        Preparation.of(asked, PLUGINS, write=False)


@pytest.mark.parametrize(("stage", "refused"), [(2, 0), (3, 1)])
def test_cuda_graphs_are_refused_where_parameters_are_gathered_in_every_pass(stage, refused):
    document = {"zero_optimization": {"stage": stage}}
    reported = complaints(document, "--dynamo_backend=inductor", "--dynamo_mode=reduce-overhead")
    assert [message.partition(",")[0] for message in reported] == [
        "--dynamo_mode=reduce-overhead replays CUDA graphs"
    ] * refused


def test_a_sound_configuration_has_none_and_works_with_adapters_too():
    assert complaints(ZERO2, "--model_type=lora") == []
    check_strategy(choose_distributed(configure(ZERO2), PLUGINS), configure(ZERO2), PLUGINS)


class Shapely:
    """A plugin with an optimizer that looks at the shapes of parameters."""

    @hookimpl
    def register_optimizers(self):
        return [OptimizerEntry(name="shapely", title="Shapely", factory="torch.optim:Adafactor", flat=False)]


def test_an_optimizer_that_needs_shapes_is_refused():
    plugins = load_plugins(Selection(only=("deepspeed",)))
    plugins.register(PluginInfo(name="shapely", distribution="tests", version="1"), Shapely())
    asked = configure(ZERO2, "--optimizer=shapely")
    with pytest.raises(UserError, match="Shapely does not work under DeepSpeed, where a rank holds flat slices"):
        check_strategy(choose_distributed(asked, plugins), asked, plugins)


@pytest.mark.parametrize("platform", ["darwin", "rocm"])
def test_deepspeed_is_refused_on_macos_and_on_rocm(tmp_path, monkeypatch, platform):
    if platform == "darwin":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(checks, "is_rocm", checks.is_rocm.__wrapped__)  # which remembers what it found in this process
    name = {"darwin": "macOS", "rocm": "ROCm"}[platform]
    (reported,) = complaints(ZERO2)
    assert name in reported


def test_this_torch_is_not_taken_for_one_of_rocm():
    assert not checks.is_rocm()


def test_context_parallelism_is_refused():
    assert "Context parallelism requires FSDP2" in complaints(ZERO2, "--num_processes=2", "--context_parallel_size=2")[0]


def test_a_global_batch_that_contradicts_the_run_is_told_with_both_numbers():
    document = {**ZERO2, "train_batch_size": 9}
    (reported,) = complaints(document, "--num_processes=4", "--train_batch_size=2", "--gradient_accumulation_steps=3")
    assert "train_batch_size is 9 in deepspeed_config" in reported
    assert "train_batch_size=2 x num_processes=4 x gradient_accumulation_steps=3 make 24" in reported
    assert complaints({**ZERO2, "train_batch_size": 8}, "--num_processes=8") == []


@pytest.mark.parametrize("flag", ["--optimizer=deepspeed_lamb", "--optimizer=sgd"])
def test_an_optimizer_without_a_form_for_processors_is_not_offloaded(flag):
    document = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert "cannot be offloaded" in complaints(document, flag)[0]
    assert complaints(document) == []


def test_muon_needs_stage_3_and_its_state_on_the_device():
    (reported,) = complaints(ZERO2, "--optimizer=muon")
    assert reported == "DeepSpeed (0.19) has Muon's momentum in no checkpoint below stage 3 of ZeRO"
    offloaded = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert complaints(offloaded, "--optimizer=muon") == ["Muon cannot be offloaded: its updates need whole matrices"]
    asked = configure({"zero_optimization": {"stage": 3}}, "--optimizer=muon")
    check_strategy(choose_distributed(asked, PLUGINS), asked, PLUGINS)
    assert complaints({"zero_optimization": {"stage": 3}}, "--optimizer=muon", "--use_cpu") == []


@pytest.mark.parametrize(
    ("optimizer", "titles"),
    [
        ("adamw", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 2, optimizer offloaded", "ZeRO 3, optimizer offloaded"]),
        ("muon", ["ZeRO 3"]),
        ("deepspeed_lamb", ["ZeRO 1", "ZeRO 2", "ZeRO 3"]),
    ],
)
def test_what_an_optimizer_cannot_step_in_is_not_planned(optimizer, titles):
    world = World(rank=0, size=2, local_rank=0, local_size=2, device="cuda")
    found = PLUGINS.answers(
        HookSpecs.propose_strategies, config=configure(None, f"--optimizer={optimizer}", "--mixed_precision=bf16"), world=world
    )
    assert [each.title for each in found["deepspeed"]] == titles


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_an_optimizer_that_needs_an_accelerator_is_not_used_without(name):
    (reported,) = complaints(ZERO2, f"--optimizer=deepspeed_{name}", "--use_cpu")
    assert f"DeepSpeed's {name.title()} runs on accelerators only" in reported
    assert complaints(ZERO2, f"--optimizer=deepspeed_{name}") == []


def test_an_optimizer_of_deepspeeds_trains_under_deepspeed_only():
    assert complaints(None, "--optimizer=deepspeed-lion") == ["deepspeed_lion trains under DeepSpeed only"]


def test_the_folder_on_the_drive_must_be_given_somewhere(tmp_path):
    assert complaints(swapping()) == ["the folder on the NVMe drive is not given"]
    assert complaints(swapping(), f"--offload_param_path={tmp_path}") == []
    assert complaints(swapping(tmp_path)) == []


def test_a_folder_that_contradicts_the_json_is_told_with_both():
    with pytest.raises(UserError, match="is '/one', and offload_param_path is '/other'"):
        configure(swapping("/one"), "--offload_param_path=/other")


def test_a_folder_must_be_there_or_be_makeable(tmp_path):
    (tmp_path / "file").touch()
    assert complaints(swapping(tmp_path / "new")) == []
    assert "none around it" in complaints(swapping(tmp_path / "no" / "such"))[0]
    assert "is not a folder" in complaints(swapping(tmp_path / "file"))[0]
    assert not (tmp_path / "new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "is not a folder" in complaints(swapping(tmp_path / "link"))[0]
    assert "no folder ~nobody-of-this-name" in complaints(swapping("~nobody-of-this-name/swap"))[0]


def test_the_folder_in_ones_home_is_the_same_for_deepspeed_and_for_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for flags in ((swapping("~/swap"),), (swapping(), "--offload_param_path=~/swap")):
        document = resolved(configure(*flags), world_size=1)
        assert document["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path / "swap")
        assert list(swap_bytes(document, 10, 10)) == [tmp_path / "swap"]


def test_an_empty_path_is_no_folder():
    assert complaints(swapping(), "--offload_param_path=") == ["the folder on the NVMe drive is not given"]


def test_swapping_to_a_drive_needs_libaio(tmp_path):
    reported = [problem.message for problem in checks.problems(configure(swapping(tmp_path)))]
    assert (NO_LIBAIO in reported) != checks.has_libaio()


def test_what_is_asked_before_a_run_imports_neither_torch_nor_deepspeed():
    names = ("plugin", "checks", "config", "accelerate_export", "commands", "report", "templates", "builder", "offload_folder")
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(f'smalti_deepspeed.{name}')\n"
    code += "print(*({'torch', 'deepspeed', 'accelerate'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def drive(tmp_path) -> Path:
    """A folder with what a run left there, and with what DeepSpeed never made."""
    folder = tmp_path / "drive"
    (folder / "zero_stage_3" / "float16params").mkdir(parents=True)
    (folder / "zero_stage_3" / "float16params" / "0.swp").write_bytes(b"x" * 100)
    (folder / "zero_stage_2").mkdir()
    for mine in ("zero_stage", "checkpoints", "outside"):
        (folder / mine).mkdir()
    (folder / "outside" / "file").write_bytes(b"mine")
    (folder / "zero_stage_file").write_bytes(b"mine")
    (folder / "zero_stage_link").symlink_to(folder / "outside")
    return folder


KEPT = {"zero_stage", "checkpoints", "outside", "zero_stage_file", "zero_stage_link"}


def test_a_claim_removes_what_runs_left_and_nothing_else(drive):
    with Claim.of([drive]) as claim:
        assert claim.cleared == Cleared(count=2, bytes=100)
    assert {path.name for path in drive.iterdir()} == {*KEPT, LOCK}
    assert (drive / "outside" / "file").read_bytes() == b"mine"


def test_a_folder_belongs_to_one_run_at_a_time(drive):
    with Claim.of([drive]):
        (drive / "zero_stage_3").mkdir()
        for second in (lambda: Claim.of([drive]), Leftovers(folders=(drive,)).clear):
            with pytest.raises(UserError, match="another run swaps into"):
                second()
        assert (drive / "zero_stage_3").exists()
    assert Leftovers(folders=(drive,)).clear().count == 1


def test_a_process_that_dies_gives_its_folder_back(drive):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom smalti_deepspeed.offload_folder import Claim\n"
        "claim = Claim.of([Path(sys.argv[1])])\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(drive)], timeout=60).returncode == 9
    Claim.of([drive]).release()


def test_a_claim_that_fails_lets_go_of_every_folder(tmp_path):
    with pytest.raises(UserError, match="cannot use the offload folder"):
        Claim.of([tmp_path / "a", tmp_path / "no" / "such"])
    Claim.of([tmp_path / "a"]).release()


def test_a_drive_without_room_is_told_with_the_numbers(tmp_path):
    with pytest.raises(PreflightError, match=r"will swap about 1\.0 PiB into .*, where .* are free"):
        Claim.of([tmp_path], needed={tmp_path: 2**50})


def test_what_is_swapped_is_counted_for_the_ranks_of_one_node(tmp_path):
    document = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    assert swap_bytes(document, 1000, 500, share=0.5) == {tmp_path: 1000 + 4000}
    assert swap_bytes(ZERO2, 1000, 500) == {}


class SingleRank:
    """The ranks of a world with this one in it, which say what this one says."""

    def __init__(self, rank: int) -> None:
        self.world = World(rank=rank, size=2, local_rank=rank, local_size=2)

    def all_gather_text(self, value: str) -> list[str]:
        return [value]


def test_one_rank_of_each_node_claims_the_folder(drive):
    document = resolved(configure(swapping(drive)), world_size=2)
    assert claim_together(document, SingleRank(1), parameters=10, trained=10) is None
    assert (drive / "zero_stage_3").exists()
    claim = claim_together(document, SingleRank(0), parameters=10, trained=10)
    assert not (drive / "zero_stage_3").exists()
    with pytest.raises(UserError, match="another run swaps into"):
        claim_together(document, SingleRank(0), parameters=10, trained=10)
    claim.release()


def test_smalti_cache_lists_and_clears_the_folder_of_a_configuration(drive):
    config = configure(None, f"--offload_param_path={drive}")
    report = next(each for each in list_caches(PLUGINS, config) if each.name == "deepspeed-offload")
    assert (report.place, report.entries, report.bytes) == (str(drive), 2, 100)
    assert find_cache(PLUGINS, "deepspeed_offload", config).clear() == Cleared(count=2, bytes=100)
    assert {path.name for path in drive.iterdir()} == {*KEPT, LOCK}
    assert find_cache(PLUGINS, "deepspeed-offload").clear() == Cleared(count=0, bytes=0)


# --- launch ---------------------------------------------------------------------------------------------------------


def test_accelerate_starts_the_ranks_with_torchs_launcher_and_knows_what_is_trained(tmp_path):
    offload = {"device": "nvme", "nvme_path": "/scratch"}
    document = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    flags = (
        "--num_processes=8",
        "--num_machines=2",
        "--main_process_ip=10.0.0.1",
        "--machine_rank=1",
        "--gradient_accumulation_steps=2",
    )
    config = configure(document, *flags)
    plan = plan_launch(config, choose_distributed(config, PLUGINS), tmp_path, "cuda", {})
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml_text(plan.accelerate))
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "-m", "smalti.launch.worker", str(tmp_path)])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert arguments.use_deepspeed
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    command, environment = prepare_deepspeed_cmd_env(arguments)
    assert command is None
    assert (arguments.nproc_per_node, arguments.nnodes) == ("4", "2")
    reported = {name: environment[f"ACCELERATE_{name}"] for name in ("DEEPSPEED_ZERO_STAGE", "GRADIENT_ACCUMULATION_STEPS")}
    assert reported == {"DEEPSPEED_ZERO_STAGE": "3", "GRADIENT_ACCUMULATION_STEPS": "2"}
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "nvme"


def test_the_keys_of_an_accelerate_yaml_are_accelerates():
    known = {action.dest for action in launch_command_parser()._actions}
    assert KEYS - known - {"deepspeed_config_file"} == set()


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        ("zero_stag: 2", "did you mean zero_stage?"),
        ("zero_stage: 4", "zero_optimization.stage in deepspeed_config: cannot be 4"),
    ],
)
def test_a_section_of_an_accelerate_yaml_that_makes_no_sense_is_refused(tmp_path, content, reported):
    file = tmp_path / "a.yaml"
    file.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  {content}\n")
    with pytest.raises(UserError) as raised:
        resolve(SCHEMA, [], file=file, environment={})
    assert reported in str(raised.value)


def test_keys_of_an_accelerate_yaml_without_effect_are_told(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero3_init_flag: true\n  deepspeed_multinode_launcher: pdsh\n"
    )
    notices = resolve(SCHEMA, [], file=file, environment={}).notices
    assert [notice.split(" in ")[0] for notice in notices] == [
        "deepspeed_config.zero3_init_flag",
        "deepspeed_config.deepspeed_multinode_launcher",
    ]


def test_the_checks_import_no_torch():
    flags = [f"--deepspeed_config={json.dumps(ZERO2)}", "--plugins=deepspeed,toy"]
    code = f"""
import sys
from smalti.cli import CommandLine
from smalti.plugins import plugin_problems
command = CommandLine.parse({flags})
plugin_problems(command.draft(), command.plugins)
assert "torch" not in sys.modules"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
