"""One command: its checks, its ranks, one exit code. Imports no torch, but for `rank`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
