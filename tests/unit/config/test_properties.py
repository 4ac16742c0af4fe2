"""Whatever the configuration: flags, TOML and JSON say the same, and a Config can be written down and read again."""

import json
import math
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.config.config import Config
from smalti.config.options import Option
from smalti.config.resolution import resolve
from smalti.config.toml import as_toml
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of

SCHEMA = schema_of(load_plugins(Selection(without=("all",))))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["--x", "=", "a=b", "none", "[", '["a"]', "{env", "1e3", "true", "#", '"', "'''", "\\", "\n", "é ✂"]
)
SCALAR = st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
TABLE = st.dictionaries(st.text("abcdef_", min_size=1, max_size=5), SCALAR | st.lists(SCALAR, max_size=3), max_size=3)


def values_of(option: Option) -> st.SearchStrategy[object]:
    """Valid values of an option, as JSON holds them."""
    if option.name == "data_error_budget":
        return st.floats(0, 1, exclude_max=True) | st.integers(1, 100)
    if option.name == "dynamo_backend":
        return st.sampled_from(["inductor", "eager"])
    if option.name == "disk_low":
        return st.sampled_from(["0", "5GiB", "1.5 TB"])
    if option.name == "nodes":
        return st.sampled_from(["3", "1:1", "4:6"])
    if option.name == "validation_resolution":
        return st.sampled_from(["512", "512x768"])
    if option.choices:
        return st.sampled_from(option.choices)
    kinds = option._types
    if bool in kinds:
        return st.booleans()
    bounds = {
        key: getattr(each, key) for each in option.info.metadata for key in ("ge", "gt", "le", "lt") if hasattr(each, key)
    }
    low, high = bounds.get("ge", bounds.get("gt", -1000)), bounds.get("le", bounds.get("lt", 1000))
    if int in kinds:
        return st.integers(math.ceil(low), math.floor(high))
    if float in kinds:
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    if Path in kinds:
        return st.text("abc/. -=é", min_size=1, max_size=10).map(lambda text: str(Path(text)))
    if any(get_origin(kind) is tuple and kind.__args__[0] is not str for kind in kinds):
        return st.lists(TABLE, max_size=3)
    return TEXT if str in kinds else st.lists(TEXT, max_size=3)


NAMES = sorted(SCHEMA.options.keys() - {"accelerate_config"})  # which names a file that would have to be there
CONFIGURATIONS = (
    st.lists(st.sampled_from(NAMES), max_size=8, unique=True)
    # The number of nodes comes from `nodes` if it is not given; the checks before a launch refuse another one.
    .filter(lambda names: not {"nodes", "num_machines"} <= set(names))
    .flatmap(lambda names: st.fixed_dictionaries({name: values_of(SCHEMA.options[name]) for name in names}))
)


def same(one: Config, other: Config) -> bool:
    return one.groups == other.groups and one.digest == other.digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("property")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=CONFIGURATIONS)
def test_json_toml_and_flags_of_one_configuration_give_one_config(folder, values):
    (folder / "a.json").write_text(json.dumps({f"--{name}": value for name, value in values.items()}), encoding="utf-8")
    first = resolve(SCHEMA, file=folder / "a.json", environment={"env": "x"})
    (folder / "a.toml").write_text(as_toml(first), encoding="utf-8", newline="")
    assert same(resolve(SCHEMA, first.flags(), environment={}), first)
    assert same(resolve(SCHEMA, file=folder / "a.toml", environment={}), first)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=CONFIGURATIONS)
def test_a_config_written_as_flags_and_read_again_gives_the_same_flags(folder, values):
    (folder / "b.json").write_text(json.dumps(values), encoding="utf-8")
    flags = resolve(SCHEMA, file=folder / "b.json", environment={}).flags()
    assert resolve(SCHEMA, flags, environment={}).flags() == flags
