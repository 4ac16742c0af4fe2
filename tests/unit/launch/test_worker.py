"""The process of a rank, before it is connected with others."""

import subprocess
import sys


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    script = "\n".join(
        (
            "import resource",
            "from smalti.launch.worker import _raise_open_files_limit",
            "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))",
            "_raise_open_files_limit()",
            "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536) > 64)",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
