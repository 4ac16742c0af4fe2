"""What grows with the number of ranks: the exchange and the plan of a first save, computed for ranks that are not there.

`python bench/scale.py` prints one line for each shape; docs/scale.md has the results.
"""

from __future__ import annotations

import resource
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch

from smalti.checkpoint.format.safetensors_layout import Chunk
from smalti.checkpoint.planning import check_complete, decode_chunks, divide, encode_chunks, joined, part_of

SHAPES = ((8, 8), (64, 8), (512, 8), (4096, 8), (64, 64), (512, 512))
"""Numbers of ranks, and of ranks that share one copy of the model."""
_WIDTH = 3072
_TENSORS = [
    f"{group}/transformer_blocks.{block}.layer{layer}.weight"
    for group in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "ema")
    for block in range(57)
    for layer in range(14)
]
"""About the tensors of FLUX.1 with AdamW and EMA."""


def chunks(shard: int, shards: int) -> dict[str, Chunk]:
    step = -(-_WIDTH // shards)
    begin = min(_WIDTH, shard * step)
    rows = min(_WIDTH, begin + step) - begin
    return {name: Chunk(dtype="F32", shape=(rows, _WIDTH), offsets=(begin, 0)) for name in _TENSORS}


def measure(ranks: int, shards: int) -> str:
    of_shard = [encode_chunks(chunks(shard, shards)) for shard in range(shards)]
    texts = [of_shard[rank % shards] for rank in range(ranks)]
    digest = {text: sha256(text.encode()).hexdigest() for text in of_shard}
    digests = [digest[text] for text in texts]
    mine = [part_of(texts[rank], digests, rank) for rank in (0, ranks - 1)]
    parts = [texts[rank] for rank in range(shards)]  # what all send together, whoever sends it
    started = time.process_time()
    decoded = {text: decode_chunks(text) for text in set(joined(parts, digests[:shards]))}
    held = [decoded[text] for text in texts]
    check_complete(held, {name: torch.empty(_WIDTH, _WIDTH, device="meta") for name in _TENSORS})
    divide(held)
    seconds = time.process_time() - started
    received = ranks * max(map(len, mine))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{ranks:>5} ranks, {shards:>4} shards: {received / 1e6:8.2f} MB received, {seconds:6.1f} CPU s, {memory:6.0f} MB"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(measure(int(sys.argv[1]), int(sys.argv[2])))
    else:
        import subprocess

        for ranks, shards in SHAPES:  # a process each, for its peak memory
            subprocess.run([sys.executable, str(Path(__file__)), str(ranks), str(shards)], check=True)
