"""Model families for smalti from diffusers."""

import logging

for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    # diffusers imports torchao, which then warns of kernels for other GPUs and of what is new in torch for its authors.
    logging.getLogger(_name).setLevel(logging.ERROR)
