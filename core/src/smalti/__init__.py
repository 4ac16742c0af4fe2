"""smalti trains diffusion models in shards. This module holds the names that a plugin needs; importing it imports no torch.

What a plugin implements is described in `smalti.hookspecs`, which is the first file to read. It may also use the
names of these packages, each of which lists them in its `__init__.pyi`. docs/writing-a-plugin.md says what each package is for.
Modules inside them belong to the core alone and may change with any release.

    smalti.system, smalti.rundir, smalti.config, smalti.parallel, smalti.checkpoint, smalti.diffusion, smalti.models,
    smalti.hookspecs, smalti.plugins, smalti.data, smalti.training, smalti.launch,
    smalti.cli
"""

import lazy_loader

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
