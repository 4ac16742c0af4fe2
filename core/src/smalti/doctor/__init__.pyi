from .plugin_checks import plugin_findings as plugin_findings
