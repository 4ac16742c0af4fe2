"""What this host refuses to train, in the words of the plugins: each is asked about the smallest run that wants it."""

from __future__ import annotations

from smalti import HookSpecs
from smalti.config import Schema, draft
from smalti.plugins import Plugins

_DEEPSPEED = '--deepspeed_config={"zero_optimization": {"stage": 2}}'
_CONTEXT = ("--num_processes=2", "--context_parallel_size=2")


def refusals(plugins: Plugins, schema: Schema, *, on_cpu: bool) -> dict[str, str]:
    """Why "deepspeed" and "context" parallelism cannot train here; "" for what can, and for what no plugin declares."""
    found = {"deepspeed": "", "context": ""}
    if "deepspeed_config" in schema.options:
        config = draft(schema, ["--accelerate_config=none", _DEEPSPEED], environment={})
        problems = plugins.call_one("deepspeed", HookSpecs.check_config, config=config) or []
        found["deepspeed"] = "; ".join(each.message for each in problems)
    if "context_parallel_size" in schema.options:
        words = ["--accelerate_config=none", *_CONTEXT, *(["--use_cpu"] if on_cpu else [])]
        findings = plugins.call_one("fsdp2", HookSpecs.diagnose, config=draft(schema, words, environment={}))
        found["context"] = "; ".join(each.message for each in findings or [] if each.level == "error")
    return found
