"""What is wrong with a DeepSpeed configuration by itself: unknown keys, values of the wrong kind, what no longer exists.

DeepSpeed passes over an unknown key at the top without a word. Imports no torch, no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

from smalti import Problem
from smalti_deepspeed.keys import (
    ACCELERATES,
    BF16,
    DATA_TYPES,
    FAILING,
    FIXED,
    NAMED,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    OPTIMIZER,
    OTHERWISE,
    REFUSED,
    REFUSED_ZERO,
    REMOVED_TOP,
    REMOVED_ZERO,
    SCHEDULER,
    SETTINGS,
    SHORT,
    SWITCHED_OFF,
    TOP,
    ZERO,
    Kind,
)
from smalti_deepspeed.optimizers import normalised, refusal
from smalti_deepspeed.parsing import is_open, section

STAGES = (1, 2, 3)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
TYPES = ("fp32", "bf16", "fp16")
DEVICES = ("none", "cpu", "nvme")
_CUTOFF = 0.7
"""How alike two names are if one is a misspelling of the other, for difflib."""
_TABLES = frozenset(("zero_optimization", "bf16", "bfloat16", "fp16", *REFUSED, *OTHERWISE)) - {
    "dataloader_drop_last",
    "gradient_allreduce_op",
}


def problems(document: Mapping[str, object]) -> Iterator[Problem]:
    """What has to change. `where` is the key, dotted."""
    yield from _top(document)
    yield from _inside(document)
    if isinstance(document.get("zero_optimization", {}), Mapping):
        yield from _zero(section(document, "zero_optimization"))


def notices(document: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What has no effect, as (key, remark)."""
    for key in document:
        if instead := ACCELERATES.get(key) or OTHERWISE.get(key):
            yield key, f"has no effect: {instead}"
    for key in unknown_settings(document):
        yield key, "has no effect: DeepSpeed has no such setting"
    zero = section(document, "zero_optimization")
    for key, reason in SWITCHED_OFF.items():
        if zero.get(key) is True:
            yield f"zero_optimization.{key}", f"has no effect, it is switched off: {reason}"
    if zero.get("stage") in (1, 2) and section(zero, "offload_param").get("device") in ("cpu", "nvme"):
        remark = f"has no effect in stage {zero['stage']}: parameters are offloaded in stage 3 only"
        yield "zero_optimization.offload_param", remark


def unknown_settings(document: Mapping[str, object]) -> list[str]:
    """The keys at the top that DeepSpeed does not have and that resemble none of its own. DeepSpeed ignores them, too."""
    known = {*TOP, *ACCELERATES, *REMOVED_TOP, *ZERO, *SHORT}
    return [key for key in document if key not in known and not get_close_matches(key, known, n=1, cutoff=_CUTOFF)]


def _top(document: Mapping[str, object]) -> Iterator[Problem]:
    harmless = unknown_settings(document)
    for key, value in document.items():
        if key in REMOVED_TOP:
            yield Problem(message="DeepSpeed has this no more", where=key, fix="leave it out")
        elif key in harmless:
            continue
        elif key not in TOP and key not in ACCELERATES:
            inside = key in ZERO or key in SHORT
            hint = f"it belongs into zero_optimization: {key}" if inside else _near(key, (*TOP, *ACCELERATES))
            yield Problem(message="unknown key", where=key, fix=hint)
        elif key in _TABLES and not isinstance(value, Mapping):
            yield Problem(message=f"is {value!r}, not a table of settings", where=key, fix=f'"{key}": {{...}}')
        elif key in REFUSED and _asks(section(document, key)):
            yield Problem(message=f"cannot be used: {REFUSED[key]}", where=key, fix="leave it out")
        elif (kind := SETTINGS.get(key)) is not None and not is_open(value) and not _IS[kind](value):
            yield Problem(message=f"cannot be {value!r}", where=key, fix=_WANTED[kind])
    for key, (usual, reason) in FIXED.items():
        if document.get(key) not in (None, "auto", usual):
            yield Problem(message=f"cannot be used: {reason}", where=key, fix="leave it out")
    if not is_open(level := document.get("log_level")) and level not in LOG_LEVELS:
        yield Problem(message=f"cannot be {level!r}", where="log_level", fix=f"one of {', '.join(LOG_LEVELS)}")
    if document.get("sequence_parallel_size") not in (None, "auto", 1):
        message = "cannot be used: smalti splits the tokens of an image under FSDP 2 only"
        yield Problem(
            message=message, where="sequence_parallel_size", fix="leave it out, or --context_parallel_size with FSDP 2"
        )


def _inside(document: Mapping[str, object]) -> Iterator[Problem]:
    """Of the tables at the top but for `zero_optimization`."""
    for key in ("bf16", "bfloat16"):
        yield from _settings(section(document, key), BF16, key)
        for setting in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if section(document, key).get(setting) is True:
                message = "cannot be used: weights and optimizer state are fp32, in checkpoints too"
                yield Problem(message=message, where=f"{key}.{setting}", fix="leave it out")
    yield from _settings({"enabled": section(document, "fp16").get("enabled")}, {"enabled": "switch"}, "fp16")
    yield from _settings(section(document, "data_types"), DATA_TYPES, "data_types")
    for key, kinds in (("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
        content = section(document, key)
        params, name = content.get("params"), content.get("type", content.get("name"))
        if not is_open(params) and not isinstance(params, Mapping):
            yield Problem(message=f"cannot be {params!r}", where=f"{key}.params", fix=_WANTED["table"])
        for beside in content.keys() - NAMED:
            hint = f"it belongs into {key}.params" if beside in kinds else _near(beside, tuple(NAMED))
            yield Problem(message="unknown key", where=f"{key}.{beside}", fix=hint)
        known, replaced = normalised(str(name)) if key == "optimizer" else ("", "")
        # Settings of an optimizer that is replaced or refused are not those of another one.
        if not is_open(name) and not replaced and not refusal(known):
            yield from _settings(section(content, "params"), kinds, f"{key}.params")


def _asks(content: Mapping[str, object]) -> bool:
    """Whether a section switches on what it is about."""
    if content.get("enabled") is False:
        return False
    return content.get("enabled") is True or any(value not in (False, None, "auto", 0, 1) for value in content.values())


def _zero(zero: Mapping[str, object]) -> Iterator[Problem]:
    stage = zero.get("stage")
    if stage not in STAGES or isinstance(stage, bool):
        message = "has no stage" if stage is None else f"cannot be {stage!r}"
        where = "zero_optimization" if stage is None else "zero_optimization.stage"
        fix = '"stage": 1, 2 or 3; for plain data parallelism leave deepspeed_config out'
        yield Problem(message=message, where=where, fix=fix)
    for key in REMOVED_ZERO & zero.keys():
        yield Problem(message="DeepSpeed has this no more", where=f"zero_optimization.{key}", fix="leave it out")
    asked = {f"zero_optimization.{key}" for key in REFUSED_ZERO if zero.get(key) not in (None, "auto", False, 0, 1)}
    asked |= {"zero_optimization.zenflow"} if zero.get("zenflow") else set()
    if section(zero, "offload_optimizer").get("super_offload") is True:
        asked.add("zero_optimization.offload_optimizer.super_offload")
    for where in sorted(asked):
        yield Problem(
            message="cannot be used: smalti's checkpoints have not been tried with it", where=where, fix="leave it out"
        )
    for key, value in zero.items():
        if (reason := FAILING.get(SHORT.get(key, key))) and value not in (None, "auto", False, 0):
            yield Problem(message=f"cannot be used: {reason}", where=f"zero_optimization.{key}", fix="leave it out")
    if zero.get("compute_grad_norm") is False:
        message = "cannot be used: the norm of the gradient tells whether a step is sound"
        yield Problem(message=message, where="zero_optimization.compute_grad_norm", fix="leave it out")
    for short, key in SHORT.items():
        if not is_open(zero.get(short)) and not is_open(zero.get(key)) and zero[short] != zero[key]:
            message = f"is {zero[short]!r}, and {key}, which is the same setting, {zero[key]!r}"
            yield Problem(message=message, where=f"zero_optimization.{short}", fix="leave one of them out")
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(key) == 0:
            yield Problem(message="cannot be 0", where=f"zero_optimization.{key}", fix='a number of elements, or "auto"')
    if stage in (1, 2) and section(zero, "offload_optimizer").get("device") == "nvme":
        message = f"DeepSpeed offloads to nvme in stage 3 only; in stage {stage} the state would stay in host memory"
        yield Problem(message=message, where="zero_optimization.offload_optimizer.device", fix='"cpu", or stage 3')
    if _is_count(size := zero.get("allgather_bucket_size")) and size % 2:  # type: ignore[operator]
        yield Problem(
            message=f"cannot be {size!r}", where="zero_optimization.allgather_bucket_size", fix='an even number, or "auto"'
        )
    known = {key: value for key, value in zero.items() if key not in (*REMOVED_ZERO, "stage")}
    yield from _settings(known, ZERO, "zero_optimization")
    for name, kinds in (("offload_param", OFFLOAD_PARAM), ("offload_optimizer", OFFLOAD_OPTIMIZER)):
        yield from _settings(section(zero, name), kinds, f"zero_optimization.{name}")


def _settings(values: Mapping[str, object], kinds: Mapping[str, Kind], place: str) -> Iterator[Problem]:
    for key, value in values.items():
        kind = kinds.get(SHORT.get(key, key) if kinds is ZERO else key)
        if kind is None:
            yield Problem(message="unknown key", where=f"{place}.{key}", fix=_near(key, kinds))
        elif not is_open(value) and not _IS[kind](value):
            yield Problem(message=f"cannot be {value!r}", where=f"{place}.{key}", fix=_WANTED[kind])


def _near(key: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=2, cutoff=_CUTOFF)
    return f"did you mean {' or '.join(near)}?" if near else "leave it out, or see DeepSpeed's documentation of its JSON"


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


_IS: dict[Kind, Callable[[object], bool]] = {
    "switch": lambda value: isinstance(value, bool),
    "count": _is_count,
    "number": _is_number,
    "share": _is_share,
    "path": lambda value: isinstance(value, str) and value != "" and "\0" not in value,
    "table": lambda value: isinstance(value, Mapping),
    "stage": lambda value: value in STAGES,
    "device": lambda value: value in DEVICES,
    "type": lambda value: value in TYPES,
    "any": lambda value: True,
}
_WANTED: dict[Kind, str] = {
    "switch": "true or false",
    "count": "a whole number from 0 on",
    "share": "a number from 0 to 1",
    "path": "the path of a folder",
    "table": "a table of settings",
    "stage": "1, 2 or 3",
    "device": '"none", "cpu" or "nvme"',
    "number": "a number",
    "type": '"fp32" or "bf16"',
}
