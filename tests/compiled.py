"""Compile what DeepSpeed compiles when it is first needed: `python tests/compiled.py`, before the tests, whose time is limited.

Steps of optimizers in host memory; swapping to a drive only where libaio is installed. TORCH_EXTENSIONS_DIR says where to.
"""

import os
import sys


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops.op_builder as builders

    made = [builders.CPUAdamBuilder(), builders.CPUAdagradBuilder(), builders.CPULionBuilder(), builders.AsyncIOBuilder()]
    for builder in made:
        if builder.is_compatible(verbose=False):
            print(f"compiling DeepSpeed's {builder.name}", file=sys.stderr, flush=True)
            builder.load(verbose=False)


if __name__ == "__main__":
    main()
