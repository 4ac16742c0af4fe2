from .arguments import CommandLine as CommandLine, pop_flag as pop_flag
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
    Group as Group,
    Root as Root,
)
from .places import Place as Place, PlaceType as PlaceType, opened_checkpoint as opened_checkpoint
