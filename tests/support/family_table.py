"""The page docs/reference/families.md: what tests compare of each family, and the pipelines of diffusers that have no family.

`python tests/support/family_table.py` writes it. What is compared is what `compares` of plugins/diffusers/tests/compared.py
declares at the tests. Reasons are those of plugins/diffusers/tests/test_left_out.py.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "families.md"
TESTS = (
    *("test_families", "test_sdxl", "test_sd1x", "test_validation_images", "test_single_file", "test_single_file_export"),
    *("test_adapter_formats", "test_cosmos", "test_exact_sizes", "test_modular_families"),
)
"""Modules with tests that compare. A test of the page finds those that are missing here."""
HEAD = """# Families and what is compared

For everybody who has to know how far a model is tested: what tests compare of each family with diffusers {version}, on CPUs
with tiny random weights, and which pipelines of diffusers have no family. [Models](../families.md) says how to train each.
This page is generated: `python tests/support/family_table.py`.

"""


def pinned() -> str:
    """The version of diffusers that tests compare with."""
    from support.dependencies import pins  # whose folder is not on the path of the script from the start

    return pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))["diffusers"]


def page() -> str:
    """Imports the test modules, and with them diffusers."""
    for module in TESTS:
        import_module(module)
    return HEAD.format(version=pinned()) + "\n".join([*_families(), "", *_columns(), "", *_left_out(), ""])


def _families() -> Iterator[str]:
    compared, workshop = import_module("compared"), import_module("smalti_diffusers.lora.workshop")
    yield f"| `--model_family` | pipelines | {' | '.join(compared.COLUMNS)} |"
    yield "|---" * (len(compared.COLUMNS) + 2) + "|"
    for family in compared.NAMES:
        cells = [_details(compared, column, family) for column in compared.COLUMNS]
        pipelines = ", ".join(f"`{name}`" for name in sorted(workshop.pipelines(family)))
        yield f"| `{family}` | {pipelines} | {' | '.join(cells)} |"


def _details(compared, column: str, family: str) -> str:
    """What of a family is compared in a column; "no" for nothing."""
    return (
        ", ".join(sorted({each.detail for each in compared.DECLARED if (each.column, each.family) == (column, family)})) or "no"
    )


def _columns() -> Iterator[str]:
    compared = import_module("compared")
    yield "| column | compared | tests, in `plugins/diffusers/tests` |"
    yield "|---|---|---|"
    for column, text in compared.COLUMNS.items():
        tests = sorted({each.test for each in compared.DECLARED if each.column == column})
        yield f"| {column} | {text} | {', '.join(f'`{test}`' for test in tests)} |"


def _left_out() -> Iterator[str]:
    left = import_module("test_left_out")
    yield "## Pipelines without a family\n"
    yield "For one with a transformer, or the U-Net of Stable Diffusion 1 or XL, a package with a family is written by"
    yield "`smalti plugin new NAME --kind=family --from-pipeline=FOLDER_OR_ID`.\n"
    yield "| reason | pipelines of diffusers |"
    yield "|---|---|"
    names = left.others()
    for reason, patterns in left.LEFT_OUT.items():
        found = sorted(name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns))
        names -= {*found}
        yield f"| {reason} | {', '.join(found)} |"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "plugins" / "diffusers" / "tests"), str(ROOT / "tests")]
    PAGE.write_text(page(), encoding="utf-8")
