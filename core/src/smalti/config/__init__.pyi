from . import accelerate_yaml as accelerate_yaml
from .accelerate_yaml import is_accelerate as is_accelerate
from .config import AUTOMATIC as AUTOMATIC, PER_MACHINE as PER_MACHINE, Config as Config
from .core_options import GROUPS as GROUPS
from .core_options.data import DataOptions as DataOptions
from .core_options.launch import (
    ONLY_ON_CUDA as ONLY_ON_CUDA,
    LaunchOptions as LaunchOptions,
    cuda_graph_problem as cuda_graph_problem,
    launch_problems as launch_problems,
)
from .core_options.model import ModelOptions as ModelOptions
from .core_options.run import (
    CheckpointOptions as CheckpointOptions,
    PluginOptions as PluginOptions,
    RunOptions as RunOptions,
    TrackingOptions as TrackingOptions,
)
from .core_options.training import (
    ObjectiveOptions as ObjectiveOptions,
    OptimizerOptions as OptimizerOptions,
    TrainingOptions as TrainingOptions,
    warm_up_notice as warm_up_notice,
    warm_up_problem as warm_up_problem,
)
from .edit import Edit as Edit, set_option as set_option
from .files import (
    PREFIX as PREFIX,
    expand as expand,
    parse_value as parse_value,
    read_mapping as read_mapping,
    read_text as read_text,
)
from .known_packages import (
    PLUGINS as PLUGINS,
    family_packages as family_packages,
    package_of as package_of,
    package_of_family as package_of_family,
    package_of_nodes as package_of_nodes,
    package_of_topic as package_of_topic,
    variable_of_nodes as variable_of_nodes,
)
from .options import (
    Dialect as Dialect,
    Given as Given,
    Level as Level,
    Names as Names,
    Option as Option,
    OptionGroup as OptionGroup,
    Schema as Schema,
    unknown as unknown,
)
from .other_trainers import (
    NAMES as NAMES,
    TABLES as TABLES,
    Kind as Kind,
    Recognized as Recognized,
    Trainer as Trainer,
    recognize as recognize,
    refuse_other_trainers as refuse_other_trainers,
)
from .resolution import draft as draft, resolve as resolve, restore as restore
from .sources import SCHEDULER as SCHEDULER, flat as flat
from .toml import as_toml as as_toml, put_into as put_into, set_values as set_values, toml_item as toml_item
