"""Options of the cache."""

from __future__ import annotations

from pathlib import Path

from smalti import Options, option


class CacheOptions(Options):
    cache_dir: Path | None = option(
        None,
        help="Folder of cached latents and text embeddings, which runs can share. Default: `cache` in the run directory.",
    )
    cache_local_dir: Path | None = option(
        None,
        help="Folder on a fast drive of each node for copies of what is read from caches on remote storages. Default: none.",
        level="advanced",
    )
    cache_local_gb: float = option(
        50.0, help="Size limit of the copies in `cache_local_dir`, in GB per node and user.", level="advanced", gt=0
    )
    data_order_block: int = option(
        1,
        help="Neighbouring samples whose cached latents are read together, and trained in the same part of an epoch.",
        level="advanced",
        ge=1,
        le=1024,
        tradeoff="fewer requests to a remote storage, one for N latents, but samples are mixed in windows",
    )
    data_order_window: int = option(
        1,
        help="Blocks of `data_order_block` samples from which each place of a batch is filled at a time. "
        "So window x block x effective batch samples are mixed.",
        level="advanced",
        ge=1,
        le=1024,
    )
    data_order_gb: float = option(
        4.0,
        help="Memory of each rank for latents that were read with a block and not trained yet, in GB.",
        level="advanced",
        gt=0,
    )
    compress_disk_cache: bool = option(
        False,
        help="Compress cached latents and text embeddings, without loss. What is cached already stays as it is.",
        level="advanced",
        tradeoff="padded captions take a tenth of the space and latents two thirds, for more CPU time when they are read",
    )
