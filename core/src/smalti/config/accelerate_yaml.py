"""The user's Accelerate YAML: where it is, which options it sets, what smalti does not support, and merging settings into it.

Nothing is imported from Accelerate, which would import torch; a test compares the list of keys with Accelerate's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from smalti.config.known_packages import package_of
from smalti.config.options import Given, Option, Schema, Translation
from smalti.errors import Problem, did_you_mean

KEYS = frozenset(
    (
        *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank"),
        *("num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
        *("main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
        *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone"),
        *("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config"),
        *("fp16", "dynamo_backend", "ipex_config"),  # what older versions wrote
    )
)
_ALIEN = {"XLA": "TPUs", "TPU": "TPUs", "MEGATRON_LM": "Megatron-LM"}
_SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}


def is_accelerate(values: Mapping[str, object]) -> bool:
    """Whether a mapping is an Accelerate configuration rather than one of smalti."""
    return "distributed_type" in values or "compute_environment" in values


def default_file(environment: Mapping[str, str]) -> Path | None:
    """The Accelerate YAML that `accelerate launch` would use by default, if there is one."""
    if named := environment.get("ACCELERATE_CONFIG_PATH"):
        return Path(named)
    home = environment.get("HOME", "~")
    cache = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or Path(home, ".cache"), "huggingface"))
    path = Path(os.path.expanduser(cache)) / "accelerate" / "default_config.yaml"  # noqa: PTH111 - "~" may stand for nobody
    return path if path.is_file() else None


def options_in(values: Mapping[str, object], schema: Schema, path: Path) -> dict[str, Given]:
    """The options that the file sets."""
    said = {option.name: (option.accelerate.partition("=")[0], _value_of(values, option)) for option in schema.options.values()}
    for translation in _translations(values, schema):
        said |= translation.values
    return {
        name: Given(value=value, spelling=name, place=f"{key} in {path}")
        for name, (key, value) in said.items()
        if value is not None
    }


def _translations(values: Mapping[str, object], schema: Schema) -> list[Translation]:
    """What plugins read in the file, without sections that are not tables: `problems_of` reports those."""
    sound = {key: value for key, value in values.items() if not key.endswith("_config") or isinstance(value, Mapping)}
    return [group.translate(sound, schema) for group in schema.groups if group.translate is not None]


def _value_of(values: Mapping[str, object], option: Option) -> object:
    """None if the file does not set it. Accelerate writes null, port 0 or -1 processes for that."""
    key, equals, expected = option.accelerate.partition("=")
    if not key:
        return None
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
    """What this file asks for that smalti does not support."""
    leave = "or another file with --accelerate_config, or none with --accelerate_config=none"
    if not is_accelerate(values):
        fix = "give a file that `accelerate config` wrote"
        yield Problem(message="this is not an Accelerate configuration: it has no distributed_type", where=str(path), fix=fix)
        return
    if (place := values.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        yield Problem(message=f"smalti does not launch on {place}", where=str(path), fix=f"LOCAL_MACHINE, {leave}")
    kind = str(values.get("distributed_type", "NO"))
    if kind in _ALIEN or values.get("tpu_use_cluster"):
        message = f"smalti does not train on {_ALIEN.get(kind, 'TPUs')}"
        yield Problem(message=message, where=str(path), fix=f"distributed_type: MULTI_GPU, {leave}")
    for section, content in values.items():
        if section.endswith("_config") and content is not None and not isinstance(content, Mapping):
            message = f"{section} is a {type(content).__name__}, not a table of settings"
            yield Problem(message=message, where=str(path), fix=f"{section}: {{key: value, ...}}")
    for translation in _translations(values, schema):
        for problem in translation.problems:
            yield replace(problem, where=f"{problem.where} in {path}")
    covered = _covered(schema)
    claimed = {option.accelerate.partition("=")[2] for option in schema.options.values()}
    asked = {key for key in ("fsdp_config", "deepspeed_config", "parallelism_config") if values.get(key)} - covered
    if kind in _SECTIONS and kind not in claimed:
        asked |= set() if asked or _SECTIONS[kind] in covered else {kind}
    for key in sorted(asked):
        package = package_of("accelerate", key)
        assert package is not None, "each strategy of Accelerate has a package"
        problem = package.problem(f"{key} needs {package.distribution}", str(path))
        yield replace(problem, fix=f"{problem.fix}, {leave}")
    for key in _unknown(values, schema):
        if hint := _hint(key):
            yield Problem(message=f"unknown key {key}", where=str(path), fix=hint)


def _unknown(values: Mapping[str, object], schema: Schema) -> list[str]:
    """The keys that neither Accelerate nor a plugin has. `accelerate launch` refuses a file with one."""
    return [str(key) for key in values if key not in KEYS | _covered(schema)]


def _hint(key: str) -> str:
    """The question whether a key of Accelerate was meant; "" if none is alike."""
    return did_you_mean(key, KEYS, cutoff=0.85)


def _covered(schema: Schema) -> set[str]:
    """The keys at the top of the file, with sections, that options correspond to."""
    return {option.accelerate.partition(".")[0].partition("=")[0] for option in schema.options.values()}


def notices_of(values: Mapping[str, object], schema: Schema, path: Path) -> Iterator[str]:
    """Notices for what has no effect in smalti."""
    for translation in _translations(values, schema):
        yield from (f"{key} in {path} {remark}" for key, remark in translation.notices)
    dynamo = values.get("dynamo_config")
    for key, value in dynamo.items() if isinstance(dynamo, Mapping) else ():
        if str(key).removeprefix("dynamo_") not in ("backend", "mode") and value:
            yield f"{key} in {path} has no effect: smalti compiles block by block, with dynamo_backend and dynamo_mode"
    for key in _unknown(values, schema):
        if not _hint(key):
            yield f"{key} in {path} has no effect: Accelerate has no such key, and refuses a file that has it"
    if values.get("mpirun_config"):
        yield f"mpirun_config in {path} has no effect: ranks on CPUs are started by torch's own launcher"
    if str(values.get("downcast_bf16", "no")).lower() not in ("no", "false"):
        yield f"downcast_bf16 in {path} has no effect: it is for TPUs"


def launchable(values: Mapping[str, object], schema: Schema) -> dict[str, object]:
    """The file without keys that `accelerate launch` refuses."""
    unknown = _unknown(values, schema)
    return {key: value for key, value in values.items() if key not in unknown}


def precision_notice(values: Mapping[str, object], path: Path) -> str:
    """What to say if the file leaves the precision open, which is fp32 to Accelerate. "" if it does not."""
    if values.get("mixed_precision") or values.get("fp16"):
        return ""
    return f"mixed_precision is not in {path}: Accelerate computes in fp32 then, smalti as auto; --mixed_precision=no is fp32"


def merge(user: Mapping[str, object], ours: Mapping[str, object]) -> dict[str, object]:
    """`user` with `ours` merged in, section by section. None in `ours` removes a key."""
    merged = dict(user)
    for key, value in ours.items():
        if value is None:
            merged.pop(key, None)
            continue
        before = merged.get(key)
        merged[key] = merge(before if isinstance(before, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def differences(user: Mapping[str, object], merged: Mapping[str, object], schema: Schema) -> Iterator[str]:
    """Notices for keys that differ between the merged file and the user's, if no option reports them."""
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
