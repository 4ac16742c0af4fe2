from .arguments import CommandLine as CommandLine, pop_flag as pop_flag
from .checkpoint import step_or_best as step_or_best
from .entry import main as main, main_train as main_train
from .output import (
    counted as counted,
    format_bytes as format_bytes,
    print_table as print_table,
    progress_bar as progress_bar,
    write_file as write_file,
    write_output as write_output,
)
from .pages.help import (
    Command as Command,
    Formatter as Formatter,
    Group as Group,
    Root as Root,
    on_terminal as on_terminal,
    show_page as show_page,
    write_options as write_options,
)
from .pages.options import (
    condition as condition,
    default_text as default_text,
    describe as describe,
    sections as sections,
)
from .places import LocalPlace as LocalPlace, Place as Place, place_at as place_at
