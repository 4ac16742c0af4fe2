"""The user's own Accelerate YAML: where it lies, what it says about our options, what of it smalti cannot do, how ours goes in.

Nothing is imported from Accelerate, which would import torch; a test compares the list of keys with Accelerate's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from smalti.errors import Problem
from smalti.options import Given, Option, Schema
from smalti.packages import package_of_accelerate

KEYS = frozenset(
    (
        *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank"),
        *("num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
        *("main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
        *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone"),
        *("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config"),
        *("fp16", "dynamo_backend"),  # what older versions wrote
    )
)
_ALIEN = {
    "XLA": "TPUs",
    "TPU": "TPUs",
    "MEGATRON_LM": "Megatron-LM",
}
_SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}


def is_accelerate(values: Mapping[str, object]) -> bool:
    """Whether a mapping is an Accelerate configuration rather than one of ours."""
    return "distributed_type" in values or "compute_environment" in values


def default_file(environment: Mapping[str, str]) -> Path | None:
    """The Accelerate YAML that `accelerate launch` itself would pick up, if there is one."""
    if named := environment.get("ACCELERATE_CONFIG_PATH"):
        return Path(named)
    home = environment.get("HOME", "~")
    cache = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or Path(home, ".cache"), "huggingface"))
    path = Path(os.path.expanduser(cache)) / "accelerate" / "default_config.yaml"  # noqa: PTH111 - "~" may stand for nobody
    return path if path.is_file() else None


def options_in(values: Mapping[str, object], schema: Schema, path: Path) -> dict[str, Given]:
    """What the file says about our options; what none of them covers stays in the file alone."""
    found = {}
    for option in schema.options.values():
        if option.accelerate and (value := _value_of(values, option)) is not None:
            key = option.accelerate.partition("=")[0]
            found[option.name] = Given(value=value, spelling=option.name, place=f"{key} in {path}")
    return found


def _value_of(values: Mapping[str, object], option: Option) -> object:
    """None when the file leaves it open, which Accelerate writes as null, as port 0 and as -1 processes too."""
    key, equals, expected = option.accelerate.partition("=")
    if key == "mixed_precision" and values.get("fp16") and not values.get(key):
        return "fp16"
    value: object = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if key == "dynamo_config.dynamo_backend":
        value = value or values.get("dynamo_backend")
        return None if str(value).upper() == "NO" else value
    if (key, value) in (("main_process_port", 0), ("num_processes", -1)):
        return None
    if key == "use_cpu" and values.get("distributed_type") == "MULTI_CPU":
        return True
    if equals:
        return True if str(value) == expected else None
    return value


def problems_of(values: Mapping[str, object], schema: Schema, path: Path) -> Iterator[Problem]:
    """What this file asks for that cannot be done here."""
    leave = "or another file with --accelerate_config, or none with --accelerate_config=none"
    if not is_accelerate(values):
        fix = "give a file that `accelerate config` wrote"
        yield Problem(message="this is no Accelerate configuration: it has no distributed_type", where=str(path), fix=fix)
        return
    if (place := values.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        yield Problem(message=f"smalti does not launch on {place}", where=str(path), fix=f"LOCAL_MACHINE, {leave}")
    kind = str(values.get("distributed_type", "NO"))
    if kind in _ALIEN or values.get("tpu_use_cluster"):
        message = f"smalti does not train on {_ALIEN.get(kind, 'TPUs')}"
        yield Problem(message=message, where=str(path), fix=f"distributed_type: MULTI_GPU, {leave}")
    covered = {option.accelerate.partition(".")[0].partition("=")[0] for option in schema.options.values()}
    claimed = {option.accelerate.partition("=")[2] for option in schema.options.values()}
    asked = {key for key in ("fsdp_config", "deepspeed_config", "parallelism_config") if values.get(key)} - covered
    if kind in _SECTIONS and kind not in claimed:
        asked |= set() if asked or _SECTIONS[kind] in covered else {kind}
    for key in sorted(asked):
        package = package_of_accelerate(key)
        message = f"{key} needs a plugin that is not installed or not selected"
        yield Problem(message=message, where=str(path), fix=f"pip install {package}, {leave}", package=package)
    for key in values:
        if key not in KEYS and (near := get_close_matches(str(key), KEYS, n=1, cutoff=0.85)):
            yield Problem(message=f"unknown key {key}", where=str(path), fix=f"did you mean {near[0]}?")


def notices_of(values: Mapping[str, object], path: Path) -> Iterator[str]:
    """What in this file has no effect in smalti."""
    dynamo = values.get("dynamo_config")
    for key, value in dynamo.items() if isinstance(dynamo, Mapping) else ():
        if str(key).removeprefix("dynamo_") not in ("backend", "mode") and value:
            yield f"{key} in {path} has no effect: smalti compiles block by block, with dynamo_backend and dynamo_mode"
    if values.get("mpirun_config"):
        yield f"mpirun_config in {path} has no effect: ranks on CPUs are started by torch's own launcher"
    if str(values.get("downcast_bf16", "no")).lower() not in ("no", "false"):
        yield f"downcast_bf16 in {path} has no effect: it is for TPUs"


def merge(user: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, object]:
    """`user` with `ours` put in, section by section; what only the user has survives."""
    merged = dict(user)
    for key, value in ours.items():
        before = merged.get(key)
        merged[key] = merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def differences(user: Mapping[str, object], merged: Mapping[str, object], schema: Schema) -> Iterator[str]:
    """What the merged file says otherwise than the user's, where no option's own notice tells of it."""
    covered = {option.accelerate for option in schema.options.values()}
    for key, value in user.items():
        if (
            key in merged
            and not isinstance(value, Mapping)
            and merged[key] != value
            and value is not None
            and key not in covered
        ):
            yield f"{key}: {merged[key]!r} is launched, the Accelerate YAML says {value!r}"
