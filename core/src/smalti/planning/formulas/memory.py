"""The memory of one rank in each phase, as closed formulas. Imports no torch.

Exact for what stays between steps; activations come from a counted forward pass. What remains is estimated: the moment at which
gradients and activations meet, and what a block needs while its gradients are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from smalti.planning.facts import ModelFacts
from smalti.planning.formulas.run_facts import RunFacts
from smalti.planning.records import Candidate, MemoryParts, PhasePeak
from smalti.types import Strategy

_OF_GRADIENTS = 0.7
"""Gradients of activations in the backward pass of a block, as a fraction of what it has kept, by rehearsals of FLUX.1."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What stays between steps on the device and in host memory, and the peaks of the phases."""

    resident: MemoryParts
    resident_host: int
    phases: dict[str, PhasePeak]


def memory_of(model: ModelFacts, run: RunFacts, strategy: Strategy, candidate: Candidate, ranks: int) -> Memory:
    """The memory of one of `ranks` ranks with `candidate.micro_batch` samples of the counted size in each micro-batch."""
    return _Formula(model, run, strategy, candidate, ranks).result()


class _Formula:
    def __init__(self, model: ModelFacts, run: RunFacts, strategy: Strategy, candidate: Candidate, ranks: int) -> None:
        self.model, self.run, self.strategy, self.candidate, self.ranks = model, run, strategy, candidate, ranks
        self.batch = candidate.micro_batch / strategy.context
        blocks = model.sample.blocks
        self.largest = max((block.parameters for block in blocks), default=model.largest)
        self.largest_trained = max((block.trained for block in blocks), default=model.largest)
        self.held = {part: self._held(part) for part in ("weights", "gradients", "state")}
        self.ema = model.trained * 4 // strategy.divided.get("state", 1) if run.ema else 0

    def _held(self, part: str) -> int:
        """Bytes of a rank's share of a part, wherever it is."""
        each = self.strategy.bytes.get(part, 4.0) + (self.run.state_bytes if part == "state" else 0)  # type: ignore[call-overload]
        return int(self.model.trained * each / self.strategy.divided.get(part, 1))  # type: ignore[call-overload]

    def result(self) -> Memory:
        resident = self.between()
        host = sum(size for part, size in self.held.items() if part in self.strategy.offloaded)
        host += 0 if self.run.ema_on_device else self.ema
        # Ranks share the work of a save, whoever holds a copy; weights are saved in fp32.
        saved = self.model.trained * (4 + self.run.state_bytes + (4 if self.run.ema else 0))
        written = int(saved / self.ranks)
        phases = {name: PhasePeak(device=parts, host=host) for name, parts in self.moments(resident).items()}
        phases["save"] = PhasePeak(device=resident, host=host + written, pinned=written)
        return Memory(resident=resident, resident_host=host, phases=phases)

    def between(self) -> MemoryParts:
        """What stays between two steps."""
        on_device = {part: 0 if part in self.strategy.offloaded else size for part, size in self.held.items()}
        return MemoryParts(
            parameters=on_device["weights"] + self.model.frozen_bytes // self.strategy.frozen + self.model.buffers,
            gradients=on_device["gradients"] if self.strategy.keeps_gradients else 0,
            optimizer=on_device["state"],
            ema=self.ema if self.run.ema_on_device else 0,
            temporaries=int(min(self.strategy.buffers, self.strategy.buffers_per_parameter * self.model.trained)),
        )

    def moments(self, resident: MemoryParts) -> dict[str, MemoryParts]:
        gradients = 0 if "gradients" in self.strategy.offloaded else self.held["gradients"]
        kept, block = self.kept(), int(self.batch * max((each.saved for each in self.model.sample.blocks), default=0))
        forward = replace(
            resident,
            activations=kept,
            gathered=self.gathered(),
            temporaries=resident.temporaries + self.copies(whole=True),
            gradients=gradients if self.candidate.accumulation > 1 else resident.gradients,
        )
        recomputed = 0 if self.candidate.recompute == "none" else block
        transient = int(recomputed + _OF_GRADIENTS * block + self.strategy.reduced_bytes * self.largest_trained)
        working = replace(
            forward,
            gathered=self.gathered(copies=1),
            temporaries=resident.temporaries + transient + self.copies(whole=False),
        )
        start = replace(working, temporaries=working.temporaries + self._copies_at_the_start())
        end = replace(working, activations=0, gradients=gradients)
        step = replace(resident, gradients=gradients)
        return {
            "forward": forward,
            "backward": max(start, end, key=lambda parts: parts.total),
            "step": step,
            "validation": replace(resident, gathered=self.gathered(), temporaries=resident.temporaries + self._validation()),
        }

    def kept(self) -> int:
        """Bytes that the backward pass needs of all samples of a micro-batch, at the end of the forward pass."""
        sample, mode = self.model.sample, self.candidate.recompute
        inputs = sum(block.inputs for block in sample.blocks)
        of_blocks = {
            "none": sum(block.saved for block in sample.blocks),
            "selective": sum(min(block.saved, block.inputs + block.products) for block in sample.blocks),
            "full": inputs,
        }[mode]
        return int(self.batch * (sample.saved + of_blocks))

    def gathered(self, copies: int | None = None) -> int:
        """Whole weights of blocks, by default of those in the forward pass; and of what is in no block, which stay."""
        if not self.strategy.gathered:
            return 0
        count = self.strategy.gathered if copies is None else copies
        return int(self.strategy.gathered_bytes * (count * self.largest + self.model.outside))

    def copies(self, *, whole: bool) -> int:
        """Weights that autocast has cast: all of them in a forward pass; those of one block while it is recomputed."""
        if self.strategy.own_copies:
            return 0
        sample = self.model.sample
        return sample.copied + (sum if whole else max)([block.copied for block in sample.blocks] or [0])

    def _copies_at_the_start(self) -> int:
        """Without recomputation, the backward pass needs all copies that the forward pass has made."""
        if self.candidate.recompute != "none":
            return 0
        return self.copies(whole=True) - self.copies(whole=False)

    def _validation(self) -> int:
        """With EMA weights, a copy of the live ones is kept; and the copies that autocast makes."""
        return (self.held["weights"] if self.run.ema else 0) + self.copies(whole=True)
