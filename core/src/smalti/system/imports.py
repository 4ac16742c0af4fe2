"""Import large libraries with Python's cyclic garbage collector paused.

Libraries create hundreds of thousands of objects at import. The collector scans all of them again each time their number grows
by a quarter, and frees almost nothing: a fifth of the time that importing torch and diffusers takes.

Importing this module imports no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False


def keep_imports() -> None:
    """Exclude imported objects from garbage collection for good. For processes that smalti owns."""
    global _kept
    _kept = True


@contextmanager
def importing() -> Iterator[None]:
    """Pause the collector within the block, which should only import: no work that makes garbage, no loading of weights."""
    if not gc.isenabled():  # by an enclosing block, or by the user
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
