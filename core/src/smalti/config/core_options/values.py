"""Types of values that several options have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from smalti.config.options import path_error


def names_a_place(value: str | None) -> str | None:
    """A path, a hub id, or a word in place of them."""
    if value is not None and (reason := path_error(value)):
        raise ValueError(reason)
    return value


Place = Annotated[str | None, AfterValidator(names_a_place)]
