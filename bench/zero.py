"""Checkpoints under ZeRO 2 and 3 on two processes: smalti's, with digests and fsync, over DeepSpeed's own of the same state.

Both are written to the same disk and read from the page cache. A run that resumes has no optimizer state yet: so it is here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from run import Result, paired
from shard import IMPORTS, checkpoint_times

from support.forked_ranks import forked_processes


def measure() -> list[Result]:
    with forked_processes(ranks=2, group=False, seconds=600, imports=IMPORTS) as two, tempfile.TemporaryDirectory() as folder:
        kept = {stage: two.run(checkpoint_times, stage, Path(folder))[0] for stage in (2, 3)}
    return [
        paired(f"zero: {act} under ZeRO {stage}, ours over DeepSpeed's", *found[act], unit="s", goal=1.5, precision="fp32")
        for stage, found in kept.items()
        for act in ("save", "load")
    ]
