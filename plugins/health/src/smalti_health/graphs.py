"""Whether torch.compile does what it was asked for. Where it gives up, blocks run as they are: right, but slower."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch._dynamo.utils import counters

_LIMIT = "recompile limit exceeded"
_FIX = "TORCH_LOGS=graph_breaks,recompiles says where, and leaving --dynamo_backend out runs without"

_log = logging.getLogger(__name__)


class GraphWatch:
    """Looks after each step at what torch has counted in this process, and warns of each reason to give up once."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._looked = False
        self._known: set[str] = set()

    def look(self) -> None:
        for message in self._news():
            _log.warning("%s\n    fix: %s", message, _FIX)

    def _news(self) -> Iterator[str]:
        reasons = {*counters["graph_break"], *counters["unimplemented"]}
        if not self._looked and not counters["stats"]["unique_graphs"]:
            yield f"--dynamo_backend={self._backend} has compiled nothing in the first step: the model runs as it is"
        self._looked = True
        for reason in sorted(reasons - self._known):
            first = reason.partition("\n")[0]
            if _LIMIT in reason:
                yield "torch.compile has made as many graphs of a block as it may: further shapes of it run as they are"
            else:
                yield f"torch.compile has broken a block into several graphs: {first}"
        self._known |= reasons
