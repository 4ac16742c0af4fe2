"""Claims and complaints, before anything is launched."""

import json
import sys

import pytest
import torch
from PIL import Image

from smalti import Config, UserError
from smalti.config.resolution import resolve, restore
from smalti.hookspecs import HookSpecs
from smalti.launch.preflight import Preparation
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.lookup import check_strategy, choose_distributed
from smalti.plugins.schema import schema_of
from smalti_fsdp2 import checks
from support.commands import commands

PLUGINS = load_plugins(Selection(only=("fsdp2", "optimizers", "toy")))


def config(*flags: str) -> Config:
    return resolve(schema_of(PLUGINS), ["--accelerate_config=none", *flags], environment={})


def complaints(*flags: str) -> list[str]:
    answers = PLUGINS.answers(HookSpecs.check_config, config=config(*flags))
    return [problem.message for problem in answers.get("fsdp2", ())]


@pytest.mark.parametrize(
    ("flags", "title"),
    [
        ((), "single process"),
        (("--num_processes=2",), "DDP"),
        (("--num_processes=2", "--fsdp_enable"), "FSDP"),
        (("--num_processes=2", "--fsdp_enable", "--fsdp_version=1"), "FSDP 1"),
        (("--num_processes=2", "--context_parallel_size=2"), "FSDP"),
        (("--num_processes=2", "--context_parallel_size=1"), "DDP"),
    ],
)
def test_who_claims_the_run(flags, title):
    assert choose_distributed(config(*flags), PLUGINS).title == title


@pytest.mark.parametrize("flags", [("--no_fsdp_enable",), ("--fsdp_enable", "--fsdp_version=1"), ("--fsdp_version=1",)])
def test_context_parallelism_requires_fsdp2(flags):
    assert complaints("--num_processes=2", "--context_parallel_size=2", *flags) == ["Context parallelism requires FSDP2."]


def test_a_rank_knows_that_it_shares_samples_as_the_launcher_did():
    launched = config("--num_processes=4", "--context_parallel_size=2")
    on_rank = restore(schema_of(PLUGINS), launched.shared_values(), {}, environment={})
    assert choose_distributed(on_rank, PLUGINS).context == 2


def test_tokens_are_split_on_cuda_devices_only(monkeypatch):
    flags = ("--num_processes=2", "--context_parallel_size=2", "--use_cpu")
    assert complaints(*flags) == ["context parallelism needs CUDA devices"]
    monkeypatch.setenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", "1")
    assert complaints(*flags) == []


@pytest.mark.parametrize(
    ("built", "flags", "environment", "reason"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", (), {}, "the installed torch is built without CUDA"),
        ("cuda: Optional[str] = '13.0'\n", (), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides those of this host"),
        ("cuda: Optional[str] = '13.0'\n", (), {}, "this host has none"),
        ("cuda: Optional[str] = '13.0'\n", ("--use_cpu",), {}, "use_cpu is set"),
        ("cuda: Optional[str] = None\n", ("--use_cpu",), {"SMALTI_CONTEXT_PARALLEL_ON_CPU": "1"}, None),
    ],
)
def test_a_host_without_cuda_devices_cannot_split_tokens(monkeypatch, tmp_path, built, flags, environment, reason):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(built)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(checks, "_DEVICES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = checks.context_parallel_problem(config(*flags))
    assert found == (None if reason is None else f"context parallelism needs CUDA devices, and {reason}")


def test_a_host_with_a_driver_for_cuda_devices_can_split_tokens(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(checks, "_DEVICES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert checks.context_parallel_problem(config()) is None


@pytest.fixture
def dry_run(tmp_path, capsys):
    """dry_run(*flags) -> (exit code, problems) of a run of the toy family that splits tokens over two ranks."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "photos" / "a.png")
    run = ("--model_family=toy", "--resolution=32", "--max_train_steps=1", f"--output_dir={tmp_path / 'run'}")
    data = ("--caption_strategy=filename", f"--instance_data_dir={tmp_path / 'photos'}", "--allow_dataset_oversubscription")

    def call(*flags: str) -> tuple[int, list[dict[str, str]]]:
        split = ("--context_parallel_size=2", "--num_processes=2", "--dry-run", "--json")
        code, output, _ = commands(capsys, "train")(*run, *data, *split, *flags)
        return code, json.loads(output).get("problems", [])

    return call


needs_no_cuda = pytest.mark.skipif(torch.accelerator.is_available(), reason="this node has an accelerator")


@needs_no_cuda
def test_a_dry_run_without_cuda_devices_refuses_to_split_tokens(dry_run, monkeypatch):
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    code, [problem] = dry_run("--accelerate_config=none")
    assert (code, problem["option"], "--context_parallel_size=1" in problem["fix"]) == (2, "context_parallel_size", True)
    assert "context parallelism needs CUDA devices, and" in problem["message"]


@needs_no_cuda
def test_tests_may_split_tokens_on_cpus(dry_run, monkeypatch):
    monkeypatch.setenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", "1")
    assert dry_run("--accelerate_config=none") == (0, [])


@needs_no_cuda
def test_a_dry_run_for_other_nodes_may_split_tokens(dry_run, monkeypatch, tmp_path):
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    (tmp_path / "accelerate.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    assert dry_run(f"--accelerate_config={tmp_path / 'accelerate.yaml'}") == (0, [])


def test_the_doctor_says_that_this_node_cannot_split_tokens_to_a_run_that_does(monkeypatch):
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    asked = config("--num_processes=2", "--context_parallel_size=2", "--use_cpu")
    [finding] = PLUGINS.call_one("fsdp2", HookSpecs.diagnose, config=asked)
    assert (finding.level, finding.message) == ("error", checks.context_parallel_problem(asked))
    assert PLUGINS.call_one("fsdp2", HookSpecs.diagnose, config=config("--use_cpu")) == []
    assert PLUGINS.call_one("fsdp2", HookSpecs.diagnose, config=None) == []


def test_heads_that_cannot_be_dealt_out_are_refused_before_the_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", "1")
    flags = ("--context_parallel_size=2", "--context_parallel_comm_strategy=alltoall", "--toy_heads=3", "--toy_width=48")
    run = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path}", f"--output_dir={tmp_path}")
    asked = config("--num_processes=2", "--use_cpu", *run, *flags)
    with pytest.raises(UserError, match="the 3 attention heads of the model cannot be split over 2 ranks"):
        Preparation.of(asked, PLUGINS, write=False)


def test_blocks_that_the_model_does_not_have_are_refused_before_the_launch(tmp_path):
    run = ("--model_family=toy", "--max_train_steps=1", f"--instance_data_dir={tmp_path}", f"--output_dir={tmp_path}")
    asked = config("--fsdp_enable", "--fsdp_transformer_layer_cls_to_wrap=ToyBlok", "--use_cpu", *run)
    with pytest.raises(UserError, match="the model has no part of a class 'ToyBlok'"):
        Preparation.of(asked, PLUGINS, write=False)


@pytest.mark.parametrize(("size", "strategy"), [(1, "allgather"), (2, "alltoall")])
def test_one_rank_has_no_strategy_for_its_tokens(size, strategy):
    found = config("--num_processes=2", f"--context_parallel_size={size}", "--context_parallel_comm_strategy=alltoall")
    assert found.value("context_parallel_comm_strategy") == strategy


@pytest.mark.parametrize("flags", [("--fsdp_enable", "--fsdp_shard_size=3"), ("--context_parallel_size=3",)])
def test_groups_that_do_not_divide_the_ranks_are_refused(flags):
    [message] = complaints("--num_processes=4", *flags)
    assert "4 ranks cannot be split into groups of" in message


def test_an_optimizer_that_needs_whole_parameters_is_refused_with_the_others_named():
    flags = config("--num_processes=2", "--fsdp_enable", "--optimizer=adafactor_scaled")
    with pytest.raises(UserError, match=r"Adafactor, .* does not work under FSDP") as raised:
        check_strategy(choose_distributed(flags, PLUGINS), flags, PLUGINS)
    assert "adamw" in raised.value.fix


def test_an_optimizer_that_needs_shapes_is_refused_where_parameters_are_flat_slices():
    flags = ("--num_processes=2", "--fsdp_enable", "--optimizer=muon")
    check_strategy(choose_distributed(config(*flags), PLUGINS), config(*flags), PLUGINS)
    first = config(*flags, "--fsdp_version=1")
    with pytest.raises(UserError, match=r"Muon .* does not work under FSDP 1, where a rank holds flat slices") as raised:
        check_strategy(choose_distributed(first, PLUGINS), first, PLUGINS)
    assert "muon" not in raised.value.fix


GRAPHS = ("--num_processes=2", "--fsdp_enable", "--dynamo_backend=inductor")


@pytest.mark.parametrize(("mode", "fix"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")])
def test_cuda_graphs_are_refused_with_the_nearest_mode_without(mode, fix):
    answers = PLUGINS.answers(HookSpecs.check_config, config=config(*GRAPHS, f"--dynamo_mode={mode}"))
    [problem] = answers["fsdp2"]
    assert "CUDA graphs, which does not work with FSDP" in problem.message
    assert problem.fix == f"--dynamo_mode={fix}"


@pytest.mark.parametrize("flags", [("--dynamo_mode=max-autotune-no-cudagraphs",), ("--dynamo_mode=max-autotune", "--use_cpu")])
def test_what_replays_no_cuda_graphs_is_compiled_under_fsdp(flags):
    assert complaints(*GRAPHS, *flags) == []


@pytest.mark.parametrize("word", ["sharded", "SHARDED_STATE_DICT", "Sharded-State-Dict"])
def test_state_dict_types_are_read_in_any_spelling(word):
    assert config(f"--fsdp_state_dict_type={word}").value("fsdp_state_dict_type") == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("word", ["alltoall", "all-to-all", "ALL_TO_ALL", "AllToAll"])
def test_strategies_of_context_parallelism_are_read_in_any_spelling(word):
    found = config("--num_processes=2", "--context_parallel_size=2", f"--context_parallel_comm_strategy={word}")
    assert found.value("context_parallel_comm_strategy") == "alltoall"


@pytest.mark.parametrize(("word", "version"), [("2", 2), ("v2", 2), ("V1", 1), ("fsdp2", 2), ("FSDP-1", 1)])
def test_versions_are_read_in_any_spelling(word, version):
    assert config(f"--fsdp_version={word}").value("fsdp_version") == version


@pytest.mark.parametrize(("flag", "where"), [("--fsdp_version=v3", "v3|3"), ("--context_parallel_comm_strategy=ring", "ring")])
def test_versions_and_strategies_that_are_none_are_refused(flag, where):
    with pytest.raises(UserError, match=where):
        config("--num_processes=2", "--context_parallel_size=2", flag)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--use_cpu",), "needs NVIDIA GPUs, and use_cpu is set"),
        (("--fsdp_version=1",), "FSDP 1 sends from memory of its own"),
        ((), None),
    ],
)
def test_symmetric_memory_is_refused_where_there_is_none(flags, message):
    found = complaints("--num_processes=2", "--fsdp_enable", "--fsdp_symmetric_memory", *flags)
    assert [each for each in found if "symmetric" in each or "of its own" in each] == found
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--gradient_checkpointing",), "recomputed twice"),
        (("--fsdp_activation_checkpointing_mode=selective", "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP"), "SIZE_BASED_WRAP"),
    ],
)
def test_recomputation_that_cannot_be_is_refused(flags, told):
    [message] = complaints("--num_processes=2", "--fsdp_enable", "--fsdp_activation_checkpointing", *flags)
    assert told in message
