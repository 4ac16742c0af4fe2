from . import exit_reports as exit_reports, files as files
from .current_hook import kept_in as kept_in, noted as noted
from .exit import End as End, flush as flush
from .exit_reports import (
    FOLDER_VARIABLE as FOLDER_VARIABLE,
    SIGNALLED as SIGNALLED,
    ExitReport as ExitReport,
    HookEnd as HookEnd,
    code_of as code_of,
    describe as describe,
    hook_file as hook_file,
    launched as launched,
    preallocate as preallocate,
    read_exit_reports as read_exit_reports,
    read_hooks as read_hooks,
    read_killed as read_killed,
    write_exit_report as write_exit_report,
    write_exit_report_for as write_exit_report_for,
    write_killed as write_killed,
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
from .parent import PARENT_VARIABLE as PARENT_VARIABLE, die_with_parent as die_with_parent
from .process import Process as Process, raise_open_files_limit as raise_open_files_limit
from .signals import (
    STOPPING as STOPPING,
    Demands as Demands,
    Stopped as Stopped,
    Terminated as Terminated,
    conclude as conclude,
    handled as handled,
    immediate_exit_code as immediate_exit_code,
    interrupt as interrupt,
    live_for_one_command as live_for_one_command,
    preemption_signals as preemption_signals,
    say as say,
    terminated as terminated,
)
from .stateless_random import (
    as_signed as as_signed,
    derive_seed as derive_seed,
    permutation as permutation,
    text_hash as text_hash,
    uniform as uniform,
)
from .streams import ignore_write_errors as ignore_write_errors
