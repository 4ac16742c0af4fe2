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
    compress_disk_cache: bool = option(
        False,
        help="Compress cached latents and text embeddings, without loss. What is cached already stays as it is.",
        level="advanced",
        tradeoff="padded captions take a tenth of the space and latents two thirds, for more CPU time when they are read",
    )
