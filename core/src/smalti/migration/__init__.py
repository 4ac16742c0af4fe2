"""Configurations of other trainers: recognizing them, and converting them to options of smalti."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
