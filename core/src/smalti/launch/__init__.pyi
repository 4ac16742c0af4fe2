from .checks import check_run as check_run, find_problems as find_problems
from .node_checks import (
    Notice as Notice,
    facts_of as facts_of,
    finding_lines as finding_lines,
    identity as identity,
    read_report as read_report,
)
from .plan import (
    DEFAULT_PORT as DEFAULT_PORT,
    check_accelerators as check_accelerators,
    expected_kind as expected_kind,
    merged_yaml as merged_yaml,
    yaml_text as yaml_text,
)
from .preflight import Preparation as Preparation
from .schedulers.job import Job as Job, job_of as job_of
from .schedulers.kubernetes_manifest import KubernetesOptions as KubernetesOptions, manifest as manifest
from .schedulers.nodes_of_job import (
    nodes_with_faults as nodes_with_faults,
    result_of as result_of,
    split_nodes as split_nodes,
)
from .schedulers.slurm_script import SlurmOptions as SlurmOptions, job_script as job_script
from .standby import standby_launcher as standby_launcher
