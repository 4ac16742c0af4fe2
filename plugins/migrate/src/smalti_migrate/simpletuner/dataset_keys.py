"""What an entry of SimpleTuner's data file has that one here has not: keys and values, and what becomes of them.

Facts about its format, no code of it. Plugins can add values (a storage, a metadata backend), which are then supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.rules import Rule, ignored, refused

_UNCHANGED = "listings are compared by etag, and only what changed is read again"
_BATCHED = "encoding is batched automatically"
_BEFORE = "latents and embeddings are computed once, before training"
_NO_DELETION = "nothing is ever deleted"
_NO_CONDITIONING = "conditioning images other than masks are not supported yet"
_IMAGES_ALONE = "remove it to train on the images alone, or set disabled: true"
_DISABLE = "set disabled: true in this entry"

WITHOUT_EFFECT: Mapping[str, Rule] = {
    "skip_file_discovery": ignored(_UNCHANGED, False),
    "metadata_update_interval": ignored("the index is written once, when the scan ends"),
    "scan_for_errors": ignored("every scan looks for errors", True),
    "delete_problematic_images": ignored(f"{_NO_DELETION}; unreadable images are listed in a quarantine file", False),
    "delete_unwanted_images": ignored(f"{_NO_DELETION}; images that are too small are left out", False),
    "delete_nsfw_images": ignored(f"{_NO_DELETION}, and images are not classified", False),
    "read_batch_size": ignored("reading uses several threads automatically"),
    "write_batch_size": ignored("writing is batched automatically"),
    "vae_batch_size": ignored(_BATCHED),
    "text_encoder_batch_size": ignored(_BATCHED),
    "conditioning_image_embed_batch_size": ignored(_BATCHED),
    "hash_filenames": ignored("cache entries are named by their content", True),
    "shorten_filenames": ignored("cache entries are named by their content"),
    "cache_file_suffix": ignored("cache entries are named by their content, so datasets can share a folder"),
    "compress_cache": ignored("the option compress_disk_cache compresses the caches of all datasets", False),
    "vae_cache_ondemand": ignored(_BEFORE, False),
    "text_cache_ondemand": ignored(_BEFORE, False),
    "vae_cache_clear_each_epoch": ignored(
        "a cached image keeps its crop; --vae_cache_disable crops again at every visit", False
    ),
    "ignore_epochs": ignored("the number of epochs or steps ends a run", False),
}
"""Keys that are accepted and have no effect, and why."""

REFUSED: Mapping[str, Rule] = {
    "train_batch_size": refused("all datasets share one batch size", "set the option train_batch_size instead"),
    "timestep_sampling_offset": refused("all datasets share one distribution of timesteps", "remove it", 0),
    "vae_cache_disable": refused("all datasets are cached alike", "set the option vae_cache_disable instead", False),
    "text_cache_disable": refused("all datasets are cached alike", "set the option text_cache_disable instead", False),
    "slider_strength": refused("a slider is trained on pairs of images here: slider_counterpart_path", _DISABLE, 0),
    "conditioning": refused(_NO_CONDITIONING, _IMAGES_ALONE),
    "conditioning_config": refused(_NO_CONDITIONING, _IMAGES_ALONE),
    "source_dataset_id": refused(_NO_CONDITIONING, _DISABLE),
    "conditioning_image_embeds": refused(_NO_CONDITIONING, _IMAGES_ALONE),
    "cache_dir_conditioning_image_embeds": refused(_NO_CONDITIONING, _IMAGES_ALONE),
    "grounding": refused("bounding boxes are not supported yet", _IMAGES_ALONE),
    "video": refused("videos are not supported yet", _DISABLE),
    "audio": refused("audio is not supported yet", _DISABLE),
    "s2v_datasets": refused("audio is not supported yet", _DISABLE),
}
"""Keys that change what is trained on, so they are refused instead of ignored."""

UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "type": {
        "webshart": "download the tar shards; then type: local, instance_data_dir: FOLDER, and metadata_backend: webdataset",
        "memory": "set type: local; the system keeps files in memory that are read often",
    },
    "dataset_type": {
        "video": _DISABLE,
        "audio": _DISABLE,
        "conditioning": f"{_DISABLE}, and remove conditioning_data from the others; masks have conditioning_type: mask",
        "caption": _DISABLE,
        "grounding": _DISABLE,
        "conditioning_image_embeds": _DISABLE,
        "distillation_cache": _DISABLE,
    },
    "crop_style": {"face": "set it to center or random"},
}
"""Values that are not supported yet, by key, each with what to do instead."""

WITHOUT_CROP: Mapping[str, object] = {
    "crop": True,
    "crop_aspect": "preserve",
    "maximum_image_size": 0,
    "target_downsample_size": 0,
}
"""What `crop: false` means there: images are scaled to cover their bucket, and what exceeds it is cropped."""

SAME_KEYS: Mapping[str, str] = {"is_regularization_data": "is_regularisation_data"}
"""Other spellings of keys."""

SAME_BACKENDS: Mapping[str, str] = {"filesystem": "discovery", "webshart": "webdataset", "tar": "webdataset"}
"""Other names of metadata backends."""

_BLOCKS = ("csv", "huggingface", "memory", "parquet", "webshart")
_HUB = (
    "dataset_name", "split", "revision", "image_column", "video_column", "caption_column", "fallback_caption_column",
    "streaming", "num_proc", "auto_load", "dataset_config", "file_extension", "width_column", "height_column",
)  # fmt: skip
_PREFIXES = ("aws_", "csv_", "huggingface_", "memory_filesystem_", "webshart_")


def belongs_to_another_source(key: str) -> bool:
    """Whether a key configures a storage or table that the entry does not have; alone it has no effect."""
    return key in (*_BLOCKS, *_HUB) or key.startswith(_PREFIXES)
