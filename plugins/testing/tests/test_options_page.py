"""One declaration of an option is a row of the reference page."""

from smalti import OptionGroup, Options, option
from smalti.config import Schema
from smalti_testing.options_page import reference_page


class Sample(Options):
    small: float = option(1e-8, help="A | B.", gt=0, le=1)
    whole: float = option(1024, help="A whole number.")
    sign: int = option(
        0, help="Any.", level="expert", when="whole", tradeoff="more for less", aliases=["old"], accelerate="key"
    )


def test_a_row_of_the_reference_page_tells_everything():
    page = reference_page(Schema((OptionGroup(name="sample", title="Sample", options=Sample),)))
    assert "| `small` | number (> 0, <= 1) | 1e-08 | A \\| B. |" in page
    told = "Any. Only with `--whole`. Effect: more for less. Also accepted: `old`. Accelerate YAML: `key`."
    assert f"| `sign` | integer | 0 | {told} |" in page
