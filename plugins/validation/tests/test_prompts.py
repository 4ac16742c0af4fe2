"""The prompts of validation images: from the options and from a library."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.errors import problems_in
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_validation.prompts import validation_prompts

SCHEMA = schema_of(load_plugins(Selection(only=("validation",))))


def prompts(*flags: str, environment=None):
    return validation_prompts(resolve(SCHEMA, flags, environment=environment or {}))


@pytest.fixture
def library(tmp_path):
    def write(text: str, name: str = "prompts.json") -> str:
        (tmp_path / name).write_text(text)
        return f"--validation_prompt_library={tmp_path / name}"

    return write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"fox": "a fox", "boat": {"prompt": "a boat", "seed": 7, "adapter_strength": 0.4, "resolution": 512}}'),
        ("a.toml", 'fox = "a fox"\n[boat]\nprompt = "a boat"\nseed = 7\nadapter_strength = 0.4\nresolution = "512x512"'),
        ("a.yaml", "fox: a fox\nboat: {prompt: a boat, seed: 7, adapter_strength: 0.4, resolution: 512}"),
    ],
)
def test_a_library_names_prompts_and_an_entry_can_say_more(library, name, text):
    fox, boat = prompts(library(text, name), "--validation_seed=3", "--validation_negative_prompt=ugly")
    assert (fox.stem, fox.prompt, fox.negative_prompt, fox.seed, fox.adapter_strength, fox.sizes) == (
        *("fox", "a fox", "ugly", 3, 1.0),
        (),
    )
    assert (boat.stem, boat.prompt, boat.seed, boat.adapter_strength, boat.sizes) == ("boat", "a boat", 7, 0.4, ((512, 512),))


def test_the_references_name_of_the_option_is_accepted(library):
    flag = library('{"fox": "a fox"}').replace("validation_prompt_library", "user_prompt_library")
    assert [each.prompt for each in prompts("--validation_prompt=a cat", flag)] == ["a cat", "a fox"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), st.data())
def test_other_entries_come_and_go_without_changing_a_prompt(library, names, data):
    all_of_them = {each.stem: each for each in prompts(library(json.dumps({name: f"a {name}" for name in names})))}
    some = data.draw(st.permutations(names))[: data.draw(st.integers(1, len(names)))]
    found = prompts(library(json.dumps({name: f"a {name}" for name in some})))
    assert [each.stem for each in found] == some
    assert all(all_of_them[each.stem] == each for each in found)


@pytest.mark.parametrize(
    ("entries", "messages"),
    [
        ({}, ["has no prompts"]),
        ({"": "a", "!!": "b"}, ["'' cannot name", "'!!' cannot name"]),
        ({"fox": 3, "boat": {"seed": -1}}, ["an entry cannot be 3", "has no prompt", "seed cannot be -1"]),
        ({"fox": {"prompt": "a", "negative": "b"}}, ["unknown key 'negative'"]),
        ({"fox": {"prompt": "a", "resolution": "big", "seed": True}}, ["resolution cannot be 'big'", "seed cannot be True"]),
        ({"fox": {"prompt": "a", "adapter_strength": 1e9}}, ["adapter_strength cannot be 1000000000.0"]),
        ({"fox": {"prompt": ["a"]}}, [r"prompt cannot be \['a'\]"]),
    ],
)
def test_everything_that_is_wrong_with_a_library_is_said_at_once(library, entries, messages):
    with pytest.raises(UserError) as error:
        prompts(library(json.dumps(entries)))
    problems = problems_in(error.value)
    assert len(problems) == len(messages)
    for message in messages:
        assert any(re.search(message, problem.message) for problem in problems)
    assert all(problem.fix for problem in problems)


def test_a_library_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        prompts(f"--validation_prompt_library={tmp_path / 'no.toml'}")


def test_a_variable_in_a_prompt_is_not_shown(library):
    first, second = prompts("--validation_prompt={env:WHO} runs", library('{"fox": "{env:WHO}"}'), environment={"WHO": "Zoe"})
    assert (first.prompt, first.shown, first.stem) == ("Zoe runs", "{env:WHO} runs", "00-env-who-runs")
    assert second.prompt == "{env:WHO}"
