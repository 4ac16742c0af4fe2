"""What a run will need before it is launched: its memory, traffic and operations, on devices that need not be there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
