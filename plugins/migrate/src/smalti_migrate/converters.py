"""Converters of single values. Each raises UnconvertibleError for a value that has no counterpart."""

from __future__ import annotations

import math
from collections.abc import Mapping

from smalti_migrate.rules import Convert, UnconvertibleError, switch as switch

_LARGEST = 2**63


def whole(value: object) -> int:
    """An integer, also from a text or a float such as 1000.0."""
    number_ = number(value)
    if number_ != int(number_):
        raise UnconvertibleError("it is not an integer")
    return int(number_)


def number(value: object) -> int | float:
    """A number, also from a text such as "1e-4"."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UnconvertibleError("it is not a number")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UnconvertibleError("it is not a number") from None
        value = int(value) if value.is_integer() and abs(value) < 2**53 else value
    if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > _LARGEST:
        raise UnconvertibleError("it is too large, or not a number")
    return value


def text(value: object) -> str:
    """A text."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise UnconvertibleError("it is not a text")
    return str(value)


def path(value: object) -> str:
    """A path. Windows' backslashes are kept."""
    return text(value).strip().strip('"')


def minutes(value: object) -> int:
    """Seconds from minutes."""
    return max(1, round(float(number(value)) * 60))


SAMPLERS: Mapping[str, object] = {
    **dict.fromkeys(("euler", "k_euler"), "euler"),
    **dict.fromkeys(("euler_a", "k_euler_a"), "euler-a"),
    **dict.fromkeys(("dpmsolver++", "dpm++"), "dpm++"),
    **{name: name for name in ("ddim", "ddpm", "heun", "unipc")},
    "flowmatch": None,
}
"""Names of samplers, as schedulers of validation images. None is that of the family: models of flow matching have one."""


def choice(table: Mapping[str, object], *, fix: str = "") -> Convert:
    """A converter of names by a table, whatever their case.

    A text in the table that ends with "!" is the reason why a value is refused. None means that there is nothing to set.
    """

    def convert(value: object) -> object:
        name = str(value).lower()
        answer = table.get(name)
        if isinstance(answer, str) and answer.endswith("!"):
            raise UnconvertibleError(answer.removesuffix("!"), fix=fix)
        if name not in table:
            raise UnconvertibleError(f"smalti has no counterpart of {value!r}", fix=fix)
        return answer

    return convert


def precision(value: object) -> str:
    """`mixed_precision` from the names of torch's dtypes. fp16 becomes auto: bf16 where the device has it."""
    names = {"no": "no", "float32": "no", "fp32": "no", "float": "no", "bf16": "bf16", "bfloat16": "bf16", "tfloat_32": "no"}
    names |= {"fp16": "auto", "float16": "auto"}
    answer = names.get(str(value).lower())
    if answer is None:
        raise UnconvertibleError(f"smalti does not compute in {value}", fix="mixed_precision is auto, no or bf16")
    return answer
