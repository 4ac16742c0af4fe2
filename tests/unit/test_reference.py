"""Every option in words: one declaration is help, reference page and JSON."""

import json

import pytest

from smalti.commands.train import USAGE
from smalti.options import OptionGroup, Options, Schema, option
from smalti.reference import default_text, describe, help_text, reference_page


class Sample(Options):
    small: float = option(1e-8, help="A | B.", gt=0, le=1)
    whole: float = option(1024, help="A whole number.")
    sign: int = option(0, help="Any.", level="expert", when="whole", trade="more for less", aliases=["old"], accelerate="key")


SAMPLE = Schema((OptionGroup(name="sample", title="Sample", options=Sample),))


@pytest.mark.parametrize(("name", "text"), [("small", "1e-08"), ("whole", "1024"), ("sign", "0")])
def test_defaults_are_told_as_one_would_write_them(name, text):
    assert default_text(SAMPLE.options[name]) == text


def test_a_row_of_the_reference_page_tells_everything():
    page = reference_page(SAMPLE)
    assert "| `small` | number (> 0, <= 1) | 1e-08 | A \\| B. |" in page
    told = "Any. Only with `--whole`. Trade-off: more for less. Also accepted: `old`. Accelerate YAML: `key`."
    assert f"| `sign` | integer | 0 | {told} |" in page


def test_help_leaves_out_what_few_need():
    assert "--sign" not in help_text(SAMPLE, everything=False)
    assert "--sign" in help_text(SAMPLE, everything=True)


def test_help_says_how_to_turn_a_switch_off(schema):
    text = help_text(schema, everything=True)
    assert "--[no_]use_ema" in text
    assert "--[no_]seed" not in text


def test_help_fits_the_terminal(monkeypatch, schema):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, (USAGE + help_text(schema, everything=True)).splitlines())) <= 80


def test_every_option_can_be_described_in_json(schema):
    described = [describe(each) for each in schema.options.values()]
    assert json.loads(json.dumps(described)) == described
