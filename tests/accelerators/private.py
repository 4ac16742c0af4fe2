"""`python -m accelerators.private DESCRIPTOR`: as `accelerators`, with a kind of device that is neither the CPU nor CUDA.

torch's own backend in Python for such kinds, under the name of one that smalti launches. It has no pinned memory, and leaves no
trace of streams.
"""

import sys

KIND = "npu"


def install() -> None:
    """Make torch believe in one device of this kind. For the rest of the process."""
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register

    class Module:
        is_available = is_initialized = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        _is_in_bad_fork = staticmethod(lambda: False)
        manual_seed_all = staticmethod(lambda seed: None)
        get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])

    class Generator(torch.Generator):
        """On the CPU: fake tensors take no values from it."""

        def __new__(cls, device="cpu"):
            return super().__new__(cls)

    register(KIND, backend_module=Module())
    torch.accelerator.empty_cache = lambda: None
    torch.Generator = Generator


if __name__ == "__main__":
    install()

    from accelerators import cluster, watching

    cluster.install()
    watching.install()

    from support.forked_ranks import main

    main(int(sys.argv[1]))
