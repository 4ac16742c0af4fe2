"""What the agent of a node writes where, in real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

LOSE_A_STORE = """
import os, signal, sys, time
from torch.distributed import DistNetworkError, TCPStore

def lose_a_store():
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        time.sleep(60)
        os._exit(1)
    store = TCPStore("127.0.0.1", int(os.read(reading, 8)))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    try:
        store.get("anything")
    except DistNetworkError:
        print(sys.argv[1], "has lost its store", file=sys.stderr)

lose_a_store()
"""
AGENT = (
    """
import sys
from pathlib import Path
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from smalti_cluster.agent import log_apart

log_apart(Path(sys.argv[2]))
rank = SubprocessHandler(sys.executable, (sys.argv[3], "the rank"), {}, None, None, 0, None)
"""
    + LOSE_A_STORE
    + """
sys.exit(rank.proc.wait())
"""
)


def test_stacks_of_a_lost_store_are_in_the_log_of_the_agent_and_not_on_the_console(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rank.py").write_text(LOSE_A_STORE)
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, tmp_path / "agent.py", "the agent", tmp_path, tmp_path / "rank.py"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == ["the agent has lost its store", "the rank has lost its store"]
    log = (tmp_path / "logs" / f"agent-{socket.gethostname()}.log").read_text()
    assert "[c10d]" in log
    assert "frame #0" in log
