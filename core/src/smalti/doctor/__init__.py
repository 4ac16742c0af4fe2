"""What this node has, and what is wrong with it. Imports no torch: what needs it runs in a child process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
