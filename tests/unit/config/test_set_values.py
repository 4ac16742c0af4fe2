"""Options set in the text of a TOML file; all else stays as it was written."""

import pytest
import tomlkit

from smalti.config.toml import set_values

SET = {
    "a value keeps its place and its comment": (
        'seed = 3  # why\n# next\nlearning-rate = "1e-4"\n',
        {"seed": 4, "learning_rate": "abc"},
        'seed = 4  # why\n# next\nlearning-rate = "abc"\n',
    ),
    "a removed value leaves the comments of others": (
        "# one\nseed = 3\n# two\nuse_ema = true\n",
        {"seed": None},
        "# one\n# two\nuse_ema = true\n",
    ),
    "a new value stands before the tables": ("[[datasets]]\nid = 'a'\n", {"seed": 1}, "seed = 1\n[[datasets]]\nid = 'a'\n"),
    "a table of its section gets a new value": ("[run]\n# x\n", {"seed": 1}, "[run]\n# x\nseed = 1\n"),
    "rows become tables at the end": (
        "seed = 1\n",
        {"datasets": [{"id": "a"}, {"id": "b"}]},
        'seed = 1\n\n[[datasets]]\nid = "a"\n\n[[datasets]]\nid = "b"\n',
    ),
}


@pytest.mark.parametrize("case", SET)
def test_values_are_set_in_a_text(schema, case):
    text, values, expected = SET[case]
    assert set_values(text, schema, values) == expected


def test_rows_that_were_read_keep_their_comments(schema):
    rows = "[[datasets]]\nid='a' # one\n# mid\n[[datasets]]\nid='b'\n"
    assert set_values("seed = 1\n", schema, {"datasets": tomlkit.parse(rows)["datasets"]}) == f"seed = 1\n\n{rows}"
