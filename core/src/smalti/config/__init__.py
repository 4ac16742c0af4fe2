"""Files, environment and flags become one validated Config. Knows no plugin and imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
