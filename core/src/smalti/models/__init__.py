"""What a model family is, and what is done to its model: weights, blocks, compilation, attention."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
