"""Making a DeepSpeed configuration from a few choices: what the command line asks and a page shows. Imports no torch.

What is left open is "auto" in the JSON, and comes from smalti's own options when a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from smalti import ConfigError, Problem, UserError
from smalti_deepspeed.derived_options import SCHEDULERS, implied
from smalti_deepspeed.optimizers import USABLE, misplaced, optimizer_settings
from smalti_deepspeed.parsing import Document
from smalti_deepspeed.validate import DEVICES, STAGES

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """None leaves a thing to smalti's own options: `--optimizer`, `--learning_rate` and their like."""

    stage: int = 2
    offload_optimizer: str = "none"
    offload_param: str = "none"
    nvme_path: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    scheduler: str | None = None
    warmup_steps: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None


@dataclass(frozen=True, kw_only=True)
class Field:
    """One of the `Choices` as people see it. `choices` is empty for free values; `kind` is what to write then."""

    name: str
    question: str
    kind: type[int] | type[float] | type[str]
    choices: tuple[str, ...] = ()

    @property
    def default(self) -> str:
        """What it is if nothing is said; "" where that is left to the run."""
        value = getattr(Choices(), self.name)
        return "" if value is None else str(value)

    @property
    def wanted(self) -> str:
        """What to write, for people."""
        return "|".join(self.choices) or {int: "integer", float: "number", str: "text"}[self.kind]

    def read(self, text: str) -> str | int | float | None:
        """The value that a text gives, in any case; None for an empty one. Raises UserError for anything else."""
        text = text.strip()
        if not text or text.lower() == AUTO:
            return None
        spelled = {choice.lower(): choice for choice in self.choices}
        text = spelled.get(text.lower(), text)
        try:
            if text in self.choices or not self.choices:
                value = self.kind(text)
                if not isinstance(value, float) or math.isfinite(value):
                    return value
        except ValueError:
            pass
        near = get_close_matches(text, self.choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{self.name} cannot be {text!r}", fix=f"{hint}{self.wanted}")

    def applies(self, answers: Mapping[str, str]) -> bool:
        """Whether it means anything beside the answers so far, texts by the name of the field."""
        if self.name == "offload_param":
            return answers.get("stage") == "3"
        if self.name == "nvme_path":
            return "nvme" in (answers.get("offload_optimizer"), answers.get("offload_param"))
        return self.name != "warmup_steps" or bool(answers.get("scheduler"))


FIELDS = (
    Field(
        name="stage",
        question="ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters",
        kind=int,
        choices=tuple(map(str, STAGES)),
    ),
    Field(name="offload_optimizer", question="Device of the optimizer state", kind=str, choices=DEVICES),
    Field(name="offload_param", question="Device of the parameters (stage 3)", kind=str, choices=DEVICES),
    Field(name="nvme_path", question="Folder on an NVMe drive (else --offload_param_path)", kind=str),
    Field(name="optimizer", question="Optimizer (else --optimizer)", kind=str, choices=USABLE),
    Field(name="learning_rate", question="Peak learning rate (else --learning_rate)", kind=float),
    Field(name="scheduler", question="Learning rate schedule (else --lr_scheduler)", kind=str, choices=tuple(SCHEDULERS)),
    Field(name="warmup_steps", question="Warm-up steps (else --lr_warmup_steps)", kind=int),
    Field(
        name="gradient_accumulation_steps",
        question="Micro-batches per step (else --gradient_accumulation_steps)",
        kind=int,
    ),
    Field(name="gradient_clipping", question="Gradient clipping: maximum norm, 0 for none (else --max_grad_norm)", kind=float),
)
"""The choices in the order in which to ask for them."""


def choices_of(answers: Mapping[str, str]) -> Choices:
    """Choices from texts, by the name of the field: words of the command line, or what stands in a form.

    Raises ConfigError with every text that is none of its field's values.
    """
    read: dict[str, str | int | float] = {}
    problems = []
    for field in FIELDS:
        try:
            if (value := field.read(answers.get(field.name, ""))) is not None:
                read[field.name] = value
        except UserError as error:
            problems.append(Problem(message=error.message, fix=error.fix))
    if problems:
        raise ConfigError(problems)
    return Choices(**read)  # type: ignore[arg-type]


def build(choices: Choices) -> Document:
    """The configuration of these choices. Raises ConfigError with everything that speaks against them."""
    problems = list(_problems(choices))
    if not problems:
        document = _document(choices)
        problems = list(implied({"deepspeed_config": document}).problems)
    if problems:
        raise ConfigError(problems)
    return document


def _problems(choices: Choices) -> Iterator[Problem]:
    """What DeepSpeed would take and smalti would then not run, or take for nothing."""
    if choices.stage != 3 and choices.offload_param != "none":
        message = f"parameters are offloaded in stage 3 only, not in stage {choices.stage}"
        yield Problem(message=message, where="offload_param", fix="stage 3, or none")
    if choices.nvme_path is not None and "nvme" not in (choices.offload_optimizer, choices.offload_param):
        yield Problem(message="nothing is offloaded to nvme", where="nvme_path", fix="offload to nvme, or leave it out")
    if choices.warmup_steps is not None and choices.scheduler is None:
        fix = f"a scheduler, one of {', '.join(SCHEDULERS)}; or leave it out, and say --lr_warmup_steps to the run"
        yield Problem(message="there is no scheduler to warm up", where="warmup_steps", fix=fix)
    if wrong := misplaced(choices.optimizer or "AdamW", choices.stage, offloaded=choices.offload_optimizer != "none"):
        where = "offload_optimizer" if choices.offload_optimizer != "none" else "stage"
        yield Problem(message=wrong[0], where=where, fix=wrong[1])
    for name, least in (
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", 0),
        ("learning_rate", 0),
        ("warmup_steps", 1),
    ):
        value = getattr(choices, name)
        if value is not None and value < least:
            yield Problem(message=f"cannot be {value}", where=name, fix=f"a number from {least} on")


def _document(choices: Choices) -> Document:
    document: Document = {
        "zero_optimization": _zero(choices),
        "bf16": {"enabled": AUTO},
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": _or_auto(choices.gradient_accumulation_steps),
        "gradient_clipping": _or_auto(choices.gradient_clipping),
    }
    if choices.optimizer is not None or choices.learning_rate is not None:
        name = choices.optimizer or "AdamW"
        settings = dict.fromkeys(optimizer_settings(name), AUTO)
        document["optimizer"] = {"type": name, "params": {**settings, "lr": _or_auto(choices.learning_rate)}}
    if choices.scheduler is not None:
        params: dict[str, object] = {"warmup_num_steps": _or_auto(choices.warmup_steps), "warmup_type": "linear"}
        if choices.scheduler != "WarmupCosineLR":
            params |= {"warmup_min_lr": 0, "warmup_max_lr": AUTO}
        if choices.scheduler != "WarmupLR":
            params["total_num_steps"] = AUTO
        document["scheduler"] = {"type": choices.scheduler, "params": params}
    return document


def _or_auto(value: object) -> object:
    return AUTO if value is None else value


def _zero(choices: Choices) -> dict[str, object]:
    zero: dict[str, object] = {"stage": choices.stage}
    for name, device in (("offload_optimizer", choices.offload_optimizer), ("offload_param", choices.offload_param)):
        if device == "cpu":
            zero[name] = {"device": device, "pin_memory": True}
        elif device == "nvme":
            zero[name] = {"device": device, "pin_memory": True, "nvme_path": _or_auto(choices.nvme_path)}
    return zero
