"""Declared options and the flags that come from them."""

from pathlib import Path
from typing import Literal

import pytest

from smalti.config.flags import parse_flags
from smalti.config.options import Names, OptionGroup, Options, Schema, Tables, Texts, option, unknown
from smalti.errors import Problem, UserError


class Sample(Options):
    count: int = option(3, help="A number.", ge=0, aliases=["number_of_things"])
    share: float | None = option(None, help="A share.", gt=0, le=1)
    switch: bool = option(True, help="A switch.", aliases=["toggle"])
    mode: Literal["max-speed", "no", "slow_start"] = option("no", help="A choice.")
    folder: Path | None = option(None, help="A path.")
    words: Names = option((), help="Words.")
    lines: Texts = option((), help="Texts.")
    rows: Tables = option((), help="Tables.")
    password: str | None = option(None, help="A secret.", secret=True)
    learning_rate: float = option(1.0, help="With initials.")


SAMPLE = Schema((OptionGroup(name="sample", title="Sample", options=Sample),))


def parsed(*words: str) -> dict[str, object]:
    problems: list[Problem] = []
    found = parse_flags(words, SAMPLE, problems, [])
    assert not problems, problems
    return {name: SAMPLE.options[name].check(given.value) for name, given in found.items()}


def complaints(*words: str) -> str:
    problems: list[Problem] = []
    parse_flags(words, SAMPLE, problems, [])
    return "\n".join(map(str, problems))


@pytest.mark.parametrize(
    "words", [("--learning_rate", "0.5"), ("--learning-rate=0.5",), ("--Learning-Rate", "0.5"), ("--LEARNING_RATE=5e-1",)]
)
def test_a_flag_may_have_dashes_or_underscores_any_case_and_an_equals_sign_or_none(words):
    assert parsed(*words) == {"learning_rate": 0.5}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--switch",), True),
        (("--switch", "false"), False),
        (("--switch=no",), False),
        (("--switch", "off"), False),
        (("--switch=1",), True),
        (("--no_switch",), False),
        (("--no-switch",), False),
        (("--no_toggle",), False),
        (("--switch", "--count=1"), True),
    ],
)
def test_a_switch_is_bare_negated_or_given_a_word(words, value):
    assert parsed(*words)["switch"] is value


def test_a_negated_switch_takes_no_value():
    assert "--no_switch: takes no value" in complaints("--no_switch=false")


def test_only_switches_have_a_negated_form():
    assert "unknown option --no_count" in complaints("--no_count")


def test_a_negative_number_is_a_value():
    assert parsed("--learning_rate", "-1", "--count=2") == {"learning_rate": -1.0, "count": 2}


def test_a_value_may_hold_equals_signs_and_begin_with_dashes_after_one():
    assert parsed("--lines=--a=b") == {"lines": ("--a=b",)}


def test_a_flag_does_not_swallow_the_next_one():
    assert "--folder: needs a value" in complaints("--folder", "--cuont=1")
    assert "unknown option --cuont" in complaints("--folder", "--cuont=1")


def test_the_last_occurrence_of_a_flag_wins():
    assert parsed("--count=1", "--number_of_things=2") == {"count": 2}


def test_lists_grow_with_each_occurrence():
    assert parsed("--words=a, b", "--words", "c", '--words=["d, e"]') == {"words": ("a", "b", "c", "d, e")}


def test_texts_keep_their_commas_and_brackets():
    assert parsed("--lines", "a, b", "--lines=[soft] c") == {"lines": ("a, b", "[soft] c")}


def test_tables_come_as_json_one_or_many():
    assert parsed('--rows={"id": "a"}', '--rows=[{"id": "b"}]') == {"rows": ({"id": "a"}, {"id": "b"})}


@pytest.mark.parametrize("spelling", ["MAX_SPEED", "max-speed", "Max-Speed", " max_speed "])
def test_a_choice_may_be_spelled_in_any_case_with_dashes_or_underscores(spelling):
    assert parsed(f"--mode={spelling}") == {"mode": "max-speed"}


def test_false_is_the_choice_no_because_yaml_takes_one_for_the_other():
    assert SAMPLE.options["mode"].check(False) == "no"


def test_none_takes_back_an_option_that_may_be_none():
    assert parsed("--share=none", "--folder=null") == {"share": None, "folder": None}


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/somebody")
    assert parsed("--folder=~/runs") == {"folder": Path("/home/of/somebody/runs")}


def test_a_secret_is_refused_on_the_command_line():
    assert "--password: other users can read secrets" in complaints("--password=abc")


@pytest.mark.parametrize("spelling", ["--cuont", "--coun", "--number_of_thing"])
def test_a_mistyped_or_abbreviated_flag_is_refused_with_the_nearest_name(spelling):
    assert f"unknown option {spelling}" in complaints(spelling)
    assert "did you mean --count" in complaints(spelling)


def test_the_same_words_in_another_order_are_the_name_that_is_meant(schema):
    assert schema.near("--disable_vae_cache")[0] == "vae_cache_disable"


def test_initials_find_the_name():
    assert SAMPLE.near("lr") == ["learning_rate"]


def test_words_that_are_no_flags_are_refused():
    assert "unexpected argument '-x'" in complaints("-x")
    assert "put the configuration file first" in complaints("run.toml")


def test_every_problem_is_told():
    assert complaints("--a", "--b", "--c").count("unknown option") == 3


def test_an_option_of_a_package_that_is_not_there_names_it():
    assert unknown("--fsdp_enable", SAMPLE, where="").package == "smalti-fsdp2"


def test_an_option_that_its_installed_package_does_not_know_is_only_unknown():
    class Installed(Options):
        fsdp_enable: bool = option(False, help="It is there.")

    schema = Schema((OptionGroup(name="fsdp2", title="FSDP2", options=Installed),))
    assert (unknown("fsdp_enabel", schema, where="").package, unknown("fsdp_enabel", schema, where="").fix) == (
        "",
        "did you mean fsdp_enable?",
    )


def test_two_groups_cannot_declare_one_name():
    class Again(Options):
        toggle: bool = option(False, help="Taken as an alias.")

    with pytest.raises(UserError, match="the option 'toggle' is declared by 'sample' and by 'again'"):
        Schema((*SAMPLE.groups, OptionGroup(name="again", title="Again", options=Again)))


def test_an_option_without_help_is_refused():
    class Bare(Options):
        naked: int = 3

    with pytest.raises(TypeError, match=r"naked must be declared with option"):
        Schema((OptionGroup(name="bare", title="Bare", options=Bare),))


def test_an_option_that_may_be_none_has_none_as_its_default():
    class Unclear(Options):
        limit: int | None = option(5, help="Is none 5 or no limit?")

    with pytest.raises(TypeError, match="limit may be None, so None must be its default"):
        Schema((OptionGroup(name="unclear", title="Unclear", options=Unclear),))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("count", "integer"), ("share", "number"), ("switch", "true|false"), ("folder", "path"), ("words", "list")],
)
def test_the_kind_of_an_option_is_told_in_words(name, kind):
    assert SAMPLE.options[name].kind == kind
