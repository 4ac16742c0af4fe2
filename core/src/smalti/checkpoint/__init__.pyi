from .async_saver import Saver as Saver
from .conversion.export_request import (
    Computed as Computed,
    ExportFolder as ExportFolder,
    ExportRequest as ExportRequest,
    Usage as Usage,
)
from .conversion.formats import (
    Contents as Contents,
    OwnCheckpoint as OwnCheckpoint,
    Source as Source,
    guess_optimizer as guess_optimizer,
)
from .conversion.hyperparameters import hyperparameters as hyperparameters
from .conversion.new_folder import (
    ConversionError as ConversionError,
    check_free_space as check_free_space,
    check_new as check_new,
    make_folder as make_folder,
)
from .dtypes import DTYPES as DTYPES, NAMES as NAMES
from .format.content_validation import find_inconsistencies as find_inconsistencies
from .format.full_weights import write_weights as write_weights
from .format.manifest import (
    GROUPS as GROUPS,
    MANIFEST as MANIFEST,
    STATE as STATE,
    SUSPECT as SUSPECT,
    WEIGHTS as WEIGHTS,
    FileRecord as FileRecord,
    Manifest as Manifest,
    decode_manifest as decode_manifest,
    read_manifest as read_manifest,
)
from .format.safetensors_layout import (
    ITEM_SIZES as ITEM_SIZES,
    Chunk as Chunk,
    StoredTensor as StoredTensor,
    assemble_tensors as assemble_tensors,
    decode_layout as decode_layout,
    encode_header as encode_header,
    read_layout as read_layout,
    split as split,
    stored_tensors as stored_tensors,
)
from .format.safetensors_reader import TensorFiles as TensorFiles
from .format.state_file import State as State, decode_state as decode_state, read_state as read_state
from .format.store import (
    RANKING as RANKING,
    CheckpointStore as CheckpointStore,
    Entry as Entry,
    checkpoint_name as checkpoint_name,
    decode_ranking as decode_ranking,
    parse_checkpoint_name as parse_checkpoint_name,
    read_entry as read_entry,
)
from .format.verification import (
    Verification as Verification,
    is_ignored as is_ignored,
    matches as matches,
    named_step as named_step,
    new_digest as new_digest,
    quick_check as quick_check,
    verify as verify,
    write_with_digest as write_with_digest,
)
from .places import ListedCheckpoint as ListedCheckpoint, RunPlace as RunPlace
from .planning import (
    Chunks as Chunks,
    decode_chunks as decode_chunks,
    encode_chunks as encode_chunks,
    local_chunks as local_chunks,
    memory as memory,
)
from .reader import Loaded as Loaded, compare as compare, load as load
from .search import find_on_all_ranks as find_on_all_ranks
from .snapshot import Relay as Relay, Snapshot as Snapshot
from .staging import Arena as Arena
from .writer import SaveError as SaveError, save as save
