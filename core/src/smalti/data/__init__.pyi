from .batch_check import BatchShape as BatchShape, BucketCount as BucketCount
from .buckets import Bucket as Bucket, CropSettings as CropSettings
from .dataset import Dataset as Dataset
from .datasets.captions import depends_on_text_file as depends_on_text_file
from .datasets.columns import Column as Column, ColumnKeys as ColumnKeys, ColumnSample as ColumnSample, Framing as Framing
from .datasets.parse import DataDefaults as DataDefaults, is_comment as is_comment, parse_datasets as parse_datasets
from .datasets.sources import (
    LISTED as LISTED,
    Listed as Listed,
    ListedState as ListedState,
    MetadataSource as MetadataSource,
    listed_columns as listed_columns,
)
from .datasets.spec import (
    BUILT_IN_METADATA as BUILT_IN_METADATA,
    BUILT_IN_STORAGES as BUILT_IN_STORAGES,
    ENTRY_KEYS as ENTRY_KEYS,
    CaptionShuffle as CaptionShuffle,
    Catalog as Catalog,
    DatasetSpec as DatasetSpec,
    Folder as Folder,
    JsonTable as JsonTable,
    catalog_of as catalog_of,
    latents_entry as latents_entry,
    own_texts_entry as own_texts_entry,
    texts_entry as texts_entry,
    unused_caches as unused_caches,
)
from .datasets.wrong_values import wrong_values as wrong_values
from .encoded import (
    CachedLatents as CachedLatents,
    CachedTexts as CachedTexts,
    CropOffset as CropOffset,
    DataEncoder as DataEncoder,
    Encoded as Encoded,
    encode_ahead as encode_ahead,
    encoding_cache as encoding_cache,
    find_encoder as find_encoder,
    fixed_crop as fixed_crop,
)
from .from_options import (
    Scan as Scan,
    check_sources as check_sources,
    data_rules as data_rules,
    dataset_specs as dataset_specs,
    load_data as load_data,
    ranks_scan as ranks_scan,
    scan_data as scan_data,
    scan_entry as scan_entry,
    scan_progress as scan_progress,
    total_steps as total_steps,
    was_scanned as was_scanned,
)
from .images import (
    Bytes as Bytes,
    crop as crop,
    decode as decode,
    normalised as normalised,
    srgb_transform as srgb_transform,
    upright as upright,
)
from .loader import (
    Batch as Batch,
    Loader as Loader,
    MicroBatch as MicroBatch,
    PlannedPasses as PlannedPasses,
    SecondCaptions as SecondCaptions,
    pass_parts as pass_parts,
)
from .order import (
    Beginning as Beginning,
    BucketSamples as BucketSamples,
    Order as Order,
    Part as Part,
    Passes as Passes,
    Version as Version,
)
from .plan.bucket_rows import known_buckets as known_buckets
from .prepared import (
    PreparedData as PreparedData,
    build_datasets as build_datasets,
    crop_settings_of as crop_settings_of,
    prepare as prepare,
)
from .scan.build import (
    Kept as Kept,
    MakeRows as MakeRows,
    Progress as Progress,
    reading_threads as reading_threads,
    write_rows as write_rows,
    written as written,
)
from .scan.changes import changes as changes, keep as keep
from .scan.earlier import EarlierRows as EarlierRows
from .scan.identity import Identity as Identity, Settings as Settings, first_digest as first_digest
from .scan.image_sizes import (
    DECODING_ERRORS as DECODING_ERRORS,
    EXTENSIONS as EXTENSIONS,
    open_image as open_image,
    read_header as read_header,
)
from .scan.index import DatasetIndex as DatasetIndex, load_index as load_index
from .scan.index_file import IndexFile as IndexFile
from .scan.quarantine import (
    BadSampleError as BadSampleError,
    ErrorBudget as ErrorBudget,
    Quarantined as Quarantined,
)
from .scan.rows import Rows as Rows
from .sources.image_files import ImageFiles as ImageFiles, has_extension as has_extension, stems as stems
from .sources.unchanged import (
    FILES as FILES,
    ListedOnce as ListedOnce,
    ListingDigest as ListingDigest,
    rebatched as rebatched,
    visible as visible,
)
from .storage.columns import file_columns as file_columns
from .storage.local import LocalStorage as LocalStorage
from .storage.protocol import (
    AccessDeniedError as AccessDeniedError,
    IntegrityError as IntegrityError,
    InvalidKeyError as InvalidKeyError,
    MissingFileError as MissingFileError,
    Storage as Storage,
    StorageError as StorageError,
    StoredFile as StoredFile,
    Traffic as Traffic,
    TransientStorageError as TransientStorageError,
    checked_key as checked_key,
)
from .threads import Threads as Threads
