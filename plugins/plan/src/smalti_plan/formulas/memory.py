"""The memory of one rank in each phase, as closed formulas. Imports no torch.

Exact for what stays between steps; activations come from a counted forward pass. What remains is estimated: the moment at which
gradients and activations meet, and what a block needs while its gradients are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from smalti import Communication, Strategy
from smalti_plan.facts import BlockFacts, ModelFacts
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.records import Candidate, MemoryParts, PhasePeak, Recompute

_OF_GRADIENTS = 0.7
"""Gradients of activations in the backward pass of a block that was not counted, as a fraction of what it has kept."""

_NOT_ON_HOST = 3
"""Inputs of blocks on the device while the others wait in host memory: one in use, two on their way."""


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
        self.held = {part: self._held(part) for part in ("weights", "gradients", "state")}
        self.frozen = model.frozen.bytes // strategy.frozen
        self.streamed = self.frozen - resident_bytes(model, strategy, candidate)
        self.ema = model.trained * 4 // strategy.divided.get("state", 1) if run.ema else 0

    def _held(self, part: str) -> int:
        """Bytes of a rank's share of a part, wherever it is."""
        each = self.strategy.bytes.get(part, 4.0) + (self.run.state_bytes if part == "state" else 0)  # type: ignore[call-overload]
        if self.run.bf16_weights and part != "state":
            each /= 2
        count = self.model.trained
        if self.run.releases_gradients and part == "gradients":
            count = min(count, max(self.largest, self.model.largest))
        return int(count * each / self.strategy.divided.get(part, 1))  # type: ignore[call-overload]

    def result(self) -> Memory:
        resident = self.between()
        host = sum(size for part, size in self.held.items() if part in self.strategy.offloaded)
        host += self.streamed
        host += self.model.sample.trained_passes * (sum(self.inputs()) - self.on_device(self.inputs()))
        host += 0 if self.run.ema_on_device else self.ema
        # Ranks share the work of a save, whoever holds a copy.
        average = 4 if self.run.ema or self.run.averages else 0
        saved = self.model.trained * ((2 if self.run.bf16_weights else 4) + self.run.state_bytes + average)
        written = int(saved / self.ranks)
        phases = {name: PhasePeak(device=parts, host=host) for name, parts in self.moments(resident).items()}
        made = self.held["weights"] if self.run.averages else 0  # an EMA is there, the average of an optimizer is computed
        at_save = replace(resident, temporaries=resident.temporaries + made)
        phases["save"] = PhasePeak(device=at_save, host=host + written, pinned=written)
        return Memory(resident=resident, resident_host=host, phases=phases)

    def between(self) -> MemoryParts:
        """What stays between two steps."""
        on_device = {part: 0 if part in self.strategy.offloaded else size for part, size in self.held.items()}
        return MemoryParts(
            parameters=on_device["weights"] + self.model.buffers + self.frozen - self.streamed,
            gradients=on_device["gradients"] if self.strategy.keeps_gradients else 0,
            optimizer=on_device["state"],
            ema=self.ema if self.run.ema_on_device else 0,
            gathered=self.gathered() if self.has_slots else 0,
            temporaries=self.buffers if self.strategy.keeps_buffers else 0,
        )

    @property
    def has_slots(self) -> bool:
        """Whether gathered copies have their places on the device all the time: blocks are streamed there, and not gathered."""
        return "frozen" in self.strategy.offloaded and not self.strategy.divided

    @property
    def buffers(self) -> int:
        return int(min(self.strategy.buffers, self.strategy.buffers_per_parameter * self.model.trained))

    @property
    def summed(self) -> int:
        """Bytes on the device in which offloaded gradients of several ranks or backward passes are added up."""
        if self.ranks == self.backward_passes == 1:
            return 0
        return int(self.model.trained * self.strategy.summed_bytes / self.strategy.divided.get("gradients", 1))

    @property
    def backward_passes(self) -> int:
        """Of a step."""
        return self.candidate.accumulation * self.model.sample.turns

    def moments(self, resident: MemoryParts) -> dict[str, MemoryParts]:
        gradients = self.summed if "gradients" in self.strategy.offloaded else self.held["gradients"]
        forward = replace(
            resident,
            activations=self.kept(),
            gathered=self.gathered(),
            temporaries=resident.temporaries + self.copies(whole=True),
            gradients=gradients if self.backward_passes > 1 else resident.gradients,
        )
        end = replace(forward, activations=0, gradients=gradients, gathered=self.gathered(copies=1))
        end = replace(end, temporaries=self.buffers + self.copies(whole=False))
        backward = [*self.backward(forward, gradients), end]
        step = replace(resident, gradients=gradients)
        return {
            "forward": forward,
            "backward": max(backward, key=lambda parts: parts.total),
            "step": step,
            "validation": replace(resident, gathered=self.gathered(), temporaries=resident.temporaries + self._validation()),
        }

    def backward(self, forward: MemoryParts, gradients: int) -> Iterator[MemoryParts]:
        """The moment of each block in the backward pass, from the last block on: activations go, gradients come."""
        model, blocks = self.model, self.model.sample.blocks
        inputs, copied, done = self.inputs(), self.copies(whole=True), 0
        for block in reversed(blocks):
            done += block.trained
            at_once = self.run.releases_gradients or self.strategy.summed_bytes
            share = 1.0 if at_once else done / max(1, model.trained)
            growing = max(forward.gradients, int(gradients * share))
            own = self.copied_of(block)
            transient = self.batch * _transient(block, self.candidate.recompute) + self.strategy.reduced_bytes * block.trained
            yield replace(
                forward,
                activations=self.kept(inputs),
                gathered=self.gathered(copies=1),
                temporaries=int(self.buffers + transient)
                + (copied if self.candidate.recompute == "none" else self.model.frozen.restoring + own),
                gradients=growing,
            )
            inputs.pop()
            copied -= own

    def kept(self, inputs: Sequence[int] | None = None) -> int:
        """Bytes on the device that the backward pass needs of all samples of a micro-batch, at the end of the forward pass.

        `inputs` are what blocks keep of the last forward pass; by default all blocks. Of those before it they keep all.
        """
        of_each, passes = int(self.batch * self.model.sample.saved), self.model.sample.trained_passes
        last, others = self.on_device(self.inputs() if inputs is None else inputs), self.on_device(self.inputs())
        return passes * of_each + last + (passes - 1) * others

    def inputs(self) -> list[int]:
        """Bytes that each block keeps for the backward pass, of all samples of a micro-batch."""
        return [int(self.batch * _kept(block, self.candidate.recompute)) for block in self.model.sample.blocks]

    def on_device(self, inputs: Sequence[int]) -> int:
        """What the device holds of what blocks keep: all, or what is in use and on its way where the rest is on the host."""
        waits = self.run.activations_on_host or "activations" in self.strategy.offloaded
        return sum(sorted(inputs)[-_NOT_ON_HOST:] if waits and self.candidate.recompute == "full" else inputs)

    def gathered(self, copies: int | None = None) -> int:
        """Whole weights of blocks, by default of those in the forward pass; and of what is in no block, which stay."""
        if not self.strategy.gathered:
            return 0
        count = self.strategy.gathered if copies is None or self.has_slots else copies
        blocks = [gathered_bytes(self.model, self.strategy, block) for block in self.model.sample.blocks]
        largest = max(blocks, default=self.strategy.gathered_bytes * self.largest)
        return int(count * largest + self.strategy.gathered_bytes * self.model.outside)

    def copies(self, *, whole: bool) -> int:
        """Weights that autocast has cast: all of them in a forward pass; those of one block while it is recomputed.

        With released gradients and recomputed blocks, those of one block at any time. And what one layer needs while its frozen
        weight is restored.
        """
        sample = self.model.sample
        whole = whole and not (self.run.releases_gradients and self.candidate.recompute == "full")
        outside = 0 if self.own_copies else sample.copied
        return (
            self.model.frozen.restoring
            + outside
            + (sum if whole else max)([self.copied_of(block) for block in sample.blocks] or [0])
        )

    def copied_of(self, block: BlockFacts) -> int:
        return 0 if self.own_copies else block.copied

    @property
    def own_copies(self) -> bool:
        return self.strategy.own_copies or self.run.bf16_weights

    def _validation(self) -> int:
        """With EMA weights, a copy of the live ones is kept; and the copies that autocast makes."""
        return (self.held["weights"] if self.run.ema else 0) + self.copies(whole=True)


def resident_bytes(model: ModelFacts, strategy: Strategy, candidate: Candidate) -> int:
    """Bytes of frozen weights that stay on each device: all of them, or what the option `resident_gib` leaves there."""
    frozen = model.frozen.bytes // strategy.frozen
    if "frozen" not in strategy.offloaded:
        return frozen
    return min(frozen, int(cast(float, candidate.options.get("resident_gib", 0)) * 2**30))


def gathered_bytes(model: ModelFacts, strategy: Strategy, block: BlockFacts) -> float:
    """Bytes of a gathered block. Frozen weights that are kept in less than others are gathered in are gathered as they are."""
    outside = model.outside - model.outside_trained
    inside = model.parameters - model.trained - outside
    kept = (model.frozen.bytes - strategy.gathered_bytes * outside) / inside if inside else strategy.gathered_bytes
    frozen = block.parameters - block.trained
    return strategy.gathered_bytes * block.trained + min(strategy.gathered_bytes, kept) * frozen


def sent_bytes(each: Communication, model: ModelFacts, strategy: Strategy, candidate: Candidate) -> float:
    """Bytes that one rank sends in a step."""
    parameters: float = model.trained if each.of == "trained" else model.parameters
    if each.of == "all" and strategy.gathered_bytes:
        for block in model.sample.blocks:
            parameters -= block.parameters - gathered_bytes(model, strategy, block) / strategy.gathered_bytes
    return (candidate.accumulation if each.times == "micro-batch" else 1) * parameters * each.bytes_per_parameter


def _kept(block: BlockFacts, mode: Recompute) -> int:
    """Bytes that stay of one sample until the backward pass reaches the block."""
    by_mode = {"none": block.saved, "selective": min(block.saved, block.inputs + block.products), "full": block.inputs}
    return by_mode[mode]


def _transient(block: BlockFacts, mode: Recompute) -> float:
    """Additional bytes for one sample at the peak of the block's backward pass."""
    if mode == "none":
        return block.extra if block.again else _OF_GRADIENTS * block.saved
    again = block.again or (1 + _OF_GRADIENTS) * block.saved
    return again if mode == "full" else max(block.extra, again - block.products)
