"""Imports of large libraries, without Python's collector of cyclic garbage.

Libraries make hundreds of thousands of objects as they come in. The collector looks through all of them again for each quarter
by which they have grown, and finds next to nothing: a fifth of the time that importing torch and diffusers takes.

Importing this module imports no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False


def keep_imports() -> None:
    """In a process that is smalti's own, what is there after imports stays to the end: it is not looked through again."""
    global _kept
    _kept = True


@contextmanager
def importing() -> Iterator[None]:
    """The collector rests while the block imports. Not for work that makes garbage, nor around loading of weights."""
    if not gc.isenabled():  # in a block around this one, or because somebody wants it so
        yield
        return
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if _kept and len(sys.modules) > known:
            gc.freeze()
