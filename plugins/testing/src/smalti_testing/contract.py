"""What a contract is: checks with names, each of which says what it means when it fails and how to fix it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")


class BrokenContract(AssertionError):  # noqa: N818 - names what is the matter, as its base does
    """Something does not do what its contract says."""


def expect(condition: bool, found: str) -> None:
    """Raises BrokenContract unless `condition` holds; `found` tells what was found instead."""
    if not condition:
        raise BrokenContract(found)


class Contract(Generic[S]):
    """The checks of one kind of thing, in the order in which they are defined.

    A check is a function of the thing that raises when it is not as it should be. Its docstring is for whoever sees it fail.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.checks: dict[str, Callable[[S], None]] = {}

    def check(self, function: Callable[[S], None]) -> Callable[[S], None]:
        """Decorator: make `function` part of this contract."""
        if not function.__doc__:
            raise TypeError(f"{function.__qualname__} needs a docstring: what it means when it fails, and how to fix it")
        self.checks[function.__name__] = function
        return function

    def run(self, name: str, subject: S) -> None:
        """One check. Whatever it raises gets a note with the check's docstring."""
        check = self.checks[name]
        try:
            check(subject)
        except Exception as error:
            error.add_note(f"\n{self.title} contract, {name}:\n{inspect.getdoc(check)}")
            raise

    def run_all(self, subject: S) -> None:
        """Every check; the first that fails ends it."""
        for name in self.checks:
            self.run(name, subject)
