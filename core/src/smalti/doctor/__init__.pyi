from .bundle import write_bundle as write_bundle
from .checks.storage import existing as existing
from .child import ChildResult as ChildResult, run_in_child as run_in_child
from .masking import Mask as Mask
from .measure import (
    DiskMeasurement as DiskMeasurement,
    Measurement as Measurement,
    measure_device as measure_device,
    measure_disk as measure_disk,
)
from .measurements import (
    describe as describe,
    measure_node as measure_node,
    slower_devices as slower_devices,
    slower_than_before as slower_than_before,
)
from .node import diagnose_node as diagnose_node
from .plugin_checks import plugin_findings as plugin_findings
from .report import Report as Report, Section as Section
