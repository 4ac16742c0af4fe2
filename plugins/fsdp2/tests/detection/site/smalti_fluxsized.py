"""A family whose transformer has the size of Flux: 12 billion parameters in two kinds of blocks, from a configuration alone.

It can be looked at and nothing else. A checkpoint folder may say how many blocks there are, in transformer/config.json.
"""

import json
from pathlib import Path

from smalti import FamilyEntry, OptionGroup, Options, hookimpl, option
from smalti.config import ModelOptions


class FluxSizedOptions(Options):
    fluxsized_base: str | None = option(None, help="A folder with what the checkpoint does not say.")


class FluxSized:
    @hookimpl
    def declare_options(self):
        return [OptionGroup(name="fluxsized", title="12 B", options=FluxSizedOptions)]

    @hookimpl
    def register_model_families(self):
        flavours = {"dev": "somebody/fluxsized-dev", "small": "somebody/fluxsized-small"}
        return [FamilyEntry(name="fluxsized", title="12 B", factory="smalti_fluxsized:create", flavours=flavours)]


def create(config):
    options = config[ModelOptions]
    depth = {"num_layers": 19, "num_single_layers": 38, "width": 3072}
    if options.model_flavour == "small":
        depth |= {"num_layers": 2, "num_single_layers": 3, "width": 64}
    if (base := config[FluxSizedOptions].fluxsized_base) is not None:
        depth |= json.loads((Path(base) / "transformer" / "config.json").read_text())
    if (path := options.pretrained_model_name_or_path) is not None:
        depth |= json.loads((Path(path) / "transformer" / "config.json").read_text())
    return family(depth)


def family(depth):
    from smalti.models import ModelFamily

    class Family(ModelFamily):
        name = "fluxsized"
        alignment = 16

        def build_model(self):
            return build(**depth)

        def only_looked_at(self, *arguments):
            raise NotImplementedError

        weights = encode_captions = forward = only_looked_at

    return Family()


def build(num_layers=19, num_single_layers=38, width=3072):
    import torch
    from torch import nn

    heads = width // 128 or 1

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2))
            self.out = nn.Linear(width, width)

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.modulation = nn.Linear(width, 6 * width)
            self.attention = Attention()
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    class DoubleBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.streams = nn.ModuleList([Stream(), Stream()])

    class SingleBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.modulation = nn.Linear(width, 3 * width)
            self.enter = nn.Linear(width, 7 * width)
            self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2))
            self.leave = nn.Linear(5 * width, width)

    class FluxSizedTransformer(nn.Module):
        _no_split_modules = ["DoubleBlock", "SingleBlock"]  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.pictures, self.texts = nn.Linear(64, width), nn.Linear(4096, width)
            for name, size in {"time": 256, "guidance": 256, "pooled": 768}.items():
                self.add_module(name, nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width)))
            self.double_blocks = nn.ModuleList(DoubleBlock() for _ in range(num_layers))
            self.single_blocks = nn.ModuleList(SingleBlock() for _ in range(num_single_layers))
            self.modulation, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, 64)
            self.register_buffer("frequencies", torch.arange(64.0), persistent=False)

    return FluxSizedTransformer()


plugin = FluxSized()
