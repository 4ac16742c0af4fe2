"""What holds for the tables and importers of all trainers."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.data import ENTRY_KEYS, catalog_of
from smalti.plugins import load_plugins
from smalti_migrate.commented_toml import as_toml
from smalti_migrate.importing import import_files
from smalti_migrate.tables import PAGE

_COLUMNS = catalog_of(load_plugins()).column_keys.values()
OF_DATASETS = {*ENTRY_KEYS, *(key for keys in _COLUMNS for key in keys.model_fields), "datasets"}
RULES = [rules for tables in PAGE.values() for rules in tables.values()]


@pytest.mark.parametrize("rules", RULES, ids=[f"{trainer}-{title}" for trainer, tables in PAGE.items() for title in tables])
def test_a_table_names_each_key_once_and_options_that_exist(everything, rules):
    keys = [rule.key for rule in rules]
    assert sorted(key for key in set(keys) if keys.count(key) > 1) == []
    assert {name for rule in rules for name in rule.options} - everything.options.keys() - OF_DATASETS == set()


def nested(values: dict[str, object]) -> dict[str, object]:
    """Dotted keys as nested tables. A key that is also the beginning of another is left out."""
    result: dict[str, object] = {}
    for key, value in sorted(values.items(), key=lambda item: -item[0].count(".")):
        *parts, last = key.split(".")
        table = result
        for part in parts:
            table = table.setdefault(part, {})
        table.setdefault(last, value)
    return result


def kohya(values):
    return {"network_dim": 4, "network_module": "networks.lora_flux", **values}


def aitoolkit(values):
    process = nested({"type": "sd_trainer", "network.linear": 4, "model.is_flux": True, **values})
    return {"config": {"name": "x", "process": [process]}}


def onetrainer(values):
    return nested({"training_method": "LORA", "base_model_name": "x", **values, "model_type": "FLUX_DEV_1"})


SHAPES = dict(zip(PAGE, (kohya, aitoolkit, onetrainer), strict=True))
json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["lora", "cosine", "AdamW8bit", "0.1", "STEP", "LOGIT_NORMAL", "512,768"]),
    st.lists(st.one_of(st.text(max_size=4), st.dictionaries(st.sampled_from(["path", "folder_path"]), st.text())), max_size=3),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_the_values_the_result_is_toml(everything, tmp_path_factory, data):
    trainer = data.draw(st.sampled_from(list(SHAPES)))
    keys = [rule.key for rule in PAGE[trainer]["Options"]]
    values = data.draw(st.dictionaries(st.sampled_from(keys), json_values, max_size=12))
    path = Path(tmp_path_factory.mktemp("any")) / "train.json"
    path.write_text(json.dumps(SHAPES[trainer](values)))
    result = import_files([path], everything)
    assert result.trainer == trainer
    read = tomllib.loads(as_toml(result, everything))
    assert read.keys() == result.lines.keys() | ({"datasets"} if result.datasets else set())
