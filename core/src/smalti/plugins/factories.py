"""Calling what a plugin registered as "module:callable". A failure names the plugin, like a failure in a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from smalti.errors import BrokenPlugin, MissingPlugin, UserError
from smalti.system import importing, plugin_output
from smalti.types import Registered

ORIGIN_NOTE = "raised by "
"""Prefix of the note that names the plugin of an exception. Only the innermost plugin is noted."""


def create(entry: Registered, address: str, *arguments: object, **settings: object) -> object:
    """Call the callable at `address` ("module:callable"), which `entry` names, and return its result.

    Raises MissingPlugin when a module that it imports is not installed, BrokenPlugin when there is no such callable; any other
    exception keeps its type and gets a note that names plugin, distribution and factory. A UserError is passed on as it is.
    """
    with attributed(entry, address):
        return named(entry, address)(*arguments, **settings)


@contextmanager
def attributed(entry: Registered, address: str) -> Iterator[None]:
    """Note on exceptions of the body that they come from the plugin that registered `entry`."""
    try:
        with plugin_output():
            yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise _missing(error, entry, address) from error
    except Exception as error:
        add_origin_note(error, f"{ORIGIN_NOTE}{entry.origin} in {entry.kind} {entry.name!r} ({address})")
        raise


def add_origin_note(error: BaseException, note: str) -> bool:
    """Note on an exception which plugin it comes from, unless it has such a note. Returns whether the note was added."""
    if any(each.startswith(ORIGIN_NOTE) for each in getattr(error, "__notes__", ())):
        return False
    error.add_note(note)
    return True


def named(entry: Registered, address: str) -> Callable[..., object]:
    """The callable at `address`, such as a class, which `entry` names. Raises BrokenPlugin and errors of its module."""
    module, _, attributes = address.partition(":")
    with importing():
        found: object = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise _broken(entry, address, f"there is no callable {attributes!r} in the module {module}")
    return found


def _missing(error: ModuleNotFoundError, entry: Registered, address: str) -> UserError:
    """The error if the module of the entry is missing, or a module that it imports."""
    name, own = error.name or "", address.partition(":")[0]
    if own == name or own.startswith(f"{name}."):
        return _broken(entry, address, f"there is no module {name!r}")
    if name.partition(".")[0] == "smalti":
        return _broken(entry, address, f"it was written for another version of smalti: there is no module {name!r}")
    message = f"{entry.kind} {entry.name!r} of {entry.origin} needs the Python module {name!r}, which is not installed"
    return MissingPlugin(message, fix=f"install it, for example: pip install {name.partition('.')[0]}")


def _broken(entry: Registered, address: str, reason: str) -> BrokenPlugin:
    return BrokenPlugin(
        f"{entry.kind} {entry.name!r} of {entry.origin} is {address!r}, but {reason}", fix=entry.origin.workaround
    )
