"""What tests compare with diffusers or with published numbers, by family: docs/reference/families.md is made of it.

    @compares("inputs of the model", MAKERS)
    @pytest.mark.parametrize("kind", some(MAKERS, "flux"))
    def test_...

The cases are all that the test has in `make test-whole`: kinds of pipelines, families, or pairs of a family and a detail.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kinds import EVERY

from smalti_diffusers.plugin import FAMILIES

COLUMNS = {
    "inputs of the model": "each tensor that the model is called with, against the calls of the pipeline in diffusers",
    "validation images": "against the images of the pipeline",
    "single files": "read: has the weights of the pipeline. Written: diffusers reads it",
    "formats of adapters": "diffusers or peft loads the file; of comfyui and kohya also the names or rows of its layers",
    "parameters": "number of parameters of the published model",
}
"""What is compared, and with what."""
NAMES = tuple(family.name for family in FAMILIES)


@dataclass(frozen=True, order=True)
class Comparison:
    """One case. `detail` is what of the family: a kind of pipeline, a format, a model. `values` are those of the test."""

    column: str
    family: str
    detail: str
    test: str
    values: tuple[str, ...]


DECLARED: set[Comparison] = set()
"""By the test modules that have been imported."""


def compares(column: str, cases: Iterable[str | tuple[str, str]] | Mapping[str, str], detail: str = "") -> Callable:
    """A decorator that declares the cases of a test. `detail` stands for each of them; "" for the case itself.

    A case is a kind of pipeline, a family, or a family and a format; or a model, of which the mapping has the family.
    """
    assert column in COLUMNS, column

    def comparison(case: str | tuple[str, str], test: str) -> Comparison:
        values = (case,) if isinstance(case, str) else case
        named = cases[values[0]] if isinstance(cases, Mapping) else None
        family = named if named in NAMES else family_of(values[0])
        return Comparison(column, family, detail or values[-1], test, values)

    def declare(test):
        place = f"{test.__module__.rpartition('.')[2]}.py::{test.__name__}"
        DECLARED.update(comparison(case, place) for case in cases)
        return test

    return declare


def family_of(case: str) -> str:
    """The family of a kind of pipeline, or the family itself. Raises KeyError."""
    return case if case in NAMES else EVERY[case][0]
