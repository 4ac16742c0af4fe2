"""`python forked_script.py ADDRESS SITE WORDS`: `python -m smalti WORDS` in a fork of the process that listens at the address.

See `forked_script` in `support.forked_popen`. What is imported here is paid for by every command.
"""

import json
import os
import socket
import sys
import time


def main(address: str, site: str, *words: str) -> int:
    """The exit code of the command, negative after a signal."""
    order = {
        "command": [sys.executable, "-m", "smalti", *words],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "site": site,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        deadline = time.monotonic() + 60
        while True:
            try:
                line.connect(f"\0{address}")
                break
            except ConnectionRefusedError:  # it has just been started
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        socket.send_fds(line, [json.dumps(order).encode()], [0, 1, 2])
        return int(line.recv(100) or 1)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
