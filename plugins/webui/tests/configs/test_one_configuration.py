"""Form, file and flags of any configuration give the same configuration, and every option has a control."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.config import Config, Option, as_toml, draft
from smalti.plugins import Selection
from smalti_webui.configs.checking import checked, schema_with
from smalti_webui.configs.controls import as_text, choices_of, from_text, kind_of
from smalti_webui.configs.drafts import DraftStore
from smalti_webui.configs.flags import command_text, flags_of, split, with_flags
from smalti_webui.configs.toml_text import given as given_in, with_values

SCHEMA = schema_with(Selection())
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12) | st.sampled_from(
    ["--x", "a=b", "none", "[", '["a"]', "[soft] a cat", "a, b", "a\nb", "1e3", "true", '"', "'''", "\\", "é ✂", " a "]
)
ROWS = st.lists(st.fixed_dictionaries({"id": TEXT, "repeats": st.integers(0, 9), "crop": st.booleans()}), max_size=3)
BOUNDS = ("ge", "gt", "le", "lt")


def values_of(option: Option) -> st.SearchStrategy[object]:
    """Values of an option as a file has them. Some may be refused by a rule of their own."""
    kind = kind_of(option)
    if kind == "switch":
        return st.booleans()
    if kind == "choice":
        return st.booleans() if option.is_flag else st.sampled_from(choices_of(option))
    if kind == "tables":
        return ROWS
    if kind in ("names", "texts"):
        return st.lists(TEXT, max_size=3)
    if kind == "number":
        found = {key: getattr(each, key) for each in option.info.metadata for key in BOUNDS if hasattr(each, key)}
        low, high = found.get("ge", found.get("gt", -1000)), found.get("le", found.get("lt", 1000))
        if "integer" in option.kind:
            return st.integers(math.ceil(low), math.floor(high))
        return st.floats(low, high, exclude_min="gt" in found, exclude_max="lt" in found).map(lambda value: value + 0.0)
    return st.text("abc/. -=é", min_size=1, max_size=10) if kind == "path" else TEXT


def shown(option: Option) -> st.SearchStrategy[object]:
    """Values that a form shows: not those that may be secrets, such as text of webhooks that cannot be read."""
    return values_of(option).filter(lambda value: not option.is_secret(value))


NAMES = sorted(SCHEMA.options.keys() - {"accelerate_config", "plugins", "without", "defaults_from"})
CONFIGURATIONS = (
    st.lists(st.sampled_from(NAMES), max_size=6, unique=True)
    .filter(lambda names: not {"nodes", "num_machines"} <= set(names))
    .flatmap(lambda names: st.fixed_dictionaries({name: shown(SCHEMA.options[name]) for name in names}))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("property")


def read(folder: Path, text: str) -> Config:
    (folder / "read.toml").write_text(text, encoding="utf-8", newline="")
    return draft(SCHEMA, file=folder / "read.toml", environment={})


def same(one: Config, other: Config) -> bool:
    return not other.problems and one.groups == other.groups and one.digest == other.digest


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=CONFIGURATIONS, comment=st.booleans())
def test_form_file_and_flags_of_a_valid_configuration_give_the_same_values_and_digest(folder, values, comment):
    """Whatever is filled in field by field, saved and read, or copied as a command."""
    (folder / "a.json").write_text(json.dumps(values), encoding="utf-8")
    first = draft(SCHEMA, file=folder / "a.json", environment={})
    if first.problems:
        valid = {name: each for name, each in values.items() if name not in {problem.option for problem in first.problems}}
        (folder / "a.json").write_text(json.dumps(valid), encoding="utf-8")
        first = draft(SCHEMA, file=folder / "a.json", environment={})
        values = valid
    if first.problems:
        return
    form = "# mine\n" if comment else ""
    for name, value in values.items():
        option = SCHEMA.options[name]
        form = with_values(form, SCHEMA, {name: from_text(option, as_text(option, value))})
    assert same(read(folder, form), first), form
    made = DraftStore(folder / "drafts").new(as_toml(first), name="a")
    found = checked(made, DraftStore(folder / "drafts").file(made.id))
    flags = flags_of(found, read(folder, made.text))
    assert same(draft(SCHEMA, split(command_text(flags)), environment={}), first), flags
    assert same(read(folder, with_flags(form, SCHEMA, flags)), first)
    assert with_flags(form, SCHEMA, flags).count("# mine") == comment


def test_every_option_has_help_a_section_and_a_control_that_holds_its_default():
    for option in SCHEMA.options.values():
        assert option.help, option.name
        assert option.group.title, option.name
        kind = kind_of(option)
        assert kind != "choice" or choices_of(option), option.name
        default = [*option.default] if isinstance(option.default, tuple) else option.default
        shown = as_text(option, str(default) if isinstance(default, Path) else default)
        value = from_text(option, shown)
        assert (option.default if value is None else option.check(value)) == option.default, (option.name, kind, shown)


@pytest.mark.parametrize("name", ["learning_rate", "seed", "use_ema", "mixed_precision", "datasets", "output_dir"])
def test_what_is_not_valid_stays_as_it_was_typed(name):
    option = SCHEMA.options[name]
    text = "[[datasets]]\nid = 3\n# why\nfoo = [1, {a = 2}]" if name == "datasets" else "1e-4 or so"
    written = with_values("", SCHEMA, {name: from_text(option, text)})
    assert as_text(option, given_in(written, SCHEMA)[name]) == text
