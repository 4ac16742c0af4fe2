from .checks import check_run as check_run
from .plan import (
    check_accelerators as check_accelerators,
    expected_kind as expected_kind,
    merged_yaml as merged_yaml,
    yaml_text as yaml_text,
)
from .preflight import Preparation as Preparation
from .standby import standby_launcher as standby_launcher
