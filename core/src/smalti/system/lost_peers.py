"""What the agent of a node knows of the other nodes of the launch, in a file that its ranks read.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smalti.system.exit_reports import FOLDER_VARIABLE
from smalti.system.files import atomic_write

_FILE = "lost.json"


@dataclass(frozen=True, kw_only=True)
class LostPeers:
    """`nodes` that are lost, and `ranks` that were killed, by their numbers, each with how that was noticed.

    `fix` is what a user can do about lost nodes.
    """

    nodes: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, str] = field(default_factory=dict)
    fix: str = field(default="", compare=False)


def write_lost_peers(peers: LostPeers) -> None:
    """Let the ranks of this node know, in its agent. Has no effect where the file cannot be written."""
    with suppress(OSError):
        atomic_write(Path(os.environ[FOLDER_VARIABLE]) / _FILE, json.dumps(asdict(peers)).encode())


def read_lost_peers() -> LostPeers:
    """What the agent has written; nothing where no launcher has started this process. Costs one call of the system."""
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        values = json.loads((Path(folder) / _FILE).read_bytes()) if folder is not None else {}
    except (OSError, ValueError):
        return LostPeers()
    nodes, ranks = ({int(number): why for number, why in values.get(kind, {}).items()} for kind in ("nodes", "ranks"))
    return LostPeers(nodes=nodes, ranks=ranks, fix=values.get("fix", ""))
