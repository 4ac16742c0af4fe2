"""What a DeepSpeed configuration says about smalti's own options. Imports no torch, no DeepSpeed.

Each thing has one home, the option: what the JSON says of it becomes the option's value where nothing else gives it one, and
a value that is given elsewhere must be the same. So the loop, the data and every other strategy read one set of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from smalti import OptionGroup, Problem, Translation, UserError
from smalti_deepspeed import validate
from smalti_deepspeed.accelerate_import import translate
from smalti_deepspeed.optimizers import MUON_NOTICE, misplaced, normalised, refusal, smalti_name
from smalti_deepspeed.options import DeepSpeedOptions
from smalti_deepspeed.parsing import Document, is_none, is_open, place, read, section

SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules, and the `--lr_scheduler` that each of them is."""
OTHER_SCHEDULERS = ("OneCycle", "LRRangeTest")
"""Those that smalti has not."""

_PLAIN = {
    "train_micro_batch_size_per_gpu": "train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_OPTIMIZER = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "adam_weight_decay"}
_SCHEDULER = {"warmup_max_lr": "learning_rate", "warmup_num_steps": "lr_warmup_steps", "total_num_steps": "max_train_steps"}

ONLY_OF = {
    "total_num_steps": ("WarmupDecayLR", "WarmupCosineLR"),
    "warmup_min_ratio": ("WarmupCosineLR",),
    "cos_min_ratio": ("WarmupCosineLR",),
}
"""Settings that DeepSpeed takes for some schedules alone."""


def implied(given: Mapping[str, object]) -> Translation:
    """The values of smalti's options that lie in `deepspeed_config`; what is replaced or has no effect; what is wrong."""
    value = given.get("deepspeed_config")
    if is_open(value) or is_none(value):
        return Translation()
    try:
        found = _Reader(read(value))
    except UserError as error:
        return Translation(problems=[Problem(message=error.message, where="deepspeed_config", fix=error.fix)])
    found.read_plain()
    found.read_precision()
    found.read_optimizer()
    found.read_scheduler()
    found.read_inspection()
    found.read_folder(given.get("offload_param_path"))
    return Translation(values=found.said, notices=found.notices, problems=found.problems)


@dataclass
class _Reader:
    document: Document
    said: dict[str, tuple[str, object]] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read_plain(self) -> None:
        for key, name in _PLAIN.items():
            self._say(name, key, self.document.get(key))

    def read_precision(self) -> None:
        for key in ("bf16", "bfloat16"):
            value = section(self.document, key).get("enabled")
            self._say(
                "mixed_precision", f"{key}.enabled", {True: "bf16", False: "no"}.get(value) if isinstance(value, bool) else None
            )
        if section(self.document, "fp16").get("enabled") is True:
            self._refuse("fp16.enabled", "smalti does not train in fp16", '"bf16": {"enabled": true}, or --mixed_precision=no')

    def read_optimizer(self) -> None:
        name = self._type_of("optimizer", "AdamW")
        if name is None:
            return
        known, remark = normalised(name)
        if remark:
            self.notices.append(("optimizer.type", remark))
        if (refused := refusal(known)) is not None:
            self._refuse("optimizer.type", *refused)
            return
        zero = section(self.document, "zero_optimization")
        offloaded = section(zero, "offload_optimizer").get("device") in ("cpu", "nvme")
        if (wrong := misplaced(known, zero.get("stage"), offloaded=offloaded)) is not None:
            self._refuse("optimizer.type", *wrong)
        if known == "Muon":
            self.notices.append(("optimizer.type", MUON_NOTICE))
        self.said["optimizer"] = ("optimizer.type", smalti_name(known))
        params = section(self.document, "optimizer", "params")
        for key, option in _OPTIMIZER.items():
            self._say(option, f"optimizer.params.{key}", params.get(key))
        betas = params.get("betas")
        if isinstance(betas, list) and len(betas) == 2:
            self._say("adam_beta1", "optimizer.params.betas", betas[0])
            self._say("adam_beta2", "optimizer.params.betas", betas[1])
        elif not is_open(betas):
            self._refuse("optimizer.params.betas", f"cannot be {betas!r}", "two numbers, such as [0.9, 0.999]")

    def read_scheduler(self) -> None:
        name = self._type_of("scheduler", "WarmupLR")
        if name is None:
            return
        known = {each.lower(): each for each in (*SCHEDULERS, *OTHER_SCHEDULERS)}
        spelled = known.get(name.lower(), name)
        if spelled not in SCHEDULERS:
            near = get_close_matches(spelled, SCHEDULERS, n=1)
            what = "is not one of smalti's schedules" if spelled in OTHER_SCHEDULERS else "is not a schedule of DeepSpeed's"
            hint = f"did you mean {near[0]}? " if near else ""
            fix = f"{hint}one of {', '.join(SCHEDULERS)}; or leave it out, and choose by --lr_scheduler"
            self._refuse("scheduler.type", f"{name} {what}", fix)
            return
        self.said["lr_scheduler"] = ("scheduler.type", SCHEDULERS[spelled])
        params = section(self.document, "scheduler", "params")
        for key, owners in ONLY_OF.items():
            if spelled not in owners and not is_open(params.get(key)):
                fix = f"leave it out, or type {' or '.join(owners)}"
                self._refuse(f"scheduler.params.{key}", f"{spelled} has no such setting", fix)
        for key, option in _SCHEDULER.items():
            self._say(option, f"scheduler.params.{key}", params.get(key))
        if spelled == "WarmupCosineLR":
            self._say("lr_end_ratio", "scheduler.params.cos_min_ratio", params.get("cos_min_ratio"))
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            if params.get(key) not in (None, "auto", 0):
                self.notices.append((f"scheduler.params.{key}", "has no effect: the warm-up begins at zero"))
        if params.get("last_batch_iteration") not in (None, "auto", -1):
            self.notices.append(
                ("scheduler.params.last_batch_iteration", "has no effect: the rate follows the steps of the run")
            )
        if params.get("warmup_type") not in (None, "auto", "linear"):
            self.notices.append(("scheduler.params.warmup_type", "has no effect: the warm-up is linear"))

    def _type_of(self, key: str, example: str) -> str | None:
        """The name in an `optimizer` or `scheduler`. None if it is left open, or is missing where settings wait for it."""
        value = self.document.get(key)
        name = named(value)
        if name is None and value:
            self._refuse(key, "has no type", f'"type": "{example}"')
        return name

    def read_inspection(self) -> None:
        self.notices += validate.notices(self.document)
        for problem in validate.problems(self.document):
            self._refuse(problem.where, problem.message, problem.fix)

    def read_folder(self, folder: object) -> None:
        """The NVMe folder, which stands in the JSON or in `offload_param_path`, or the same in both."""
        offloads = {name: section(self.document, "zero_optimization", name) for name in ("offload_param", "offload_optimizer")}
        swapping = {name: each.get("nvme_path") for name, each in offloads.items() if each.get("device") == "nvme"}
        if is_none(folder):
            return
        if not swapping:
            self.notices.append(("offload_param_path", "has no effect: nothing is offloaded to nvme"))
        for name, path in swapping.items():
            key = f"zero_optimization.{name}.nvme_path"
            if not is_open(path) and place(str(path)) != place(str(folder)):
                fix = "give the same value in both, or leave one of them out"
                self._refuse(key, f"is {path!r}, and offload_param_path is {str(folder)!r}", fix)

    def _say(self, option: str, key: str, value: object) -> None:
        """A value of an option, unless another key has said the same. Two that differ are a contradiction within the JSON."""
        if is_open(value):
            return
        first = self.said.setdefault(option, (key, value))
        if first[1] != value:
            self._refuse(key, f"is {value!r}, and {first[0]} is {first[1]!r}: both are {option}", "keep one of them")

    def _refuse(self, key: str, message: str, fix: str) -> None:
        self.problems.append(Problem(message=message, where=f"{key} in deepspeed_config", fix=fix))


def named(value: object) -> str | None:
    """The type of an `optimizer` or `scheduler`, which may be given as `name`, or as the bare name."""
    if isinstance(value, Mapping):
        value = value.get("type", value.get("name"))
    return None if is_open(value) else str(value)


GROUP = OptionGroup(name="deepspeed", title="DeepSpeed", options=DeepSpeedOptions, translate=translate, derived=implied)
