"""What the processes of a generation pass on: the launcher to its agent in the environment, and back in the launch's folder.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from smalti import ExitCode
from smalti.rundir import GROUP_VARIABLE
from smalti.system import load_json, read_regular, write_json_atomically

GENERATION_VARIABLE = GROUP_VARIABLE
"""The environment variable with the place of this node in its generation: only where a group can start again."""
GENERATION_FILE = Path("nodes", "generation.json")

Decision = Literal["again", "leave", "end"]
"""What a node does after a generation: it takes part in the next one, it leaves the others to it, or the run is over."""
_GROWS = "the group of nodes grows at step "


def growth(step: int, nodes: Sequence[int]) -> str:
    """With which message a generation is stopped so that nodes that wait can take part."""
    names = ", ".join(f"node {each}" for each in nodes)
    return f"{_GROWS}{step}: {names} can take part"


def grows(code: ExitCode, message: str) -> bool:
    """Whether a generation has ended only for that. A signal in the same step has another code."""
    return code is ExitCode.STOPPED and message.startswith(_GROWS)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A group of nodes from its forming to its end: the content of `nodes/generation.json`, written by its host.

    The host is the node whose launcher owns the run directory; its agent keeps the store through which the others meet, and it
    gets rank 0. `attempt` is that of the host. The nodes `members` meet and `used` of them train. `step` is the last one
    before it, `restarts` counts those since a step was made. `checkpoints` are those that were there when the run was started.
    `message` says what happened, `handed_over` that the host has left the group.
    """

    number: int
    attempt: float
    host: int
    address: str
    port: int
    members: tuple[int, ...]
    used: int
    step: int = 0
    restarts: int = 0
    checkpoints: tuple[str, ...] = ()
    message: str = ""
    handed_over: bool = False

    @property
    def present(self) -> int:
        """How many nodes meet."""
        return len(self.members)

    @property
    def run_id(self) -> str:
        """The name of its rendezvous."""
        return f"{self.attempt!r}-{self.number}"


def read_generation(directory: Path) -> Generation | None:
    """The current generation of the run in this directory; None if there is none."""
    with suppress(OSError, ValueError, TypeError):
        content = load_json(read_regular(directory / GENERATION_FILE))
        return Generation(**{**content, **{name: tuple(content[name]) for name in ("checkpoints", "members")}})
    return None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node in a generation. `address` is its own, `most` the number of nodes that the run may have, `seconds` how long it
    waits for the others, `directory` that of the run, `begun` when it was started (in unix seconds), `end` the file for its
    `GroupEnd`. `late`: the generation is formed without this node, which waits. `sizes` are the usable numbers of nodes,
    `grow_after` is the option.
    """

    generation: Generation
    machine_rank: int
    name: str
    address: str
    most: int
    seconds: int
    directory: str
    begun: float
    end: str
    late: bool = False
    sizes: tuple[int, ...] = ()
    grow_after: int | None = None

    @property
    def is_host(self) -> bool:
        return self.machine_rank == self.generation.host

    @classmethod
    def of_process(cls) -> Place | None:
        """The place of the node on which this process runs; None if its group cannot start again."""
        text = os.environ.get(GENERATION_VARIABLE)
        if text is None:
            return None
        content = load_json(text)
        return cls(**{**content, "generation": Generation(**content["generation"]), "sizes": tuple(content["sizes"])})

    def variables(self) -> dict[str, str]:
        return {GENERATION_VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True, kw_only=True)
class GroupEnd:
    """What the agent of a node knows at the end of a generation.

    `first_rank` and `count` are those of the ranks that it started; a spare started none. On the host, `again` are the nodes
    that take part in the next generation and `lost` those that ended without a word; `end` is the exit code and the message
    with which another node has ended the run.
    """

    first_rank: int = 0
    count: int = 0
    decision: Decision = "again"
    error: str = ""
    again: tuple[int, ...] | None = None
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    end: tuple[int, str] | None = None

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.count)

    def write(self, file: str) -> None:
        with suppress(OSError):
            write_json_atomically(Path(file), asdict(self))


def read_group_end(file: Path) -> GroupEnd | None:
    """What the agent wrote; None if it wrote nothing, or if the group cannot start again."""
    try:
        content = load_json(read_regular(file))
        for name in ("left", "lost", "again", "end"):
            content[name] = tuple(content[name]) if content[name] is not None else None
        return GroupEnd(**content)
    except (OSError, ValueError, TypeError):
        return None
