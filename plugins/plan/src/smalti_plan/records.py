"""The records of the planner: ways to train, and what a rehearsal of one of them has counted. Imports no torch.

Sizes are in bytes, rates in units per second, times in seconds. All records can be written as JSON and read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal, cast

Recompute = Literal["none", "selective", "full"]
"""Which activations are computed again in the backward pass: none, all but those of costly operations, or whole blocks."""
Guard = Literal["none", "extension", "python"]
"""By what torch believed in devices that are not there: nothing was needed, a compiled extension, torch's Python backend."""
PHASES = (
    *("load", "encode texts", "encode images", "forward", "backward", "clip", "step", "save", "validation"),
    "between",
)
"""The phases of a run, in the order in which they are counted; "between" is what stays when a step is over."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train a configuration.

    `strategy` is what the plan of the strategy calls itself: "ddp" (also for one rank), "fsdp2", "deepspeed". `options` are the
    options that a run needs for it beside the size of its batches, by name.
    """

    strategy: str = "ddp"
    recompute: Recompute = "none"
    micro_batch: int = 1
    accumulation: int = 1
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes on one device at one moment, by what they are for.

    `gathered` are whole parameters of sharded blocks and the buffers of collective operations. `activations` were computed in
    the forward pass and are kept for the backward pass. `frozen` are parts that do not train and are not in the model, such as
    encoders.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    ema: int = 0
    activations: int = 0
    gathered: int = 0
    temporaries: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        return sum(cast(int, getattr(self, each.name)) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The largest moment of one phase. `host` is host memory at its own largest moment, of which `pinned` cannot be swapped."""

    device: MemoryParts = field(default_factory=MemoryParts)
    host: int = 0
    pinned: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends and receives in a step by one kind of collective operation in groups of `ranks` ranks.

    `bytes` is the size of the whole tensor: what all ranks of the group have after gathering it, or before reducing it.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send"]
    ranks: int
    bytes: int
    calls: int
    nodes: int = 1
    """On how many nodes the ranks of a group are."""
    phase: str = ""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of a step: products of matrices, convolutions or attention; by the type of the operands."""

    kind: Literal["matmul", "convolution", "attention", "other"]
    dtype: str
    flops: int
    calls: int


@dataclass(frozen=True, kw_only=True)
class RehearsalError:
    """Why a rehearsal ended early: as the run would report it. `where` is the innermost line of smalti, a plugin or the user.

    `phase` is the phase that it ended in. `user`: the message says what to do, and the traceback adds nothing.
    """

    message: str
    where: str = ""
    phase: str = ""
    user: bool = False
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank needs to train a configuration in one way, counted while its own code ran on tensors without values.

    `width` and `height` are the pixels of the largest images, `text_tokens` the longest row of what conditions a sample (0: not
    counted). `resident` stays between two steps. `phases` are the peaks by the names of `PHASES`; only phases that ran.
    `bytes_touched` is what operations of a step read and write. `counted` says how: "rehearsed"; "modelled" where the messages
    between ranks are computed and all else ran; "formula" where the strategy cannot run without a device. `notes` are what
    the figures leave out, in sentences.
    """

    candidate: Candidate
    device: str
    ranks: int
    rank: int = 0
    counted: Literal["rehearsed", "modelled", "formula"] = "rehearsed"
    guard: Guard = "none"
    parameters: int = 0
    trainable: int = 0
    width: int = 0
    height: int = 0
    text_tokens: int = 0
    resident: MemoryParts = field(default_factory=MemoryParts)
    resident_host: int = 0
    phases: Mapping[str, PhasePeak] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    operations: tuple[Operations, ...] = ()
    bytes_touched: int = 0
    save_bytes: int = 0
    """What this rank writes in a save."""
    notes: tuple[str, ...] = ()
    error: RehearsalError | None = None
    cpu_seconds: float = 0.0
    """What it has cost, to be shown with an estimate for others."""

    @property
    def peak(self) -> MemoryParts:
        """The parts of the largest moment of all phases."""
        return max((phase.device for phase in self.phases.values()), key=lambda parts: parts.total, default=self.resident)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].device.total, default="")

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Rehearsal:
        """What `as_json` returned. Raises TypeError or KeyError for anything else."""
        given = dict(values)
        phases = cast(Mapping[str, Mapping[str, object]], given.pop("phases"))
        error = cast("Mapping[str, object] | None", given.pop("error"))
        return cls(
            candidate=Candidate(**cast(dict[str, object], given.pop("candidate"))),  # type: ignore[arg-type]
            resident=_parts(given.pop("resident")),
            phases={name: replace(PhasePeak(**phase), device=_parts(phase["device"])) for name, phase in phases.items()},  # type: ignore[arg-type]
            traffic=tuple(Traffic(**each) for each in cast(list[dict[str, object]], given.pop("traffic"))),  # type: ignore[arg-type]
            operations=tuple(Operations(**each) for each in cast(list[dict[str, object]], given.pop("operations"))),  # type: ignore[arg-type]
            notes=tuple(cast(list[str], given.pop("notes"))),
            error=None if error is None else RehearsalError(**error),  # type: ignore[arg-type]
            **given,  # type: ignore[arg-type]
        )


def _parts(values: object) -> MemoryParts:
    return MemoryParts(**cast(dict[str, int], values))
