"""What the `fsdp_config` and `parallelism_config` of a user's Accelerate YAML mean here. Imports no torch, no Accelerate.

The keys are those of Accelerate 1.15 for versions 1 and 2 of FSDP, with and without the prefix that older files lack. A test
holds the tables to Accelerate's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from smalti import OptionGroup, Problem, Translation
from smalti.config import Schema
from smalti_fsdp2.options import ContextOptions, FsdpOptions

STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
"""Sharding strategies of version 1, in the order in which torch numbers them from 1: whether they reshard after forward."""
_PREFETCHES = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0}
"""How many blocks each backward prefetch of version 1 gathers ahead; torch numbers the first two from 1."""
_STATE_DICTS = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}

_RENAMED = {"fsdp_offload_params": "fsdp_cpu_offload"}
_PLAIN = frozenset(
    (
        *("fsdp_version", "fsdp_offload_params", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
        *("fsdp_min_num_params", "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing", "fsdp_limit_all_gathers"),
    )
)
IDLE = {
    "fsdp_use_orig_params": (False, "parameters always stay those of the model"),
    "fsdp_sync_module_states": (False, "every rank starts with the same weights"),
    "fsdp_ignored_modules": (None, "every module is sharded"),
}
"""Keys without counterpart: the value that asks for something else than what happens (None: any), and what happens."""
FSDP_1_ONLY = frozenset(
    (
        *("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch"),
        *("fsdp_use_orig_params", "fsdp_sync_module_states"),
    )
)
OFFLOAD = "fsdp_activation_checkpointing_offload"
OFFLOAD_OPTION = "offload_activations"
"""Of another package."""
KEYS = frozenset((*_PLAIN, *IDLE, *FSDP_1_ONLY, OFFLOAD, "fsdp_reshard_after_forward", "fsdp_state_dict_type"))
PARALLELISM = "parallelism_config_"
PARALLELISM_KEYS = frozenset(
    f"{PARALLELISM}{name}"
    for name in (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size"),
        *("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
    )
)


def full_name(key: str) -> str:
    """The name by which Accelerate 1.15 knows a key of fsdp_config."""
    name = key if key.startswith("fsdp") else f"fsdp_{key}"
    return "fsdp_backward_prefetch" if name == "fsdp_backward_prefetch_policy" else name


def section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A table of the file; empty if it has none."""
    content = values.get(name)
    return {str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}


def translate(values: Mapping[str, object], schema: Schema) -> Translation:
    """Whatever the file says about FSDP and context parallelism: as options, as notices, or as problems."""
    found = _Translator(values)
    found.read_fsdp()
    found.read_offload(can_offload=OFFLOAD_OPTION in schema.options)
    found.read_strategy()
    found.read_parallelism()
    found.read_shard_size()
    return Translation(values=found.said, notices=found.notices, problems=found.problems)


@dataclass
class _Translator:
    """One file on its way. `given` has (key, value) by the full name of each key of fsdp_config that is not null."""

    values: Mapping[str, object]
    said: dict[str, tuple[str, object]] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, tuple[str, object]] = field(init=False)
    wanted: bool = field(init=False)
    hybrid: bool = False

    def __post_init__(self) -> None:
        content = section(self.values, "fsdp_config")
        self.given = {full_name(key): (f"fsdp_config.{key}", each) for key, each in content.items() if each is not None}
        self.wanted = self.values.get("distributed_type") == "FSDP"

    def read_fsdp(self) -> None:
        """The keys that mean something each for itself."""
        if self.wanted and "fsdp_version" not in self.given:
            remark = "has no fsdp_version, which is 1 to Accelerate: FSDP 2 is used; fsdp_version: 1 there asks for the old one"
            self.notices.append(("fsdp_config", remark))
        for name, (key, value) in self.given.items():
            if name in _PLAIN:
                self.said[_RENAMED.get(name, name)] = (key, value)
            elif name == "fsdp_state_dict_type":
                self.said[name] = (key, _STATE_DICTS.get(str(value), value))
            elif name == "fsdp_forward_prefetch":
                switch = _switch(value)
                self.said[name] = (key, int(switch) if isinstance(switch, bool) else value)
            elif name == "fsdp_backward_prefetch":
                self._read_backward_prefetch(key, value)
            elif name in IDLE:
                idle, instead = IDLE[name]
                if idle is None or _switch(value) is idle:
                    self.notices.append((key, f"has no effect: {instead}"))
            elif name not in KEYS:
                self._read_unknown(name, key)
        self._read_no_size()

    def read_offload(self, *, can_offload: bool) -> None:
        """What recomputation keeps, in host memory: to Accelerate this means nothing without recomputation."""
        key, value = self.given.get(OFFLOAD, ("", False))
        if _switch(value) is False:
            return
        if _switch(self.given.get("fsdp_activation_checkpointing", ("", False))[1]) is not True:
            self.notices.append((key, "has no effect without fsdp_activation_checkpointing"))
        elif can_offload:
            self.said[OFFLOAD_OPTION] = (key, value)
        else:
            self.notices.append((key, f"has no effect: {OFFLOAD_OPTION} needs smalti-memory"))

    def _read_no_size(self) -> None:
        """Groups of at least no parameters are no groups to Accelerate."""
        key, least = self.given.get("fsdp_min_num_params", ("", None))
        if _number(least) == 0:
            self.said["fsdp_min_num_params"] = (key, None)
            if "SIZE" in str(self.given.get("fsdp_auto_wrap_policy", ("", ""))[1]).upper():
                self.said["fsdp_auto_wrap_policy"] = (key, "NO_WRAP")

    def _read_backward_prefetch(self, key: str, value: object) -> None:
        word = _word(value, ["BACKWARD_PRE", "BACKWARD_POST"])
        if word not in _PREFETCHES:
            self._refuse(key, f"cannot be {value!r}", f"one of {', '.join(_PREFETCHES)}")
            return
        self.said["fsdp_backward_prefetch"] = (key, _PREFETCHES[word])
        if word == "BACKWARD_POST":
            self.notices.append((key, "has no counterpart: nothing is gathered ahead in the backward pass"))

    def _read_unknown(self, name: str, key: str) -> None:
        if name in FsdpOptions.model_fields:
            fix = f"--{name}=..., or {name} in the configuration file"
            self._refuse(key, "an option of smalti, which Accelerate does not have", fix)
        elif near := get_close_matches(name, KEYS, n=1, cutoff=0.85):
            self._refuse(key, "unknown key", f"did you mean {near[0]}?")
        else:
            self.notices.append((key, "has no effect: Accelerate has no such key"))

    def read_strategy(self) -> None:
        """The strategy of version 1 and the switch of version 2, either of which may stand under either name."""
        read: dict[str, tuple[str, object]] = {}
        for name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            key, value = self.given.get(name, ("", None))
            word = _word(value, [*STRATEGIES])
            self.hybrid |= word.startswith("HYBRID")
            if word == "NO_SHARD":
                remark = "means that gathered parameters are kept until the backward pass; with MULTI_GPU nothing is sharded"
                self.notices.append((key, remark))
            if word in STRATEGIES:
                read[name] = (key, STRATEGIES[word])
            elif value is not None and name == "fsdp_reshard_after_forward":
                read[name] = (key, _switch(value))
            elif value is not None:
                self._refuse(key, f"cannot be {value!r}", f"one of {', '.join(STRATEGIES)}")
        if not read:
            return
        # Accelerate looks at the strategy first in version 1, and not at all in version 2.
        second = _number(self.given.get("fsdp_version", ("", 1))[1]) == 2
        order = sorted(read) if second else sorted(read, reverse=True)
        counts, *rest = (read[name] for name in order)
        self.said["fsdp_reshard_after_forward"] = counts
        self.notices += [(key, f"has no effect: {counts[0]} counts") for key, value in rest if value != counts[1]]

    def read_parallelism(self) -> None:
        """What of parallelism_config is not here, and what of it makes no sense."""
        content = section(self.values, "parallelism_config")
        for key, value in content.items():
            place, name = f"parallelism_config.{key}", key.removeprefix(PARALLELISM)
            if key not in PARALLELISM_KEYS:
                near = [f"{PARALLELISM}{key}"] if f"{PARALLELISM}{key}" in PARALLELISM_KEYS else []
                near += get_close_matches(key, PARALLELISM_KEYS, n=1, cutoff=0.85)
                if near:
                    self._refuse(place, "unknown key", f"did you mean {near[0]}?")
                else:
                    self.notices.append((place, "has no effect: Accelerate has no such key"))
            elif name in ("tp_size", "sp_size") and value is not None and _number(value) != 1:
                kind = "tensor parallelism" if name == "tp_size" else "sequence parallelism of DeepSpeed"
                fix = f"{key}: 1, and {PARALLELISM}cp_size to split the tokens of an image"
                self._refuse(place, f"cannot be {value!r}: smalti has no {kind}", fix)
            elif name == "cp_backend" and value not in (None, "torch"):
                self._refuse(place, f"cannot be {value!r}", "torch")

    def read_shard_size(self) -> None:
        """How many ranks share one copy of the model, unless that is one node, which is the default."""
        ranks, machines = _number(self.values.get("num_processes")), _number(self.values.get("num_machines")) or 1
        content = section(self.values, "parallelism_config")
        keys = [f"{PARALLELISM}{name}_size" for name in ("dp_replicate", "dp_shard", "cp")]
        sizes = [1 if content.get(key) is None else _number(content[key]) or 0 for key in keys]
        for key, number in zip(keys[:2], sizes, strict=False):  # the third is an option's own value
            if not number:
                self._refuse(f"parallelism_config.{key}", f"cannot be {content[key]!r}", "a whole number from 1 on")
        replicas, shards, context = sizes
        if 0 in sizes:
            return
        place, size = f"parallelism_config.{keys[1]}", shards * context
        if not any(content.get(key) for key in keys[:2]) or sizes == [1, 1, 1]:
            if not self.wanted or self.hybrid or not ranks:
                return
            place, size = "num_processes", ranks
        elif ranks and replicas * size != ranks:
            message = f"{replicas} replicas x {shards} shards x {context} context are not num_processes={ranks}"
            self._refuse("parallelism_config", message, f"sizes whose product is {ranks}")
            return
        if ranks is None or size * machines != ranks:
            self.said["fsdp_shard_size"] = (place, size)

    def _refuse(self, key: str, message: str, fix: str) -> None:
        self.problems.append(Problem(message=message, where=key, fix=fix))


def _word(value: object, numbered: list[str]) -> str:
    """A name in capitals, also from its number."""
    word = str(value).strip().upper()
    return numbered[int(word) - 1] if word.isdecimal() and 0 < int(word) <= len(numbered) else word


def _number(value: object) -> int | None:
    """A positive number or 0, also as a text; None for anything else."""
    text = str(value).strip()
    return int(text) if text.isdecimal() else None


def _switch(value: object) -> object:
    """A position of a switch, also from its text; any other value as it is."""
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1", "y", "t"):
        return True
    return False if word in ("false", "no", "off", "0", "n", "f") else value


def unused(values: Mapping[str, object], written: Mapping[str, object]) -> Iterator[str]:
    """Keys of the user's fsdp_config that `written` makes superfluous: older spellings, and those that version 2 has not."""
    for key in section(values, "fsdp_config"):
        name = full_name(key)
        if key not in written and (name in written or name in FSDP_1_ONLY):
            yield key


GROUPS = (
    OptionGroup(name="fsdp", title="FSDP", options=FsdpOptions, translate=translate),
    OptionGroup(name="context", title="Context parallelism", options=ContextOptions),
)
