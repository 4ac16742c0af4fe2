"""Runs a launcher of processes and writes down which of its ranks were killed, which their own last words cannot tell.

Started as `python -m smalti.agent MODULE [ARGUMENTS]`, it does what `python -m MODULE [ARGUMENTS]` does.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

KILLED_FILE = "killed.json"
"""In the folder of last words: the number of the signal by the rank that it killed."""


def main() -> None:
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ChildFailedError as error:
        killed = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
        (Path(os.environ["SMALTI_OUTCOME_DIR"]) / KILLED_FILE).write_text(json.dumps(killed))
        raise


if __name__ == "__main__":
    main()
