"""SimpleTuner's options of data, captions and caches."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.rules import Rule, ignored, refused, renamed, same

_CACHE = "cached encodings are found by their content, so nothing has to be scanned, kept or cleared"
_LISTING = "folders are listed at every start, and only what has changed is read again"
_NOTHING_DELETED = "nothing is ever deleted"
_AUTOMATIC = "chosen automatically"
_IN_AN_ENTRY = "the entry of the dataset describes its table"
_FIRST = "images and captions are encoded once, before the first step"

DATA_KEYS: Mapping[str, Rule] = {
    "caption_strategy": same({"instance_prompt": ("instanceprompt", "")}),
    "prepend_instance_prompt": refused("it belongs to a dataset", "set prepend_instance_prompt in the dataset's entry", False),
    "only_instance_prompt": refused("it belongs to a dataset", "set only_instance_prompt in the dataset's entry", False),
    "parquet_caption_column": ignored(_IN_AN_ENTRY),
    "parquet_filename_column": ignored(_IN_AN_ENTRY),
    "conditioning_multidataset_sampling": ignored("datasets of conditioning images are not supported"),
    "masked_loss_probability": renamed("mask_probability", "there drawn for a batch, here for each visit", neutral=(1.0,)),
    "max_upscale_threshold": refused(
        "it belongs to a dataset", "set max_upscale_threshold in the dataset's entry, with crop_aspect closest or random"
    ),
    "data_backend_sampling": refused(
        "datasets are sampled in proportion to their size", "set repeats in the datasets' entries", "auto-weighting"
    ),
    "disable_bucket_pruning": ignored("short_buckets decides what becomes of small buckets", True),
    "delete_unwanted_images": ignored(_NOTHING_DELETED, False),
    "delete_problematic_images": ignored(f"{_NOTHING_DELETED}; images that cannot be read are listed", False),
    "ignore_missing_files": ignored("data_error_budget says how many images may be unreadable", False),
    "override_dataset_config": ignored("on_changed_data decides when data has changed", False),
    "preserve_data_backend_cache": ignored(_LISTING, False),
    "skip_file_discovery": ignored(_LISTING, False),
    "aspect_bucket_disable_rebuild": ignored(_LISTING, False),
    "metadata_update_interval": ignored("the index is written when the scan ends"),
    "dataloader_prefetch": ignored("4 batches are always prefetched", True, False, 4),
    "dataloader_prefetch_qlen": ignored("4 batches are always prefetched", 4, 10),
    # Caches
    "vae_cache_ondemand": ignored(_FIRST, False),
    "vae_cache_preprocess": ignored(_FIRST, True),
    "text_cache_ondemand": ignored(_FIRST, False),
    "vae_cache_scan_behaviour": ignored(_CACHE),
    "vae_cache_clear_each_epoch": refused(
        "random crops are cached once", "vae_cache_disable encodes new crops in every step", False
    ),
    "cache_clear_validation_prompts": ignored(_CACHE),
    "cache_file_suffix": ignored(_CACHE),
    "cache_dir_vae": renamed("cache_dir", "one folder for latents and text embeddings"),
    "cache_dir_text": ignored("text embeddings are in the same folder as latents: cache_dir"),
    # Speed
    "vae_batch_size": ignored(_AUTOMATIC),
    "text_encoder_batch_size": ignored(_AUTOMATIC),
    "image_processing_batch_size": ignored(_AUTOMATIC),
    "write_batch_size": ignored(_AUTOMATIC),
    "read_batch_size": ignored(_AUTOMATIC),
    "enable_multiprocessing": ignored(_AUTOMATIC),
    "max_workers": ignored(_AUTOMATIC),
    "aspect_bucket_worker_count": ignored(_AUTOMATIC),
    "torch_num_threads": ignored("set OMP_NUM_THREADS in the environment instead"),
    "aws_max_pool_connections": ignored("it is a key of each dataset on S3"),
    "debug_aspect_buckets": ignored("`smalti dataset check` shows buckets"),
    "debug_dataset_loader": ignored("`smalti dataset check` shows what is loaded"),
    "print_filenames": ignored("`smalti dataset check` lists images that cannot be read"),
    "print_sampler_statistics": ignored("`smalti dataset check` shows buckets"),
}
