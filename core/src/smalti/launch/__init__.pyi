from .checks import check_run as check_run, find_problems as find_problems
from .plan import (
    DEFAULT_PORT as DEFAULT_PORT,
    check_accelerators as check_accelerators,
    expected_kind as expected_kind,
    merged_yaml as merged_yaml,
    yaml_text as yaml_text,
)
from .preflight import Preparation as Preparation
from .standby import standby_launcher as standby_launcher
