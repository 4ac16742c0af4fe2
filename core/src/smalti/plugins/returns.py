"""Checks what hooks return, so that the error for a wrong type names the plugin and the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pkgutil import resolve_name

from smalti.hookspecs import HookSpecs
from smalti.types import Origin


@dataclass(frozen=True)
class Answer:
    """What a hook may return other than None: an object of the class `kind`, or with `several` a list of such objects."""

    kind: str
    """"module:class", imported when there is something to check."""
    several: bool = False

    def read(self, value: object, hook: str, origin: Origin) -> object:
        """The checked value; with `several`, one object becomes a list. Raises TypeError for another type."""
        if value is None:
            return None
        kind: type = resolve_name(self.kind)
        values = list(value) if isinstance(value, list | tuple) else [value]
        wrong = next((each for each in values if not isinstance(each, kind)), None)
        if wrong is None and (self.several or not isinstance(value, list | tuple)):
            return values if self.several else value
        given = value if wrong is None else wrong
        wanted = f"a list of {kind.__name__}" if self.several else f"a {kind.__name__}"
        raise TypeError(f"{origin} returned {_shown(given)} from {hook!r}, not {wanted}")


_ANSWERS: Mapping[Callable[..., object], Answer] = {
    HookSpecs.declare_options: Answer("smalti.config.options:OptionGroup", several=True),
    HookSpecs.restore_run: Answer("builtins:str"),
    HookSpecs.check_config: Answer("smalti.errors:Problem", several=True),
    HookSpecs.register_model_families: Answer("smalti.types:FamilyEntry", several=True),
    HookSpecs.register_storage: Answer("smalti.types:StorageEntry", several=True),
    HookSpecs.register_metadata_backends: Answer("smalti.types:MetadataEntry", several=True),
    HookSpecs.register_columns: Answer("smalti.types:ColumnEntry", several=True),
    HookSpecs.register_optimizers: Answer("smalti.types:OptimizerEntry", several=True),
    HookSpecs.register_checkpoint_formats: Answer("smalti.types:CheckpointFormat", several=True),
    HookSpecs.register_caches: Answer("smalti.types:CacheEntry", several=True),
    HookSpecs.configure_distributed: Answer("smalti.types:DistributedPlan"),
    HookSpecs.configure_launch: Answer("smalti.types:LaunchEntry"),
    HookSpecs.configure_scan: Answer("smalti.types:ScanEntry"),
    HookSpecs.notices_before_launch: Answer("builtins:str", several=True),
    HookSpecs.build_terms: Answer("smalti.training.terms:Term", several=True),
    HookSpecs.detect_blocks: Answer("smalti.types:Block", several=True),
    HookSpecs.wrap_model: Answer("torch.nn:Module"),
    HookSpecs.build_optimizer: Answer("torch.optim:Optimizer"),
    HookSpecs.explain_error: Answer("smalti.errors:UserError"),
    HookSpecs.on_launch_end: Answer("builtins:str", several=True),
    HookSpecs.save_checkpoint: Answer("smalti.types:Checkpoint"),
    HookSpecs.load_checkpoint: Answer("smalti.checkpoint.reader:Loaded"),
    HookSpecs.on_gpu_fault: Answer("smalti.types:FaultAction"),
    HookSpecs.describe_run: Answer("smalti.types:RunValue", several=True),
    HookSpecs.diagnose: Answer("smalti.types:Finding", several=True),
}
"""Other hooks are not checked."""
ANSWERS = {hook.__name__: answer for hook, answer in _ANSWERS.items()}


def checked(function: Callable[..., object], hook: str, origin: Origin) -> Callable[..., object]:
    """The implementation of a hook with a check of its result. `functools.wraps` keeps it recognizable in tracebacks."""
    answer = ANSWERS[hook]

    @wraps(function)
    def call(*arguments: object) -> object:
        return answer.read(function(*arguments), hook, origin)

    return call


def _shown(value: object) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
