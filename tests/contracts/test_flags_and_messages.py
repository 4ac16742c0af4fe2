"""The flags, defaults, names and messages that users of SimpleTuner rely on, as tables: each row is resolved or provoked.

A row says what is written (flags, files) and what comes of it: a value, an exit code, a text.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from smalti import ExitCode, GpuFault, RunState
from smalti.cli.arguments import CommandLine
from smalti.config.known_packages import PACKAGES
from smalti.config.options import Schema
from smalti.data.datasets.spec import catalog_of
from smalti.data.from_options import dataset_specs
from smalti.hookspecs import HookSpecs
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_deepspeed.config import resolved, sized
from smalti_deepspeed.optimizers import normalised
from smalti_fsdp2 import accelerate_plugin
from smalti_fsdp2.options import FsdpOptions
from smalti_health.webhooks.events import Source, gpu_fault
from support.commands import commands
from support.whole import some

DEFAULTS = {
    "fsdp_enable": False,
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": (),
    "fsdp_cpu_offload": False,
    "fsdp_limit_all_gathers": True,
    "fsdp_activation_checkpointing": False,
    "context_parallel_size": 1,
    "context_parallel_comm_strategy": "allgather",
    "num_processes": 1,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": None,
    "accelerate_config": None,
    "deepspeed_config": None,
    "offload_param_path": None,
    "model_type": "full",
    "output_dir": None,
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "allow_dataset_oversubscription": False,
    "data_backend_config": None,
    "vae_cache_disable": False,
    "webhook_config": None,
    "compress_disk_cache": False,
    "gpu_health": "stop",
}
"""Flags with their defaults."""

CP2 = ("--num_processes=2", "--context_parallel_size=2")
SPELLINGS = [
    *((("--fsdp_version", word), 2) for word in ("2", "v2")),
    *((("--FSDP-Version", word), 1) for word in ("1", "V1")),
    *((("--fsdp_state_dict_type", word), "SHARDED_STATE_DICT") for word in ("sharded", "Sharded-State-Dict", "SHARDED")),
    *((("--fsdp-state-dict-type", word), "FULL_STATE_DICT") for word in ("full", "full_state_dict", "Full-State-Dict")),
    *((("--fsdp_auto_wrap_policy", word), "SIZE_BASED_WRAP") for word in ("size-based-wrap", "Size_Based", "SIZE_BASED_WRAP")),
    *((("--fsdp_auto_wrap_policy", word), "NO_WRAP") for word in ("no-wrap", "NO_WRAP")),
    (("--fsdp_auto_wrap_policy", "transformer-based-wrap"), "TRANSFORMER_BASED_WRAP"),
    (("--fsdp_auto_wrap_policy", "my.module.policy"), "my.module.policy"),
    (("--fsdp_transformer_layer_cls_to_wrap", "FluxBlock, SingleBlock"), ("FluxBlock", "SingleBlock")),
    *((("--context_parallel_comm_strategy", word), "alltoall") for word in ("alltoall", "all-to-all", "All_To_All")),
    *((("--context-parallel-comm-strategy", word), "allgather") for word in ("allgather", "all-gather", "ALL_GATHER")),
    *((("--fsdp_reshard_after_forward", word), False) for word in ("false", "No", "off", "0")),
    *((("--allow-dataset-oversubscription", word), True) for word in ("true", "YES", "1")),
]
"""Flags with a value, and what it is read as."""


def zero(stage: int, **settings: object) -> str:
    return json.dumps({"zero_optimization": {"stage": stage, **settings}})


ZERO2, HOST = zero(2), {"device": "cpu"}
CPU_ADAM = json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "cpuadam"}})
FSDP_YAML = {"a.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n"}
ZERO_YAML = {"a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 2\n"}
YAML = "--accelerate_config=a.yaml"
FSDP, ZERO = '"strategy": "FSDP"', '"strategy": "DeepSpeed"'
WITHOUT_FSDP2 = "Context parallelism requires FSDP2."
BOTH = "FSDP and DeepSpeed cannot be enabled simultaneously."
TOO_FEW = "Dataset configuration will produce zero usable batches."
RAW, DISCORD = "https://example.com/hook", "https://discord.com/api/webhooks/1/x"
DATASETS = [
    {"id": "own", "type": "local", "instance_data_dir": "photos", "resolution": 32, "resolution_type": "pixel"}
    | {"caption_strategy": "filename", "preserve_data_backend_cache": True},
    {"id": "texts", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
    {"id": "vae", "type": "local", "dataset_type": "image_embeds", "cache_dir": "cache/vae"},
]
ROWS = [{"filename": f"{name}.png", "width": 32, "height": 32, "caption": "a face"} for name in ("x", "y")]
UNREAD = {"unread/x.png": "no image", "unread/y.png": "no image"}
"""What nobody may open."""
FROM_TABLE = [{**DATASETS[0], "instance_data_dir": "unread", "caption_strategy": "parquet", "metadata_backend": "parquet"}]
FROM_PARQUET = [{**FROM_TABLE[0], "parquet": {"path": "table.parquet"}}]
FROM_LINES = [{**FROM_TABLE[0], "metadata_backend": "json", "caption_strategy": None, "json": {"path": "table.jsonl"}}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
DATA = ("--data_backend_config=d.json", "--instance_data_dir=none")

RUNS = {
    "context off": ({}, (*CP2, "--no_fsdp_enable"), 2, [WITHOUT_FSDP2]),
    "context version": ({}, (*CP2, "--fsdp_enable", "--fsdp_version=1"), 2, [WITHOUT_FSDP2]),
    "context file": (
        {"c.json": {"fsdp_enable": False, "--context_parallel_size": 2}},
        ("--num_processes=2",),
        2,
        [WITHOUT_FSDP2],
    ),
    "context yaml": (
        {"a.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\nnum_processes: 2\n"},
        ("--context_parallel_size=2", YAML),
        2,
        [WITHOUT_FSDP2],
    ),
    "context size": ({}, ("--num_processes=3", "--context_parallel_size=2"), 2, ["3 ranks cannot be split"]),
    "context here": ({}, CP2, 2, ["context parallelism needs CUDA devices"]),
    "context elsewhere": (
        {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n"},
        (CP2[1], YAML),
        0,
        [FSDP],
    ),
    "context of one": ({}, ("--context_parallel_size=1", "--context_parallel_comm_strategy=alltoall"), 0, []),
    "both by flags": ({}, ("--fsdp_enable", f"--deepspeed_config={ZERO2}"), 2, [BOTH]),
    "both in a file": ({"c.json": {"--fsdp_enable": True, "deepspeed_config": json.loads(ZERO2)}}, (), 2, [BOTH]),
    "FSDP in YAML": (FSDP_YAML, (YAML, f"--deepspeed_config={ZERO2}"), 2, [BOTH]),
    "DeepSpeed in YAML": (ZERO_YAML, (YAML, "--fsdp_enable"), 2, [BOTH]),
    "context and ZeRO": ({}, (*CP2, f"--deepspeed_config={ZERO2}"), 2, ["Context parallelism requires FSDP2"]),
    **{f"ZeRO {stage}": ({}, (f"--deepspeed_config={zero(stage)}",), 0, [ZERO]) for stage in (1, 2, 3)},
    "ZeRO on hosts": (
        {},
        (f"--deepspeed_config={zero(3, offload_optimizer=HOST, offload_param=HOST)}",),
        0,
        [ZERO],
    ),
    "ZeRO in YAML": (ZERO_YAML, (YAML,), 0, [ZERO]),
    "family": ({}, ("--model_family=fluks",), 2, ["Unknown model_family 'fluks'.", "did you mean flux", "known: "]),
    "version 1": ({}, ("--fsdp_enable", "--fsdp_version=1", "--num_processes=2"), 0, []),
    "version 3": ({}, ("--fsdp_version=3",), 2, ["fsdp_version cannot be '3'"]),
    "strategy": ({}, (*CP2, "--context_parallel_comm_strategy=ring"), 2, ["give one of allgather, alltoall"]),
    "JSON": ({}, ('--deepspeed_config={"zero_optimization": {"stage": 2,}',), 2, ["deepspeed_config:1:35"]),
    "JSON in a file": (
        {"ds.json": '{"bf16": {"enabled": true}\n "x": 1}'},
        ("--deepspeed_config=ds.json",),
        2,
        ["ds.json:2:2"],
    ),
    "stage": ({}, ('--deepspeed_config={"zero_optimization": {"stage": 4}}',), 2, ["cannot be 4", "1, 2 or 3"]),
    "scheduler": ({}, ('--deepspeed_config={"scheduler": {"type": "Sawtooth"}}',), 2, ["Sawtooth", "WarmupLR"]),
    "cpuadam": ({}, (f"--deepspeed_config={CPU_ADAM}",), 0, ["'cpuadam'", "AdamW takes its place"]),
    "batch": (
        {},
        ("--train_batch_size=4", "--num_processes=2", "--gradient_accumulation_steps=2", "--short_buckets=error"),
        3,
        [TOO_FEW, "effective batch size: 4 x 2 x 2 = 16", "4 samples x (0 repeats + 1) = 4", "needs 16", "repeats"],
    ),
    "set too small": ({}, ("--train_batch_size=8",), 3, [TOO_FEW, "effective batch size: 8 x 1 x 1 = 8"]),
    "oversubscription": ({}, ("--train_batch_size=8", "--allow_dataset_oversubscription"), 0, ["repeats raised to 1"]),
    "rare shape": ({"photos/wide.png": (64, 32)}, ("--train_batch_size=2",), 0, ["64x32 (1 sample) to 32x32"]),
    "rare shape refused": ({"photos/wide.png": (64, 32)}, ("--train_batch_size=2", "--short_buckets=error"), 3, [TOO_FEW]),
    "webhook": ({}, ('--webhook_config={"webhook_type": "slack"}',), 2, ["neither discord nor raw"]),
    "webhook without URL": ({}, ('--webhook_config={"webhook_type": "raw"}',), 2, ["callback_url"]),
    "raw": ({"w.json": {"webhook_type": "raw", "webhook_url": RAW}}, ("--webhook_config=w.json",), 0, []),
    "webhooks": (
        {"w.json": [{"webhook_type": "raw", "callback_url": RAW}, {"webhook_type": "discord", "webhook_url": DISCORD}]},
        ("--webhook_config=w.json",),
        0,
        [],
    ),
    "caches": ({}, ("--vae_cache_disable", "--compress_disk_cache"), 0, []),
    "datasets": ({"d.json": DATASETS}, DATA, 0, []),
    "parquet": ({**UNREAD, "d.json": FROM_PARQUET, "table.parquet": ROWS}, DATA, 0, []),
    "lines": ({**UNREAD, "d.json": FROM_LINES, "table.jsonl": LINES}, DATA, 0, []),
    "lines as parquet": (
        {**UNREAD, "d.json": [{**FROM_TABLE[0], "parquet": {"path": "table.jsonl"}}], "table.jsonl": LINES},
        DATA,
        2,
        ["is not a readable parquet file", '"metadata_backend": "json"'],
    ),
    "uneven nodes": (
        {},
        ("--num_processes=5", "--num_machines=2", "--main_process_ip=10.0.0.1"),
        2,
        ["num_processes=5 does not divide over num_machines=2"],
    ),
    "quantised": ({}, ("--base_model_precision=int8-torchao",), 2, ["only an adapter can be trained"]),
    "priority": (
        {**ZERO_YAML, "c.json": {"num_processes": 4}},
        (YAML,),
        0,
        ["2 from num_processes in a.yaml wins over 4"],
    ),
    "flags first": (
        {**ZERO_YAML, "c.json": {"num_processes": 4}},
        (YAML, "--num_processes=1"),
        0,
        ["'1' from --num_processes wins over 2 from num_processes in a.yaml", "'1' from --num_processes wins over 4"],
    ),
}
"""Files, flags of `smalti train --dry-run`, its exit code, and what its answer has."""

OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD")
OPTIMIZERS = (*OPTIMIZERS, "Lion", "Muon")
"""DeepSpeed's, in its spelling."""

ACCELERATE = {
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "num_machines": 2,
    "num_processes": 16,
    "mixed_precision": "bf16",
    "dynamo_config.dynamo_backend": "INDUCTOR",
    "fsdp_config.fsdp_version": 2,
    "fsdp_config.fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_config.fsdp_reshard_after_forward": False,
    "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": True,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "ToyBlock",
    "fsdp_config.fsdp_activation_checkpointing": True,
}
"""Keys of an Accelerate YAML, each the option of its last name."""


@pytest.fixture(
    autouse=True, params=some(["", "migrate"], ""), ids=lambda each: f"without smalti-{each}" if each else "all packages"
)
def absent(request, monkeypatch) -> None:
    """Every row holds with and without the package that reads other trainers' files."""
    monkeypatch.setenv("SMALTI_WITHOUT", request.param)


@pytest.fixture(scope="module")
def schema() -> Schema:
    return schema_of(load_plugins(Selection(only=tuple(package.plugin for package in PACKAGES))))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with four images in `photos`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SMALTI_CONTEXT_PARALLEL_ON_CPU", raising=False)
    for name in "abcd":
        write(f"photos/{name}.png", (32, 32))
    return tmp_path


def write(name: str, content: object) -> None:
    """A file with this text, with this as JSON or parquet, or an image of this size."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, tuple):
        Image.new("RGB", content).save(path)
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def read(*flags: str):
    return CommandLine.parse(["--accelerate_config=none", *flags]).config()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_flag_has_its_default(schema, name):
    assert schema.options[name].default == DEFAULTS[name]


@pytest.mark.parametrize(("given", "value"), SPELLINGS, ids=lambda each: "=".join(each) if isinstance(each, tuple) else None)
def test_a_value_is_read_in_any_spelling(schema, given, value):
    flag, word = given
    assert read(*CP2, f"{flag}={word}").value(schema.find(flag).name) == value


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_refused_or_planned_with_these_words(folder, capsys, name):
    files, flags, expected, texts = RUNS[name]
    if name == "context here" and torch.accelerator.is_available():
        pytest.skip("this node has CUDA devices")
    for file, content in files.items():
        write(file, content)
    options = {"model_family": "toy", "resolution": "32", "resolution_type": "pixel", "max_train_steps": "2"}
    options |= {"output_dir": "run", "instance_data_dir": "photos", "caption_strategy": "filename"}
    options |= {} if YAML in flags else {"accelerate_config": "none"}
    words = [*(["c.json"] if "c.json" in files else []), *(f"--{key}={value}" for key, value in options.items()), *flags]
    code, output, _ = commands(capsys, "train")(*words, "--dry-run", "--json")
    told = json.loads(output)
    lines = [output]
    lines += [f"{each['message']}\n{each['fix']}" for each in told.get("problems", ())] + told.get("notices", [])
    assert (code, [text for text in texts if text not in "\n".join(lines)]) == (expected, []), output


@pytest.mark.parametrize("strategy", ["--fsdp_enable", f"--deepspeed_config={ZERO2}"])
def test_adapters_are_trained_under_every_strategy(strategy):
    command_line = CommandLine.parse(["--accelerate_config=none", "--num_processes=2", "--model_type=lora", strategy])
    told = command_line.plugins.answers(HookSpecs.check_config, config=command_line.config())
    assert [problem for name in ("fsdp2", "deepspeed") for problem in told.get(name, ())] == []


def test_one_rank_has_no_strategy_of_context_parallelism():
    assert read("--context_parallel_comm_strategy=alltoall").value("context_parallel_comm_strategy") == "allgather"


def test_the_flags_of_fsdp_make_the_plugin_of_accelerate():
    made = accelerate_plugin(FsdpOptions(fsdp_state_dict_type="full", fsdp_reshard_after_forward=False))
    assert (made.fsdp_version, made.reshard_after_forward, made.state_dict_type.name) == (2, False, "FULL_STATE_DICT")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_deepspeed_is_read_in_any_spelling(name):
    for spelling in (name, name.lower(), name.upper(), f" {name[:3]}-{name[3:]}", f"{name[:3]}_{name[3:]}"):
        assert normalised(spelling) == (name, "")


@pytest.mark.parametrize("name", ["cpuadam", "FusedAdam", "prodigy"])
def test_what_deepspeed_does_not_know_becomes_adamw_with_a_warning(name):
    known, warning = normalised(name)
    assert (known, name in warning, "AdamW takes its place" in warning) == ("AdamW", True, True)


@pytest.mark.parametrize("way", [ZERO2, "ds.json", '{"zero_optimization": {"stage": 1}}'])
def test_json_without_optimizer_and_scheduler_means_adamw_and_warmup(folder, way):
    write("ds.json", ZERO2)
    document = resolved(read(f"--deepspeed_config={way}"), world_size=1)
    assert (document["optimizer"]["type"], document["scheduler"]["type"]) == ("AdamW", "WarmupLR")


def test_offload_param_path_is_the_folder_on_nvme_and_buffers_are_chosen(folder):
    document = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    config = read(f"--deepspeed_config={json.dumps(document)}", f"--offload_param_path={folder}")
    offload = sized(resolved(config, world_size=1), 1_000_000, 10_000)["zero_optimization"]["offload_param"]
    assert (offload["nvme_path"].startswith(str(folder)), offload["buffer_size"] >= 10_000) == (True, True)


@pytest.mark.parametrize("key", ACCELERATE)
def test_a_key_of_an_accelerate_yaml_is_an_option(folder, key):
    section, _, name = key.rpartition(".")
    start = {
        "distributed_type": "FSDP",
        "fsdp_config": {},
        "num_processes": 16,
        "num_machines": 2,
        "main_process_ip": "10.0.0.9",
    }
    value = ACCELERATE[key]
    write("a.yaml", {**start, **({section: {name: value}} if section else {name: value})})
    found = CommandLine.parse([YAML]).config()
    expected = ("ToyBlock",) if value == "ToyBlock" else value.lower() if value == "INDUCTOR" else value
    assert (found.value(name), "a.yaml" in found.source(name)) == (expected, True)
    assert CommandLine.parse([YAML, "--num_processes=8"]).config().value("num_processes") == 8


@pytest.mark.parametrize("kind", ["image", "text_embeds", "image_embeds"])
def test_each_part_of_the_data_may_be_in_an_s3_bucket(folder, monkeypatch, kind):
    monkeypatch.setenv("KEY", "secret")
    bucket = {"type": "aws", "aws_bucket_name": "faces", "aws_endpoint_url": "http://127.0.0.1:1"}
    bucket |= {"aws_access_key_id": "name", "aws_secret_access_key": "{env:KEY}", "aws_data_prefix": "own"}
    entries = [{**each, **(bucket if each.get("dataset_type", "image") == kind else {})} for each in DATASETS]
    entries[0] |= {"instance_data_dir": ""} if kind == "image" else {}
    write("d.json", entries)
    command_line = CommandLine.parse(["--accelerate_config=none", "--data_backend_config=d.json"])
    specs = dataset_specs(command_line.config(), catalog_of(command_line.plugins))
    assert [spec.type for spec in specs if spec.dataset_type == kind] == ["aws"]


def test_a_fault_is_the_event_gpu_fault_and_has_an_exit_code_of_its_own(tmp_path):
    source = Source(run="run", directory=tmp_path, job_id="1", host="node-0")
    fault = GpuFault(kind="ecc", message="2 errors", device="cuda:1", rank=1, reading={"index": 1, "name": "H100"})
    sent = SimpleNamespace(**gpu_fault(source, RunState(max_steps=10, step=7), fault, 0.0).payload)
    assert (sent.type, sent.severity, sent.title, sent.job_id) == ("gpu.fault", "critical", "GPU Fault: ecc", "1")
    assert sent.timestamp.endswith("+00:00")
    assert {"type", "gpu", "action_taken", "exception_type"} <= sent.fault.keys()
    gpu = {"index", "name", "temperature_celsius", "ecc_errors_single", "ecc_errors_double", "throttle_reasons"}
    assert gpu | {"memory_used_percent"} <= sent.fault["gpu"].keys()
    assert ExitCode.GPU_FAULT == 5


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("detect-blocks", "--model_family=toy"), 0, "ToyBlock"),
        (("detect-blocks", "--model_family=toi"), 2, "Unknown model_family 'toi'."),
        (("train", "--help", "fsdp_version"), 0, "1 (deprecated)"),
        (("cache", "clear", "fsdp-blocks", "--yes"), 0, "nothing to clear"),
        (("cache", "clear", "deepspeed-offload", "--offload_param_path=photos", "--yes"), 0, "nothing to clear"),
        (("doctor", "--help"), 0, "--nodes"),
        (("config", "import-accelerate", "a.yaml"), 0, "fsdp_enable = true"),
        (("config", "export-accelerate", "--fsdp_enable", "--num_processes=2"), 0, "fsdp_version: 2"),
        (("deepspeed", "build", "--stage=3", "--offload_param=cpu"), 0, '"stage": 3'),
        (("health", "show", "."), 0, "no fault of a GPU has ended this run"),
    ],
)
def test_a_command_answers(folder, monkeypatch, capsys, words, code, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    write("a.yaml", FSDP_YAML["a.yaml"])
    found, output, errors = commands(capsys)(*words)
    assert (found, text in output + errors) == (code, True)
