from .arguments import Invocation as Invocation
from .entry import built_in_commands as built_in_commands, main as main, main_train as main_train
from .output import counted as counted, in_bytes as in_bytes, print_table as print_table
from .pages.help import (
    Command as Command,
    Group as Group,
)
