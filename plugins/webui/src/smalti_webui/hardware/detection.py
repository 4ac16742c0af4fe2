"""The blocks of a model as a table to choose from, read from `smalti detect-blocks --json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from smalti.models import BlockClass, Structure
from smalti_webui.hardware.strategy import BLOCK_CLASSES


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The answer of `smalti detect-blocks --json`. `cached`: it was read from the cache."""

    model_family: str
    model_flavour: str | None
    pretrained_model: str | None
    detected_at: str
    structure: Structure
    cached: bool

    @classmethod
    def from_json(cls, value: object) -> Detected:
        """Raises ValueError for anything else."""
        return _DETECTED.validate_python(value)

    def badges(self, row: BlockClass) -> list[str]:
        """What is to be known about a class, in words."""
        found = ["_no_split_modules"] if row.class_name in self.structure.no_split_modules else []
        found += ["suggested"] if row.class_name in self.structure.suggested else []
        found += ["named by the family"] if row.named else []
        return [*found, *(["inside other blocks"] if row.nested else [])]

    def initial(self, value: object) -> tuple[str, ...]:
        """What is selected when the dialog opens: the classes of the option, else the suggestion."""
        names = class_names(value)
        return names or self.structure.suggested

    def selection(self, names: Collection[str]) -> Selection:
        """What a choice of classes means for a run."""
        rows = [row for row in self.structure.classes if row.class_name in names]
        outer = [row for row in rows if not row.nested] or rows
        unknown = sorted(set(names) - {row.class_name for row in rows})
        return Selection(
            names=tuple(row.class_name for row in rows),
            unknown=tuple(unknown),
            largest=max((row.largest for row in outer), default=self.structure.parameters),
            outside=self.structure.parameters - sum(row.parameters for row in outer),
        )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A choice of classes. `largest` is the largest block that is gathered at once, `outside` stays gathered: elements."""

    names: tuple[str, ...]
    unknown: tuple[str, ...]
    largest: int
    outside: int

    @property
    def flag(self) -> str:
        """The flag of the choice; empty without one."""
        return f"--{BLOCK_CLASSES}={','.join(self.names)}" if self.names else ""


_DETECTED = TypeAdapter(Detected)


def class_names(value: object) -> tuple[str, ...]:
    """The class names in the value of the option: a list, or text with commas."""
    given: Sequence[object] = value if isinstance(value, list | tuple) else str(value or "").split(",")
    return tuple(text for each in given if (text := str(each).strip()) and text.lower() != "none")


def in_bf16(elements: int) -> str:
    """The size of parameters that are gathered in bf16."""
    size = 2.0 * elements
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def problems_of(answer: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The problems in a JSON answer of the command line."""
    found = answer.get("problems")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
