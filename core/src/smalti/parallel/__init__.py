"""What ranks share: the protocol of a strategy, the process group, lost ranks, portable state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
