"""What a plugin can make of an Accelerate YAML beyond keys that are the values of options."""

import pytest

from smalti.config.accelerate_yaml import merge
from smalti.config.core_options import GROUPS
from smalti.config.options import OptionGroup, Options, Schema, Translation, option
from smalti.config.resolution import resolve
from smalti.errors import ConfigError, Problem


class Glaze(Options):
    glaze_enable: bool = option(False, help="Glaze.", accelerate="distributed_type=FSDP")
    glaze_coats: int = option(1, help="Coats.", accelerate="glaze_config.coats", ge=1)
    glaze_shine: bool = option(False, help="Shine.")


def translate(values, schema) -> Translation:
    section = values.get("glaze_config", {})
    return Translation(
        values={
            **({"glaze_shine": ("glaze_config.finish", section["finish"] == "gloss")} if "finish" in section else {}),
            **({"glaze_coats": ("glaze_config.coats", None)} if section.get("coats") == 0 else {}),
        },
        notices=[("glaze_config.colour", "has no effect: tiles have their own")] if "colour" in section else [],
        problems=[Problem(message="cannot be dry", where="glaze_config.water", fix="water: true")]
        if "water" in section
        else [],
    )


SCHEMA = Schema((*GROUPS, OptionGroup(name="glaze", title="Glaze", options=Glaze, translate=translate)))


class Kiln(Options):
    kiln_program: str | None = option(None, help="Program.")


def derived(given) -> Translation:
    heat, _, coats = str(given.get("kiln_program", "")).partition(";")
    problems = [Problem(message="too hot", where="heat", fix="1000")] if heat == "2000" else []
    notices = [("heat", "is low")] if heat == "10" else []
    return Translation(values={"glaze_coats": ("coats", int(coats))} if coats else {}, notices=notices, problems=problems)


FIRED = Schema((*SCHEMA.groups, OptionGroup(name="kiln", title="Kiln", options=Kiln, derived=derived)))


def fire(*flags: str):
    return resolve(FIRED, ("--accelerate_config=none", *flags), environment={})


@pytest.fixture
def read(write):
    def give(section: str, *flags: str, kind: str = "MULTI_GPU"):
        path = write("user.yaml", f"distributed_type: {kind}\nmixed_precision: bf16\nglaze_config: {section}\n")
        return resolve(SCHEMA, ("--accelerate_config", str(path), *flags), environment={})

    return give


def test_a_translation_gives_options_with_the_place_of_the_key_that_stands_for_them(read, tmp_path):
    config = read("{finish: gloss, coats: 3}")
    assert (config[Glaze].glaze_shine, config[Glaze].glaze_coats) == (True, 3)
    assert config.source("glaze_shine") == f"Accelerate YAML (glaze_config.finish in {tmp_path / 'user.yaml'})"


def test_flags_go_before_a_translation(read, tmp_path):
    config = read("{finish: gloss}", "--no_glaze_shine")
    assert config[Glaze].glaze_shine is False
    assert config.notices == (
        f"glaze_shine: 'false' from --no_glaze_shine wins over True from glaze_config.finish in {tmp_path / 'user.yaml'}",
    )


def test_a_translation_can_leave_an_option_open_that_its_key_would_give(read):
    assert read("{coats: 0}").source("glaze_coats") == "default"


def test_remarks_and_problems_are_told_with_their_file(read, tmp_path):
    path = tmp_path / "user.yaml"
    assert read("{colour: red}").notices == (f"glaze_config.colour in {path} has no effect: tiles have their own",)
    with pytest.raises(ConfigError, match=r"glaze_config\.water in .*user\.yaml: cannot be dry"):
        read("{water: no}")


def test_a_section_that_is_no_table_is_refused(read):
    with pytest.raises(ConfigError, match="glaze_config is a str, not a table of settings"):
        read("thick")


def test_a_strategy_that_is_on_excludes_one_whose_plugin_is_missing(read):
    with pytest.raises(ConfigError, match=r"FSDP and DeepSpeed cannot be enabled simultaneously\."):
        read("{}", "--glaze_enable", kind="DEEPSPEED")
    with pytest.raises(ConfigError) as off:
        read("{}", kind="DEEPSPEED")
    assert "simultaneously" not in str(off.value)


def test_none_takes_a_key_out_of_a_merged_file_and_leaves_no_trace_where_there_was_none():
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None}, "d": None, "e": {"f": None, "g": 4}}) == {
        "a": {"c": 2},
        "e": {"g": 4},
    }


PRECISION = {
    ("distributed_type: NO", ""): True,
    ("distributed_type: NO\nmixed_precision: bf16", ""): False,
    ("distributed_type: NO\nmixed_precision: 'no'", ""): False,
    ("distributed_type: NO", "--mixed_precision=bf16"): False,
}


@pytest.mark.parametrize(("text", "flag"), PRECISION)
def test_a_file_without_a_precision_is_fp32_to_accelerate_and_that_is_said(tmp_path, text, flag):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    notices = resolve(SCHEMA, [flag] if flag else [], file=path, environment={}).notices
    assert any("Accelerate computes in fp32 then" in notice for notice in notices) == PRECISION[text, flag]


def test_a_key_that_accelerate_does_not_have_gets_a_notice(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: NO\nmixed_precision: 'no'\ninvalid_key: value\nglaze_config: {coats: 2}\n")
    notices = resolve(SCHEMA, file=path, environment={}).notices
    assert [notice for notice in notices if "no such key" in notice] == [
        f"invalid_key in {path} has no effect: Accelerate has no such key, and refuses a file that has it"
    ]


# --- values that lie in those of other options ----------------------------------------------------------------------


def test_a_value_that_lies_in_that_of_another_option_counts_where_nothing_else_gives_one():
    config = fire("--kiln_program=10;3")
    assert (config[Glaze].glaze_coats, config.source("glaze_coats")) == (3, "Kiln (coats in kiln_program)")
    assert config.notices == ("heat in kiln_program is low",)


def test_a_value_that_is_given_elsewhere_too_must_be_the_same():
    assert fire("--kiln_program=900;3", "--glaze_coats=3").source("glaze_coats") == "flag (--glaze_coats)"
    with pytest.raises(ConfigError, match="--glaze_coats: is '2', and coats in kiln_program says 3"):
        fire("--kiln_program=900;3", "--glaze_coats=2")


def test_what_is_implied_is_validated_and_complained_about_like_what_is_given():
    with pytest.raises(ConfigError, match="glaze_coats cannot be 0"):
        fire("--kiln_program=900;0")
    with pytest.raises(ConfigError, match="too hot"):
        fire("--kiln_program=2000")
