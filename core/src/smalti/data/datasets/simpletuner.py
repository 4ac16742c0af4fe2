"""What a data file of SimpleTuner can contain that an entry here cannot: its other keys and values, and what is done with them.

Facts about its format, no code of it. Plugins can add values (a storage, a metadata backend), which are then supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExternalKey:
    """A key that SimpleTuner reads and smalti does not.

    `same` are the values that ask for what happens here anyway; they are accepted silently, as are null, "", {} and []. Other
    values get a notice with the reason. With a `fix` they are an error, because they change what is trained on.
    """

    why: str
    same: tuple[object, ...] = ()
    fix: str = ""

    def accepts(self, value: object) -> bool:
        """Whether the value asks for what happens here anyway."""
        if isinstance(value, Mapping):
            return not value or any(_plain(value.get(switch, True)) is False for switch in ("enable", "enabled"))
        return value in (None, "", []) or _plain(value) in self.same


_UNCHANGED = "listings are compared by etag, and only what changed is read again"
_BATCHED = "encoding is batched automatically"
_BEFORE = "latents and embeddings are computed once, before training"
_NO_DELETION = "nothing is ever deleted"
_NO_CONDITIONING = "conditioning images are not supported yet"
_IMAGES_ALONE = "remove it to train on the images alone, or set disabled: true"
_DISABLE = "set disabled: true in this entry"

WITHOUT_EFFECT: Mapping[str, ExternalKey] = {
    "preserve_data_backend_cache": ExternalKey(
        why="an unchanged listing keeps the index, and nothing is deleted; the listing itself is what finds changed files",
        same=(False,),
    ),
    "skip_file_discovery": ExternalKey(why=_UNCHANGED, same=(False,)),
    "metadata_update_interval": ExternalKey(why="the index is written once, when the scan ends"),
    "scan_for_errors": ExternalKey(why="every scan looks for errors", same=(True,)),
    "delete_problematic_images": ExternalKey(
        why=f"{_NO_DELETION}; unreadable images are listed in a quarantine file", same=(False,)
    ),
    "delete_unwanted_images": ExternalKey(why=f"{_NO_DELETION}; images that are too small are left out", same=(False,)),
    "delete_nsfw_images": ExternalKey(why=f"{_NO_DELETION}, and images are not classified", same=(False,)),
    "read_batch_size": ExternalKey(why="reading uses several threads automatically"),
    "write_batch_size": ExternalKey(why="writing is batched automatically"),
    "vae_batch_size": ExternalKey(why=_BATCHED),
    "text_encoder_batch_size": ExternalKey(why=_BATCHED),
    "conditioning_image_embed_batch_size": ExternalKey(why=_BATCHED),
    "hash_filenames": ExternalKey(why="cache entries are named by their content", same=(True,)),
    "shorten_filenames": ExternalKey(why="cache entries are named by their content"),
    "cache_file_suffix": ExternalKey(why="cache entries are named by their content, so datasets can share a folder"),
    "compress_cache": ExternalKey(why="the option compress_disk_cache compresses the caches of all datasets", same=(False,)),
    "vae_cache_ondemand": ExternalKey(why=_BEFORE, same=(False,)),
    "text_cache_ondemand": ExternalKey(why=_BEFORE, same=(False,)),
    "vae_cache_clear_each_epoch": ExternalKey(
        why="a cached image keeps its crop; --vae_cache_disable crops again at every visit", same=(False,)
    ),
    "ignore_epochs": ExternalKey(why="the number of epochs or steps ends a run", same=(False,)),
}
"""Keys that are accepted and have no effect, and why."""

REFUSED: Mapping[str, ExternalKey] = {
    "train_batch_size": ExternalKey(why="all datasets share one batch size", fix="set the option train_batch_size instead"),
    "timestep_sampling_offset": ExternalKey(why="all datasets share one distribution of timesteps", same=(0,), fix="remove it"),
    "vae_cache_disable": ExternalKey(
        why="all datasets are cached alike", same=(False,), fix="set the option vae_cache_disable instead"
    ),
    "text_cache_disable": ExternalKey(
        why="all datasets are cached alike", same=(False,), fix="set the option text_cache_disable instead"
    ),
    "slider_strength": ExternalKey(why="slider LoRAs are not supported yet", same=(0,), fix=_DISABLE),
    "conditioning": ExternalKey(why=_NO_CONDITIONING, fix=_IMAGES_ALONE),
    "conditioning_config": ExternalKey(why=_NO_CONDITIONING, fix=_IMAGES_ALONE),
    "conditioning_data": ExternalKey(why=_NO_CONDITIONING, fix=_IMAGES_ALONE),
    "conditioning_type": ExternalKey(why=_NO_CONDITIONING, fix=_DISABLE),
    "source_dataset_id": ExternalKey(why=_NO_CONDITIONING, fix=_DISABLE),
    "conditioning_image_embeds": ExternalKey(why=_NO_CONDITIONING, fix=_IMAGES_ALONE),
    "cache_dir_conditioning_image_embeds": ExternalKey(why=_NO_CONDITIONING, fix=_IMAGES_ALONE),
    "grounding": ExternalKey(why="bounding boxes are not supported yet", fix=_IMAGES_ALONE),
    "video": ExternalKey(why="videos are not supported yet", fix=_DISABLE),
    "audio": ExternalKey(why="audio is not supported yet", fix=_DISABLE),
    "s2v_datasets": ExternalKey(why="audio is not supported yet", fix=_DISABLE),
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
        "conditioning": f"{_DISABLE}, and remove conditioning_data from the others",
        "caption": _DISABLE,
        "grounding": _DISABLE,
        "conditioning_image_embeds": _DISABLE,
        "distillation_cache": _DISABLE,
    },
    "metadata_backend": {},
    "caption_strategy": {},
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


def is_comment(key: str) -> bool:
    """Whether a key of a JSON object is a comment: "_comment", "//", "#"."""
    return key.startswith(("_", "//", "#"))


def belongs_to_unsupported_source(key: str) -> bool:
    """Whether a key configures a storage or table that is not supported yet; alone it has no effect."""
    return key in (*_BLOCKS, *_HUB) or key.startswith(_PREFIXES)


def is_simpletuner(entries: Iterable[Mapping[str, object]]) -> bool:
    """Whether the entries are spelled for SimpleTuner: a text_embeds entry, which it requires, or keys that only it has."""
    external = WITHOUT_EFFECT.keys() | REFUSED.keys()
    return any(entry.get("dataset_type") == "text_embeds" or external & entry.keys() for entry in entries)


def _plain(value: object) -> object:
    """The value, or the boolean that a text means."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
