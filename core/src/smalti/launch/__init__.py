"""A launch: checks, processes of all ranks, one exit code. Only `rank` imports torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
