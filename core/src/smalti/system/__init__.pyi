from . import exit_reports as exit_reports, files as files
from .current_hook import kept_in as kept_in, noted as noted
from .exit import End as End, flush as flush
from .exit_reports import (
    FOLDER_VARIABLE as FOLDER_VARIABLE,
    SIGNALLED as SIGNALLED,
    HookEnd as HookEnd,
    RankEnd as RankEnd,
    code_of as code_of,
    describe as describe,
    hook_file as hook_file,
    launched as launched,
    leave_killed as leave_killed,
    leave_word as leave_word,
    leave_word_for as leave_word_for,
    make_room as make_room,
    read_ends as read_ends,
    read_hooks as read_hooks,
    read_killed as read_killed,
)
from .files import (
    Block as Block,
    atomic_write as atomic_write,
    create as create,
    free_bytes as free_bytes,
    fsync_directory as fsync_directory,
    make_directory as make_directory,
    parse_json as parse_json,
    remove_file as remove_file,
    remove_tree as remove_tree,
    rename as rename,
    sync as sync,
    write as write,
    write_json_atomically as write_json_atomically,
)
from .imports import importing as importing, keep_imports as keep_imports
from .liveness import latest_progress as latest_progress, leave_within as leave_within, note_progress as note_progress
from .parent import PARENT_VARIABLE as PARENT_VARIABLE, follow_parent as follow_parent
from .process import Process as Process, raise_open_files_limit as raise_open_files_limit
from .signals import (
    STOPPING as STOPPING,
    Demands as Demands,
    Stopped as Stopped,
    Terminated as Terminated,
    code_at_once as code_at_once,
    conclude as conclude,
    handled as handled,
    interrupt as interrupt,
    live_for_one_command as live_for_one_command,
    pre_emptions as pre_emptions,
    say as say,
    terminated as terminated,
)
from .stateless_random import (
    as_signed as as_signed,
    fraction as fraction,
    key_of as key_of,
    permutation as permutation,
    text_hash as text_hash,
)
from .streams import outlast as outlast
