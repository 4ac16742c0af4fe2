"""Runs in object stores: their checkpoints are listed, read and downloaded through the storages of plugins."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
