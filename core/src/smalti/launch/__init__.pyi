from .agent import EXTENSION_VARIABLE as EXTENSION_VARIABLE
from .checks import check_run as check_run, find_problems as find_problems
from .launcher import (
    Ended as Ended,
    LaunchResult as LaunchResult,
    received_signals as received_signals,
    run_workers as run_workers,
    summarize_exits as summarize_exits,
)
from .plan import (
    CHOSEN_VARIABLE as CHOSEN_VARIABLE,
    DEFAULT_PORT as DEFAULT_PORT,
    LaunchPlan as LaunchPlan,
    Rendezvous as Rendezvous,
    check_accelerators as check_accelerators,
    expected_kind as expected_kind,
    merged_yaml as merged_yaml,
    plan_launch as plan_launch,
    yaml_text as yaml_text,
)
from .preflight import LaunchSite as LaunchSite, Preparation as Preparation, Progress as Progress
from .standby import StandbyLauncher as StandbyLauncher
