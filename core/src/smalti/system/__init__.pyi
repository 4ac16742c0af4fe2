from . import exit_reports as exit_reports, files as files
from .current_hook import current_hook as current_hook, record_hook as record_hook, record_hook_in as record_hook_in
from .exit_reports import (
    FOLDER_VARIABLE as FOLDER_VARIABLE,
    SIGNALLED as SIGNALLED,
    ExitReport as ExitReport,
    UnreturnedHook as UnreturnedHook,
    allocated_ranks as allocated_ranks,
    describe as describe,
    exit_code_of as exit_code_of,
    hook_file as hook_file,
    launched as launched,
    name_ranks as name_ranks,
    preallocate as preallocate,
    read_exit_reports as read_exit_reports,
    read_hooks as read_hooks,
    read_killed as read_killed,
    write_exit_report as write_exit_report,
    write_killed as write_killed,
)
from .files import (
    Block as Block,
    atomic_write as atomic_write,
    counted as counted,
    create as create,
    duration as duration,
    format_bytes as format_bytes,
    free_bytes as free_bytes,
    fsync_directory as fsync_directory,
    link_or_copy as link_or_copy,
    load_json as load_json,
    load_toml as load_toml,
    make_directory as make_directory,
    open_regular as open_regular,
    parse_bytes as parse_bytes,
    parse_json as parse_json,
    read_regular as read_regular,
    remove_file as remove_file,
    remove_tree as remove_tree,
    rename as rename,
    sync as sync,
    write as write,
    write_json_atomically as write_json_atomically,
)
from .imports import importing as importing, keep_imports as keep_imports
from .liveness import (
    LostPeers as LostPeers,
    exit_within as exit_within,
    latest_progress as latest_progress,
    note_progress as note_progress,
    read_lost_peers as read_lost_peers,
    seconds_without_progress as seconds_without_progress,
    write_lost_peers as write_lost_peers,
)
from .process import (
    PARENT_VARIABLE as PARENT_VARIABLE,
    Process as Process,
    die_with_parent as die_with_parent,
    kill_tree as kill_tree,
    usable_cores as usable_cores,
)
from .process_exit import ProcessExit as ProcessExit
from .signals import (
    STOPPING as STOPPING,
    SignalFilter as SignalFilter,
    Stopped as Stopped,
    Terminated as Terminated,
    ignore_later_signals as ignore_later_signals,
    ignore_signals_after_command as ignore_signals_after_command,
    immediate_exit_code as immediate_exit_code,
    interrupt_main_thread as interrupt_main_thread,
    preemption_as_exception as preemption_as_exception,
    preemption_signals as preemption_signals,
    print_from_handler as print_from_handler,
    signal_handler as signal_handler,
)
from .stateless_random import (
    ComputedPermutation as ComputedPermutation,
    as_signed as as_signed,
    derive_seed as derive_seed,
    derive_seeds as derive_seeds,
    mixed as mixed,
    permutation as permutation,
    text_hash as text_hash,
    uniform as uniform,
    uniform_single as uniform_single,
)
from .streams import (
    flush_standard_streams as flush_standard_streams,
    ignore_write_errors as ignore_write_errors,
    plugin_output as plugin_output,
    reserve_stdout as reserve_stdout,
)
