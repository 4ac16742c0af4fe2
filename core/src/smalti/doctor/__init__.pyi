from .bundle import write_bundle as write_bundle
from .child import ChildResult as ChildResult, run_in_child as run_in_child
from .masking import Mask as Mask
from .node import diagnose_node as diagnose_node
from .plugin_checks import plugin_findings as plugin_findings
from .report import Report as Report, Section as Section
