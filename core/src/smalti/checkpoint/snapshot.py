"""What a checkpoint holds, before it is written or after it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from smalti.parallel import PortableState


@dataclass(kw_only=True)
class Snapshot:
    """The state of a run at a step boundary.

    `state` and `ema` refer to the live tensors, fp32 masters by fully qualified name; saving reads them, loading fills them in
    place. `ema` is None when no average is kept. `trainer` is JSON-able: step, data position, learning-rate settings.
    `flags` are remarks for whoever looks at the checkpoint later, such as `smalti.checkpoint.manifest.SUSPECT`.
    """

    step: int
    state: PortableState
    ema: dict[str, Tensor] | None = None
    trainer: Mapping[str, object] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    config_digest: str = ""
    flags: tuple[str, ...] = ()
