"""The facts of a model, counted in a process of its own and kept for the next time. Imports no torch.

`python -m smalti_plan.counted` is that process: options as JSON come in, facts go out.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

from smalti import UserError
from smalti.config import Config, restore
from smalti.hookspecs import HookSpecs
from smalti.parallel import in_bf16
from smalti.plugins import CacheFile, Plugins, Selection, family_entry, find_family, load_plugins, schema_of
from smalti.system import load_json
from smalti_plan.facts import ModelFacts
from smalti_plan.rehearsal.rehearse import model_files
from smalti_plan.rehearsal.request import values_for

CACHE = "model-facts"
_UNRELATED = frozenset(
    (
        *("run", "launch", "optimizer", "validation", "checkpoints", "tracking", "plugins", "fsdp", "context", "deepspeed"),
        *("trackers", "plan"),
    )
)
"""Sections of options that change no count."""
_SHOWN = 2000
_MARK = "smalti-facts:"


def facts_cache() -> CacheFile:
    return CacheFile(CACHE)


def facts_of(config: Config, plugins: Plugins, kind: str) -> ModelFacts:
    """Facts for the largest bucket that is known, on devices of this kind.

    Raises UserError as a run would if the model cannot be built.
    """
    family_entry(config, plugins)  # raises for one that is unknown, before a process is started
    request = request_of(config, kind)
    store, key = facts_cache(), _key(request, config, plugins)
    if isinstance(known := store.get(key), dict):
        try:
            return ModelFacts.from_json(known)
        except (TypeError, KeyError):
            pass  # of a version with other fields
    found = _in_process(request, config)
    store.put(key, found.as_json())
    return found


def request_of(config: Config, kind: str) -> dict[str, object]:
    """What `count` is asked for."""
    values = {**values_for(config, kind), "gradient_checkpointing": False}
    return {"values": values, "accelerate": dict(config.accelerate), "kind": kind}


def _key(request: Mapping[str, object], config: Config, plugins: Plugins) -> str:
    """Changes with the options of model and data, the files that describe the model, and the versions that count."""
    from smalti_plan.largest_bucket import buckets_key  # needs numpy, which a launch without a forecast does not import

    names = {name for group in config.schema.groups if group.name not in _UNRELATED for name in group.options.model_fields}
    values = cast(dict[str, object], request["values"])
    related = {name: value for name, value in sorted(values.items()) if name in names}
    versions = (*plugins.versions, f"torch {version('torch')}")
    own = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.glob("*.py"))]
    data = buckets_key(config, plugins)
    parts = [related, request["kind"], versions, own, model_files(config.values()), data]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _in_process(request: Mapping[str, object], config: Config) -> ModelFacts:
    done = subprocess.run(
        [sys.executable, "-m", "smalti_plan.counted"],
        input=json.dumps(request),
        env={**os.environ, **config.secrets()},
        capture_output=True,
        text=True,
    )
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        text = done.stderr.strip()[-_SHOWN:]
        raise UserError(f"the process that counts the model ended with {reason}: {text}", fix="free memory, or report this")
    answer = load_json(answers[-1])
    if "error" in answer:
        raise UserError(answer["error"], fix=answer["fix"])
    return ModelFacts.from_json(answer)


def count(request: Mapping[str, object]) -> ModelFacts:
    """The facts, counted in this process. Imports torch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from smalti.data import pass_parts
    from smalti.models import dry_run
    from smalti.training import POLICY, build_model, denoising_loss
    from smalti_plan.counting import count_facts
    from smalti_plan.largest_bucket import largest_bucket
    from smalti_plan.rehearsal.samples import most_passes

    values = cast(dict[str, object], request["values"])
    only, without = (tuple(cast(list[str], values[name])) for name in ("plugins", "without"))
    plugins = load_plugins(Selection(only=only, without=without))
    schema = schema_of(plugins)
    chosen = {name: value for name, value in values.items() if name in schema.options}
    config = restore(schema, chosen, cast(Mapping[str, object], request["accelerate"]))
    with dry_run(), FakeTensorMode(allow_non_fake_inputs=True):
        family = find_family(config, plugins)
    model, blocks = build_model(config, plugins, family)
    largest = largest_bucket(config, plugins, family.alignment)
    loss = denoising_loss(config, family, "cpu", terms=plugins.gather(HookSpecs.build_terms, config=config, family=family))
    _, needs = most_passes(config, plugins, loss)
    trained = sum(name.startswith(POLICY) for name in needs)
    found = count_facts(
        family,
        model,
        blocks,
        width=largest.bucket.width,
        height=largest.bucket.height,
        bf16=in_bf16(config),
        kind=str(request["kind"]),
        source=largest.source,
    )
    others = {(name, pass_parts(name).get("latents") or turn.latents) for name in needs for turn in loss.turns}
    others = {each for each in others if not each[0].startswith(POLICY)}
    sample = replace(found.sample, trained_passes=1 + trained, other_passes=len(others), turns=len(loss.turns))
    return replace(found, sample=sample)


def _main() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        answer = count(load_json(sys.stdin.read())).as_json()
    except UserError as error:
        answer = {"error": error.message, "fix": error.fix}
    except Exception as error:  # noqa: BLE001 - what a run would end with
        from smalti_plan.rehearsal.child import explained

        found = explained(error, "forward")
        answer = {"error": f"the model cannot be counted: {found.message}", "fix": f"look at {found.where}"}
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
