"""Every option in words: one declaration is help and JSON."""

import json

import pytest

from smalti.cli.pages.options import default_text, describe, facts, matching
from smalti.config.options import OptionGroup, Options, Schema, option
from smalti.plugins import load_plugins, schema_of


class Sample(Options):
    small: float = option(1e-8, help="A | B.", gt=0, le=1)
    whole: float = option(1024, help="A whole number.")
    sign: int = option(
        0, help="Any.", level="expert", when="whole", tradeoff="more for less", aliases=["old"], accelerate="key"
    )


SAMPLE = Schema((OptionGroup(name="sample", title="Sample", options=Sample),))


@pytest.mark.parametrize(("name", "text"), [("small", "1e-08"), ("whole", "1024"), ("sign", "0")])
def test_defaults_are_told_as_one_would_write_them(name, text):
    assert default_text(SAMPLE.options[name]) == text


def test_no_option_says_its_default_twice():
    options = schema_of(load_plugins()).options.values()
    texts = {one.name: " ".join(facts(one, choices=True, whole=True)) for one in options}
    assert [name for name, text in texts.items() if text.count("Default:") > 1] == []
    assert all("Default:" in texts[name] for name in ("learning_rate", "seed"))


@pytest.mark.parametrize(
    ("whole", "text"), [(False, "Only with --whole. Effect: more for less."), (True, "Accelerate YAML: key.")]
)
def test_facts_are_sentences(whole, text):
    assert text in " ".join(facts(SAMPLE.options["sign"], choices=False, whole=whole))


def test_facts_of_a_number_have_its_range_only_if_all_is_wanted():
    assert ["Range: > 0, <= 1." in facts(SAMPLE.options["small"], choices=False, whole=whole) for whole in (True, False)] == [
        True,
        False,
    ]


FOUND = {
    "ema": ["use_ema", "ema_decay", "ema_device"],
    "--seed": ["seed", "validation_seed"],
    "max-train": ["max_train_steps"],
    "Toy family": ["toy_width", "toy_depth", "toy_heads", "toy_patch", "toy_sample_shift"],
    "toy": ["toy_width", "toy_depth", "toy_heads", "toy_patch", "toy_sample_shift"],
    "plugin": ["plugins"],
    "training_step": [],
}


@pytest.mark.parametrize("topic", FOUND)
def test_a_topic_is_a_section_or_a_part_of_names(schema, topic):
    assert [option.name for option in matching(schema, topic)] == FOUND[topic]


def test_a_section_as_a_topic_has_all_its_options(schema):
    names = {option.name for option in matching(schema, "optimizer")}
    assert names == set(next(group for group in schema.groups if group.name == "optimizer").options.model_fields)


def test_every_option_can_be_described_in_json(schema):
    described = [describe(each) for each in schema.options.values()]
    assert json.loads(json.dumps(described)) == described
