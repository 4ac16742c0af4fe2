"""`python -I -S imported_python.py ADDRESS [-u] -c CODE` or `-m MODULE WORDS`: a Python that has imported what takes seconds.

It does this in a fork of the process that listens at the address, with all its open files: see `support.forked_workers`.
What is imported here is paid for by every start.
"""

import json
import os
import socket
import sys
from contextlib import suppress


def main(address: str, *words: str) -> int:
    """The exit code of the fork, negative after a signal."""
    passed = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with suppress(OSError):  # the listing's own
            os.fstat(number)
            passed.append(number)
    order = {
        "command": [sys.executable, *words],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "passed": sorted(passed)[3:],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"\0{address}")
        socket.send_fds(line, [json.dumps(order).encode()], sorted(passed))
        for each in passed:
            os.close(each)  # the other end of a pipe must see when the fork closes it
        return int(line.recv(100) or 1)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
