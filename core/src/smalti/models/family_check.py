"""Whether an object is a model family: what is required, what belongs together, and names that look misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from smalti.models.family import ModelFamily

_TOGETHER = (
    {"encoder_identity", "release_encoder"},
    {"raw_latents", "normalise_latents"},
    {"lora_targets", "adapter"},
)
"""Methods that a family has all of, or none."""
_NEAR = 0.85
"""From this likeness on (difflib) a name counts as misspelt: in ten letters, one that is wrong, missing or too many."""


def family_problems(family: object) -> list[str]:
    """What keeps an object from being a `ModelFamily`, in sentences about it: "has no method forward". Empty if it is one.

    Names that are required, one of two methods that belong together, and public names that look like misspelt ones.
    """
    if not isinstance(family, ModelFamily):
        return ["does not inherit from smalti.models.ModelFamily"]
    required = [name for name, value in vars(ModelFamily).items() if getattr(value, "__isabstractmethod__", False)]
    missing = [name for name in required if getattr(getattr(type(family), name), "__isabstractmethod__", False)]
    problems = [f"has no method {name}" for name in missing]
    if not hasattr(family, "name"):
        problems.insert(0, "has no attribute name")
    own = _own_names(family)
    for methods in _TOGETHER:
        if (found := methods & own) and found != methods:
            problems.append(f"has {', '.join(found)} without {', '.join(methods - found)}, which belongs to it")
    return [*problems, *_misspelt(own)]


def _misspelt(own: set[str]) -> Iterator[str]:
    known = _public(ModelFamily)
    for name in sorted(own - known):
        if near := get_close_matches(name, known - own, n=1, cutoff=_NEAR):
            yield f"has {name}, which smalti does not know; did you mean {near[0]}? If not, call it _{name}"


def _own_names(family: ModelFamily) -> set[str]:
    """The public names that the family's own classes and the object itself define."""
    classes = [each for each in type(family).__mro__ if issubclass(each, ModelFamily) and each is not ModelFamily]
    return {name for name in vars(family) if name[0] != "_"}.union(*map(_public, classes))


def _public(kind: type) -> set[str]:
    """The public names that a class defines or declares itself."""
    return {name for name in (*vars(kind), *vars(kind).get("__annotations__", {})) if name[0] != "_"}
