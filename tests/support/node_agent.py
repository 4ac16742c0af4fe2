"""A node as a process of its own: takes part in a check of nodes, and prints how it has ended. See `agents` in test_nodes.py.

The argument is JSON: machine_rank, num_machines, host, port, folder, and `facts` that differ from those of the other nodes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from smalti_cluster.checks.agent import Actions, Agent, Identity
from smalti_cluster.checks.channel import Message
from smalti_cluster.checks.facts import node_facts

FACTS: Message = {
    "plugins": ["toy 1.0"],
    "values": {"seed": 7},
    "devices": {"kind": "cpu", "count": 1, "name": "CPU", "text": "CPU"},
}


def actions_of(folder: Path, facts: Message, speed: float = 0) -> Actions:
    def gather() -> Message:
        given = {**FACTS, **facts}
        own = {key: given[key] for key in ("plugins", "values", "devices")}
        found = node_facts(**own, interface=("lo", "127.0.0.1"), data={})  # type: ignore[arg-type]
        return {**found, **facts}

    return Actions(output_dir=folder, folder=folder, facts=gather, measure=lambda seconds: {"devices": [measurement(speed)]})


def measurement(speed: float) -> Message:
    """Of a GPU of the same model and the same identity as before."""
    named = {"device": "GPU-1", "name": "GPU", "kind": "cuda", "index": 0}
    return {**named, "products": {"bf16": speed}, "memory": 1e12, "time": 0.0}


def main() -> None:
    given = json.loads(sys.argv[1])
    own = Identity(
        machine_rank=given["machine_rank"],
        num_machines=given["num_machines"],
        host=given["host"],
        version=given.get("version", "1"),
    )
    actions = actions_of(Path(given["folder"]), given.get("facts", {}), given.get("speed", 0))
    agent = Agent(own, actions, "127.0.0.1", given["port"])
    while not agent.done:
        time.sleep(0.02)
    print(json.dumps({"ended": agent.ended, "refused": agent.refused}))


if __name__ == "__main__":
    main()
