"""All of SimpleTuner's options that mean something else here, or nothing. Options that are the same in both are in no table."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.data_keys import DATA_KEYS
from smalti_migrate.simpletuner.model_keys import MODEL_KEYS
from smalti_migrate.simpletuner.rules import Rule, refused
from smalti_migrate.simpletuner.run_keys import PREFIXES, RUN_KEYS
from smalti_migrate.simpletuner.training_keys import TRAINING_KEYS

KEYS: Mapping[str, Rule] = {**MODEL_KEYS, **DATA_KEYS, **TRAINING_KEYS, **RUN_KEYS}


def rule_of(name: str) -> Rule | None:
    """What becomes of an option with this name, in lower case with underscores; None if no table has it."""
    if (rule := KEYS.get(name)) is not None:
        return rule
    feature = next((rule for start, rule in PREFIXES.items() if name.startswith(start)), None)
    return refused(feature.why, "set it to false", False) if feature and name.endswith("_enabled") else feature
